"""Arrival processes: moments against closed forms, determinism, and spreading of batched time stamps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.arrivals import (
    batch_interval_s,
    closed,
    gamma_bursts,
    poisson,
    rescale,
    spread_batches,
    spread_workload,
)
from traces.errors import InputError
from traces.importers.formats import load_workload

EXCERPTS = Path(__file__).parents[1] / "data" / "workloads"


def seeded(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_a_closed_batch_arrives_at_once() -> None:
    assert closed(3).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("coefficient_of_variation", [0.25, 1.0, 3.0])
def test_gamma_gaps_have_the_rate_and_variation_asked_for(coefficient_of_variation: float) -> None:
    arrival_s = gamma_bursts(200_000, 8.0, coefficient_of_variation, seeded())
    gaps_s = np.diff(arrival_s, prepend=0.0)
    assert (gaps_s >= 0).all()
    # Four standard errors of a mean of n gaps: 4 * cv / sqrt(n).
    assert gaps_s.mean() == pytest.approx(1 / 8, rel=4 * coefficient_of_variation / math.sqrt(200_000))
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(coefficient_of_variation, rel=0.03)


def test_poisson_gaps_are_exponential_and_counts_have_equal_mean_and_variance() -> None:
    arrival_s = poisson(200_000, 50.0, seeded())
    gaps_s = np.sort(np.diff(arrival_s, prepend=0.0))
    distance = np.abs(-np.expm1(-50.0 * gaps_s) - (np.arange(200_000) + 0.5) / 200_000).max()
    assert distance < 1.63 / math.sqrt(200_000)  # Kolmogorov-Smirnov at 1 %
    counts = np.bincount(arrival_s.astype(np.int64))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.1)


def test_bursts_raise_the_variance_of_counts() -> None:
    dispersion = []
    for coefficient_of_variation in (0.5, 1.0, 2.0, 4.0):
        arrival_s = gamma_bursts(100_000, 50.0, coefficient_of_variation, seeded())
        counts = np.bincount(arrival_s.astype(np.int64))[:-1]
        dispersion.append(counts.var() / counts.mean())
    assert dispersion == sorted(dispersion)
    assert dispersion[-1] > 8 * dispersion[1]


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: poisson(500, 3.0, rng),
        lambda rng: gamma_bursts(500, 3.0, 2.0, rng),
        lambda rng: spread_batches(np.repeat(np.arange(100) * 3.0, 5), rng),
    ],
)
def test_the_seed_decides_every_byte(draw: Callable) -> None:
    assert draw(seeded(1)).tobytes() == draw(seeded(1)).tobytes()
    assert draw(seeded(1)).tobytes() != draw(seeded(2)).tobytes()


def test_rescaling_keeps_the_pattern_and_sets_the_rate() -> None:
    arrival_s = gamma_bursts(1000, 3.0, 2.0, seeded())
    faster = rescale(arrival_s, 12.0)
    assert 1000 / faster[-1] == pytest.approx(12.0)
    np.testing.assert_allclose(faster / faster[-1], arrival_s / arrival_s[-1])


def test_mooncake_conversation_is_stamped_in_batches_and_the_others_are_not() -> None:
    conversation = load_workload(EXCERPTS / "mooncake_conversation_head700.jsonl")
    assert len(np.unique(conversation.arrival_s)) == 79
    assert batch_interval_s(conversation.arrival_s) == 3.0
    for file in ("mooncake_synthetic_head350.jsonl", "azure_2023_conv_head300.csv"):
        workload = load_workload(EXCERPTS / file)
        assert batch_interval_s(workload.arrival_s) is None
        with pytest.raises(InputError, match="not stamped in batches, expected batches every 3 s"):
            spread_workload(workload, seed=0)
    assert batch_interval_s(poisson(2000, 3.0, seeded())) is None
    assert batch_interval_s(closed(100)) is None
    assert batch_interval_s(np.arange(100) * 3.0) is None
    assert batch_interval_s(np.repeat(poisson(100, 0.3, seeded()), 5)) is None
    assert batch_interval_s(np.repeat(np.arange(100) * 3.0, 5)) == 3.0


def test_spreading_mooncake_leaves_no_batch_and_moves_nobody_past_the_next_stamp() -> None:
    conversation = load_workload(EXCERPTS / "mooncake_conversation_head700.jsonl")
    spread = spread_workload(conversation, seed=3)
    moved_s = spread.arrival_s - conversation.arrival_s
    assert moved_s.min() >= 0
    assert moved_s.max() <= 3.0
    # Uniform over the window: mean 1.5 s, standard error 3 / sqrt(12 * 700) = 0.033 s.
    assert moved_s.mean() == pytest.approx(1.5, abs=0.15)
    assert len(np.unique(spread.arrival_s)) == 700
    assert batch_interval_s(spread.arrival_s) is None
    edges_s = np.unique(conversation.arrival_s)
    batch_sizes = np.unique(conversation.arrival_s, return_counts=True)[1]
    np.testing.assert_array_equal(np.histogram(spread.arrival_s, [*edges_s, np.inf])[0], batch_sizes)
    np.testing.assert_array_equal(spread.prompt_tokens, conversation.prompt_tokens)
    np.testing.assert_array_equal(spread.hash_ids, conversation.hash_ids)


@settings(deadline=None)
@given(st.lists(st.integers(2, 6), min_size=4, max_size=30), st.integers(0, 5), st.sampled_from([0.5, 3.0, 7.0]))
def test_spread_batches_keeps_order_windows_and_counts(sizes: list[int], seed: int, window_s: float) -> None:
    stamps_s = np.arange(len(sizes)) * window_s
    arrival_s = np.repeat(stamps_s, sizes)
    spread_s = spread_batches(arrival_s, seeded(seed), window_s)
    assert (np.diff(spread_s) >= 0).all()
    assert (spread_s >= arrival_s).all()
    assert (spread_s <= arrival_s + window_s).all()


def test_spreading_needs_the_interval_of_the_file() -> None:
    arrival_s = np.repeat(np.arange(20) * 5.0, 4)
    with pytest.raises(InputError, match=r"are stamped every 5 s, expected batches every 3 s"):
        spread_batches(arrival_s, seeded())
    assert spread_batches(arrival_s, seeded(), 5.0)[-1] > 95.0


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: closed(0), "num_requests must be >= 1, got 0"),
        (lambda: poisson(-1, 1.0, seeded()), "num_requests must be >= 1, got -1"),
        (lambda: poisson(5, 0.0, seeded()), "rate_per_s must be finite and > 0, got 0.0"),
        (lambda: poisson(5, math.nan, seeded()), "rate_per_s must be finite and > 0, got nan"),
        (lambda: gamma_bursts(5, 1.0, 0.0, seeded()), "coefficient_of_variation must be finite and > 0, got 0.0"),
        (lambda: rescale(closed(4), 2.0), "at time 0 only"),
        (lambda: spread_batches(closed(4), seeded(), -3.0), "window_s must be finite and > 0, got -3.0"),
    ],
)
def test_impossible_arguments_are_refused(call: Callable, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        call()
