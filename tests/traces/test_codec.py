"""Ranking, bitmaps and mass levels against their definitions, on random data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.codec import (
    bitmap,
    decode_members,
    decode_steps,
    encode_steps,
    members_in_id_order,
    rank_levels,
    rank_members,
    rank_scores,
)
from traces.mass import pool_levels, quantise_mass, scale_of, unit_mass


def ranked_by_definition(levels: list[int], count: int) -> list[int]:
    """(level descending, id ascending), padded with −1."""
    best = sorted(range(len(levels)), key=lambda i: (-levels[i], i))[:count]
    return best + [-1] * (count - len(best))


@given(
    scores=st.lists(st.floats(-40, 40, width=32), min_size=0, max_size=70),
    count=st.integers(1, 40),
    per_octave=st.sampled_from([1, 8, 16]),
)
def test_rank_scores_is_level_descending_then_id(scores: list[float], count: int, per_octave: int) -> None:
    ids, levels = rank_scores(np.array(scores, np.float32), count, per_octave)
    anchor = sorted(scores, reverse=True)[min(count, len(scores)) - 1] if scores else 0.0
    expected = [round((float(np.float32(s)) - float(np.float32(anchor))) * per_octave) for s in scores]
    clipped = [min(level, 255) for level in expected]
    assert ids.tolist() == ranked_by_definition(clipped, count)
    assert levels.tolist() == [clipped[i] if i >= 0 else 0 for i in ids]


@given(levels=st.lists(st.integers(0, 255), min_size=1, max_size=70), count=st.integers(1, 80), data=st.data())
def test_rank_levels_leaves_out_the_excluded(levels: list[int], count: int, data: st.DataObject) -> None:
    excluded = data.draw(st.lists(st.booleans(), min_size=len(levels), max_size=len(levels)))
    ids, _ = rank_levels(np.array(levels, np.uint8), np.array(excluded), count)
    kept = [i for i in range(len(levels)) if not excluded[i]]
    expected = [kept[i] if i >= 0 else -1 for i in ranked_by_definition([levels[k] for k in kept], count)]
    assert ids.tolist() == expected


@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 9), blocks=st.integers(0, 60), members=st.integers(1, 20))
def test_ranked_sets_survive_bitmaps_and_xor(seed: int, steps: int, blocks: int, members: int) -> None:
    rng = np.random.default_rng(seed)
    ids, levels = rank_scores(rng.normal(scale=3, size=(steps, 2, 3, blocks)), members, 4)
    sorted_ids, sorted_levels = members_in_id_order(ids, levels)
    decoded = decode_members(decode_steps(encode_steps(bitmap(sorted_ids, blocks + 3))), members)
    np.testing.assert_array_equal(decoded, sorted_ids)
    np.testing.assert_array_equal(rank_members(decoded, sorted_levels), ids)


def test_too_many_members_name_the_row() -> None:
    bits = bitmap(np.array([[[0, 1, -1]], [[0, 1, 2]]], np.int32), 8)
    with pytest.raises(OverflowError) as caught:
        decode_members(bits, 2)
    assert tuple(int(i) for i in caught.value.args[0]) == (1, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_scores_are_refused_with_their_index(bad: float) -> None:
    scores = np.zeros((2, 3))
    scores[1, 2] = bad
    with pytest.raises(ValueError, match=r"\(1, 2\)"):
        rank_scores(scores, 2, 16)


def test_every_mass_level_is_its_eighth_octave() -> None:
    values = unit_mass()
    assert values[0] == 0
    np.testing.assert_allclose(values[1:], 2.0 ** ((np.arange(1, 256) - 255) / 8), rtol=3e-4)
    np.testing.assert_array_equal(quantise_mass(values[None, :]), np.arange(256, dtype=np.uint8)[None])


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=50))
def test_quantised_mass_is_within_half_a_level_and_sums_to_one(masses: list[float]) -> None:
    values = np.array(masses) / sum(masses)
    levels = quantise_mass(values)
    assert levels.max() == 255
    ratio = unit_mass()[levels] / (values / values.max())
    assert np.all(np.abs(np.log2(ratio)) <= 1 / 16 + 1e-3)
    assert (unit_mass()[levels] * scale_of(levels)).sum() == pytest.approx(1, abs=1e-5)


@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 60), factor=st.integers(1, 7))
def test_pooled_mass_is_the_sum_within_two_roundings(seed: int, blocks: int, factor: int) -> None:
    values = np.random.default_rng(seed).dirichlet(np.full(blocks, 0.3))
    levels = pool_levels(quantise_mass(values), factor)
    pooled = np.add.reduceat(values, np.arange(0, blocks, factor))
    decoded = unit_mass()[levels] * scale_of(levels)
    assert levels.shape == pooled.shape
    np.testing.assert_allclose(decoded, pooled, rtol=0.2, atol=1e-6)
    assert scale_of(levels, 0.25) == pytest.approx(scale_of(levels) / 4, rel=1e-6)


def test_a_row_without_mass_stays_empty() -> None:
    levels = quantise_mass(np.zeros((2, 4)))
    assert not levels.any()
    assert scale_of(levels).tolist() == [0, 0]
