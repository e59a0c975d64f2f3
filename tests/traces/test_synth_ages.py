"""Blocks older than any measured: the slope of levels over age is found again, and decides a longer context."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from traces.memory import memory_group
from traces.synth.fit import Bias, HeadFit, HeadProcess
from traces.synth.measure import measure
from traces.synth.process import LayerProcess
from traces.synth.statistics import age_octaves

SIZE, BLOCKS, STEPS, RANKED = 16, 600, 200, 64


def _fitted(slope: float) -> HeadProcess:
    """Fit of white noise around levels of standard deviation 1 that fall by `slope` an octave of age."""
    rng = np.random.default_rng(3)
    age = BLOCKS - 2 - np.arange(BLOCKS - 1)
    levels = rng.standard_normal(BLOCKS - 1) + slope * np.log2(age + 1.0)
    scores = levels + rng.standard_normal((STEPS, BLOCKS - 1))
    true = np.argsort(-scores, axis=-1)[:, None, None, :RANKED]
    kv_len = SIZE * (BLOCKS - 1) + 1 + np.arange(STEPS)
    statistics = measure(memory_group(kv_len, {SIZE: {"true": true}}, None), SIZE)
    nothing = Bias(np.zeros((len(statistics.set_sizes), len(statistics.lags))), {})
    return HeadFit(statistics, statistics.layers[0].heads[0]).process(nothing)


@pytest.fixture(scope="module")
def falling() -> HeadProcess:
    return _fitted(-0.8)


def test_the_slope_is_found_again(falling: HeadProcess) -> None:
    """Somewhat too small: of blocks that are never ranked, how weak they are is not seen."""
    assert -0.85 < falling.age_slope < -0.5
    assert _fitted(0.0).age_slope == pytest.approx(0.0, abs=0.15)


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
    old, young = process.scores[0, 2:BLOCKS].mean(), process.scores[0, BLOCKS : count - 33].mean()
    octaves = np.log2(np.arange(BLOCKS, count - 2)).mean() - np.log2(np.arange(33, BLOCKS)).mean()
    assert old - young == pytest.approx(falling.age_slope * octaves, abs=0.15)
