"""The normal distribution's tables against closed forms."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from traces.synth.normal import above, both_above, both_above_fast, threshold_of


@pytest.mark.parametrize("threshold", [-3.0, -0.7, 0.0, 1.234, 4.0])
def test_above_is_the_survival_function(threshold: float) -> None:
    assert float(above(threshold)) == pytest.approx(1 - NormalDist().cdf(threshold), abs=1e-7)


@pytest.mark.parametrize("share", [0.001, 0.125, 0.5, 0.9])
def test_threshold_is_the_inverse(share: float) -> None:
    assert float(above(threshold_of(share))) == pytest.approx(share, rel=1e-6)


@pytest.mark.parametrize("correlation", [-0.5, 0.0, 0.3, 0.8, 0.99])
def test_quadrant_probability(correlation: float) -> None:
    """Sheppard: P(X > 0, Y > 0) = 1/4 + asin(r) / 2 pi."""
    assert float(both_above(0.0, correlation)) == pytest.approx(0.25 + math.asin(correlation) / (2 * math.pi), abs=1e-7)


@pytest.mark.parametrize("threshold", [-1.0, 0.5, 2.0])
def test_independent_and_equal_variables(threshold: float) -> None:
    alone = float(above(threshold))
    assert float(both_above(threshold, 0.0)) == pytest.approx(alone**2, abs=1e-6)
    assert float(both_above(threshold, 1.0)) == pytest.approx(alone, abs=1e-9)


def test_table_is_close_to_the_integral() -> None:
    rng = np.random.default_rng(0)
    threshold, correlation = rng.uniform(-4, 4, 4000), rng.uniform(0, 1, 4000)
    off = both_above_fast(threshold, correlation) - both_above(threshold, correlation)
    assert np.abs(off).max() < 2e-4
