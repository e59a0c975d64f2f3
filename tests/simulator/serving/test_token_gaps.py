"""Quantiles of the gaps between tokens against numpy's, and that they take no more memory in a longer run."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.serving.token_gaps import BINS_PER_OCTAVE, TokenGaps


def test_quantiles_are_those_of_all_gaps_one_by_one():
    drawn = np.random.default_rng(3)
    gaps_s, counts = drawn.lognormal(-4.0, 1.5, 5_000), drawn.integers(1, 60, 5_000)
    gaps = TokenGaps()
    for gap_s, count in zip(gaps_s.tolist(), counts.tolist(), strict=True):
        gaps.add(gap_s, count)
    every_s = np.repeat(gaps_s, counts)
    assert gaps.num_gaps == len(every_s)
    assert gaps.mean_s == pytest.approx(every_s.mean())
    for share in (0.0, 0.01, 0.5, 0.9, 0.99, 1.0):
        expected_s = np.quantile(every_s, share, method="inverted_cdf")
        assert gaps.quantile_s(share) == pytest.approx(expected_s, rel=2 ** (1 / BINS_PER_OCTAVE) - 1)


def test_a_rare_stop_is_beyond_its_quantile_and_nowhere_before():
    gaps = TokenGaps()
    gaps.add(0.01, 989)
    gaps.add(5.0, 11)
    assert gaps.quantile_s(0.98) == pytest.approx(0.01, rel=1e-12)
    assert gaps.quantile_s(0.99) == pytest.approx(5.0, rel=1e-12)


def test_without_gaps_there_is_nothing_to_tell():
    gaps = TokenGaps()
    gaps.add(0.5, 0)
    assert (gaps.num_gaps, gaps.mean_s, gaps.quantile_s(0.99)) == (0, None, None)


def test_memory_does_not_grow_with_the_run():
    gaps = TokenGaps()
    for gap_s in np.random.default_rng(0).uniform(0.01, 0.08, 20_000).tolist():
        gaps.add(gap_s)
    assert len(gaps._bins) <= 3 * BINS_PER_OCTAVE + 1
