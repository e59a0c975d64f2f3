"""Levels by age: those of measured octaves are kept, the slope beyond them is found again and decides a longer
context."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from traces.memory import memory_group
from traces.synth.fit import Bias, HeadFit, HeadProcess
from traces.synth.measure import measure
from traces.synth.process import LayerProcess
from traces.synth.statistics import TraceStatistics, age_octaves

SIZE, BLOCKS, STEPS, RANKED = 16, 600, 200, 64


def _statistics(slope: float, seed: int, drop: float = 0.0) -> TraceStatistics:
    """Of white noise around levels of standard deviation 1 that fall by `slope` an octave of age, and by `drop` at 256
    blocks."""
    rng = np.random.default_rng(seed)
    age = BLOCKS - 2 - np.arange(BLOCKS - 1)
    levels = rng.standard_normal(BLOCKS - 1) + slope * np.log2(age + 1.0) - drop * (age >= 256)
    scores = levels + rng.standard_normal((STEPS, BLOCKS - 1))
    true = np.argsort(-scores, axis=-1)[:, None, None, :RANKED]
    kv_len = SIZE * (BLOCKS - 1) + 1 + np.arange(STEPS)
    return measure(memory_group(kv_len, {SIZE: {"true": true}}, None), SIZE)


def _fitted(slope: float, seed: int = 3, drop: float = 0.0) -> HeadProcess:
    statistics = _statistics(slope, seed, drop)
    nothing = Bias(np.zeros((len(statistics.set_sizes), len(statistics.lags))), {})
    return HeadFit(statistics, statistics.layers[0].heads[0]).process(nothing)


@pytest.fixture(scope="module")
def falling() -> HeadProcess:
    return _fitted(-0.8)


@pytest.mark.parametrize("slope", [-0.2, -0.4, -0.8, -1.2])
def test_the_slope_is_found_again(slope: float) -> None:
    found = [_fitted(slope, seed).age_slope for seed in range(6)]
    assert np.mean(found) == pytest.approx(slope, rel=0.08)


def test_without_a_slope_none_is_found() -> None:
    assert _fitted(0.0).age_slope == pytest.approx(0.0, abs=0.15)


def test_every_octave_keeps_its_share_of_the_sets() -> None:
    """Also where levels do not fall evenly with age: the oldest octave has next to nothing, the others do not."""
    statistics, head = _statistics(-0.2, 3, drop=3.0), _fitted(-0.2, 3, drop=3.0)
    groups = [np.array(octave) for octave in statistics.popularity_groups]
    most = np.split(np.array(statistics.layers[0].heads[0].popularity[-1]), np.cumsum([len(g) for g in groups])[:-1])
    measured = [float(of @ count) for of, count in zip(most, groups, strict=True)]
    process = LayerProcess([head], BLOCKS, BLOCKS - 1, np.ones(1), 0, np.random.default_rng(0))
    inside = np.zeros(BLOCKS - 1)
    for _ in range(100):
        process.advance(BLOCKS - 1)
        inside[np.argsort(-process.scores[0, : BLOCKS - 1])[: statistics.set_sizes[-1]]] += 0.01
    by_age = inside[::-1]
    reached = [float(by_age[first:last].sum()) for first, last in head.nodes.spans]
    assert len(reached) == 4
    assert measured[3] < 1 < 5 < min(measured[:3])
    np.testing.assert_allclose(reached, measured, atol=0.03 * statistics.set_sizes[-1])


def test_older_is_never_stronger() -> None:
    assert _fitted(0.5).age_slope == 0.0


def test_octaves_cover_every_age_once() -> None:
    assert age_octaves(32, 480) == [(32, 64), (64, 128), (128, 256), (256, 512)]
    assert age_octaves(32, 100) == [(32, 64), (64, 132)]
    assert age_octaves(16, 10) == [(16, 26)]


def test_at_the_measured_context_age_changes_nothing(falling: HeadProcess) -> None:
    flat = replace(falling, age_slope=0.0)
    first, second = (
        LayerProcess([head], BLOCKS, BLOCKS - 1, np.ones(1), 0, np.random.default_rng(0)) for head in (falling, flat)
    )
    for process in (first, second):
        process.advance(BLOCKS - 1)
    np.testing.assert_allclose(first.scores, second.scores, rtol=1e-6)


def test_at_twice_the_context_the_older_half_is_weaker(falling: HeadProcess) -> None:
    count = 2 * BLOCKS
    process = LayerProcess([falling], count, count - 1, np.ones(1), 0, np.random.default_rng(0))
    process.advance(count - 1)
    (first, last), by_age = falling.nodes.spans[-1], process.scores[0, : count - 1][::-1]
    older = by_age[last : count - 3]
    octaves = np.log2(np.arange(last, count - 3) + 1).mean() - np.log2(np.arange(first, last) + 1).mean()
    assert older.mean() - by_age[first:last].mean() == pytest.approx(falling.age_slope * octaves, abs=0.15)
