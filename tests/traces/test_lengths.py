"""Length distributions: sample moments against closed forms, bounds, determinism, and the reasoning presets."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.arrivals import closed, poisson
from traces.errors import InputError
from traces.lengths import LENGTHS, Empirical, Fixed, LengthDistribution, LogNormal, Uniform, draw_workload


@pytest.mark.parametrize(
    ("lengths", "min_tokens", "max_tokens"),
    [
        (Fixed(700), 700, 700),
        (Uniform(3, 9), 3, 9),
        (LogNormal(1000, 0.5, 1, 10**9), 1, 10**9),
        (LogNormal(1000, 1.5, 400, 3000), 400, 3000),
        (LogNormal.with_mean(12_000, 0.6, 1, 32_768), 1, 32_768),
        (Empirical(np.array([5, 5, 80])), 5, 80),
    ],
)
def test_samples_have_the_stated_mean_and_bounds(lengths: LengthDistribution, min_tokens: int, max_tokens: int) -> None:
    tokens = lengths.sample(100_000, np.random.default_rng(5))
    assert tokens.dtype == np.int64
    assert tokens.shape == (100_000,)
    assert min_tokens <= tokens.min() <= tokens.max() <= max_tokens
    standard_error = tokens.std() / np.sqrt(100_000)
    assert tokens.mean() == pytest.approx(lengths.mean_tokens, abs=4 * standard_error + 1e-9)
    np.testing.assert_array_equal(tokens, lengths.sample(100_000, np.random.default_rng(5)))


def test_uniform_reaches_both_ends_evenly() -> None:
    counts = np.bincount(Uniform(3, 6).sample(40_000, np.random.default_rng(0)))[3:]
    np.testing.assert_allclose(counts, 10_000, rtol=0.05)


def test_unbounded_lognormal_has_the_textbook_mean_and_median() -> None:
    lengths = LogNormal(1000, 0.5, 1, 10**9)
    assert lengths.mean_tokens == pytest.approx(1000 * np.exp(0.125))
    tokens = lengths.sample(100_000, np.random.default_rng(1))
    assert np.median(tokens) == pytest.approx(1000, rel=0.01)
    assert np.log(tokens).std() == pytest.approx(0.5, rel=0.02)


@settings(deadline=None)
@given(st.floats(0.05, 3.0), st.integers(1, 500), st.integers(1, 60_000), st.floats(0.02, 0.98))
def test_with_mean_meets_its_mean_after_bounding(sigma: float, minimum: int, width: int, share: float) -> None:
    mean_tokens = minimum + share * width
    lengths = LogNormal.with_mean(mean_tokens, sigma, minimum, minimum + width)
    assert lengths.mean_tokens == pytest.approx(mean_tokens, rel=1e-6)


def test_a_lower_limit_cuts_more_outputs_and_never_lengthens_them() -> None:
    shares, means = [], []
    for max_tokens in (8_192, 16_384, 32_768, 131_072):
        lengths = LogNormal(10_000, 0.6, 1, max_tokens)
        tokens = lengths.sample(50_000, np.random.default_rng(2))
        shares.append((tokens == max_tokens).mean())
        means.append(lengths.mean_tokens)
    assert shares == sorted(shares, reverse=True)
    assert means == sorted(means)


@pytest.mark.parametrize(
    ("name", "mean_tokens", "max_tokens"), [("reasoning", 12e3, 32_768), ("reasoning-long", 23e3, 65_536)]
)
def test_reasoning_has_short_prompts_and_outputs_of_thousands(name: str, mean_tokens: float, max_tokens: int) -> None:
    lengths = LENGTHS[name]
    workload = draw_workload(name, poisson(20_000, 2.0, np.random.default_rng(0)), lengths, np.random.default_rng(9))
    assert lengths.output.mean_tokens == pytest.approx(mean_tokens)
    assert workload.output_tokens.mean() == pytest.approx(mean_tokens, rel=0.02)
    assert workload.output_tokens.max() == max_tokens
    assert np.quantile(workload.output_tokens, 0.05) > 3000
    assert workload.prompt_tokens.min() >= 27
    assert workload.prompt_tokens.mean() == pytest.approx(94, rel=0.06)
    assert abs(np.corrcoef(workload.prompt_tokens, workload.output_tokens)[0, 1]) < 0.03
    assert "model card" in lengths.source
    assert "sigma" in lengths.assumptions


def test_drawing_is_decided_by_the_seed() -> None:
    first = draw_workload("a", closed(50), LENGTHS["reasoning"], np.random.default_rng(1))
    again = draw_workload("a", closed(50), LENGTHS["reasoning"], np.random.default_rng(1))
    other = draw_workload("a", closed(50), LENGTHS["reasoning"], np.random.default_rng(2))
    assert first.output_tokens.tobytes() == again.output_tokens.tobytes() != other.output_tokens.tobytes()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Fixed(0), "Fixed: expected 1 <= min_tokens"),
        (lambda: Uniform(5, 4), "Uniform: expected 1 <= min_tokens <= max_tokens, got 5 and 4"),
        (lambda: LogNormal(0.0, 1.0, 1, 9), "median_tokens must be finite and > 0, got 0.0"),
        (lambda: LogNormal(5.0, 0.0, 1, 9), "sigma must be > 0 and <= 10, got 0.0"),
        (lambda: LogNormal.with_mean(40_000, 0.6, 1, 32_768), "must lie between min_tokens = 1 and max_tokens = 32768"),
        (lambda: Empirical(np.array([], np.int64)), "needs at least one length"),
        (lambda: Empirical(np.array([4, 0])), "each >= 1 token"),
    ],
)
def test_impossible_lengths_are_refused(make: Callable, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        make()
