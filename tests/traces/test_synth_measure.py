"""Statistics of small groups whose every set is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from traces.errors import InputError
from traces.memory import MemoryGroup, memory_group
from traces.synth.measure import measure, members, stale_losses
from traces.synth.statistics import TraceStatistics, load_statistics, popularity_groups, save_statistics

STEPS, CONTEXT, SIZE, RANKED = 40, 1024, 16, 20


def _group(with_mass: bool = True) -> MemoryGroup:
    """Blocks 10 … 13 are best at every step; ranks 4 … 7 alternate between 20 … 23 and 30 … 33; then 40 … 51.

    Drafts at distance 1 are the true ranking of the step where they were made.
    """
    kv_len = CONTEXT + np.arange(STEPS)
    rows = []
    for step in range(STEPS):
        turn = np.arange(20, 24) if step % 2 == 0 else np.arange(30, 34)
        rows.append(np.concatenate([np.arange(10, 14), turn, np.arange(40, 52)]))
    true = np.array(rows)[:, None, None, :RANKED]
    draft = np.concatenate([np.full_like(true[:1], -1), true[:-1]])
    blocks = -(-int(kv_len[-1]) // SIZE)
    mass = np.full((STEPS, 1, 1, blocks), 0.001)
    mass[..., 0], mass[..., 10] = 0.25, 0.125
    masses = {SIZE: mass / mass.sum(axis=-1, keepdims=True)} if with_mass else None
    return memory_group(kv_len, {SIZE: {"true": true, "draft1": draft}}, masses)


@pytest.fixture(scope="module")
def statistics() -> TraceStatistics:
    return measure(_group(), SIZE)


def test_members_ignore_padding() -> None:
    ids = np.array([[3, 1, -1]], np.int32)
    assert np.flatnonzero(members(ids, 3, 5)[0]).tolist() == [1, 3]
    assert np.flatnonzero(members(ids, 1, 5)[0]).tolist() == [3]


def test_persistence_of_known_sets(statistics: TraceStatistics) -> None:
    head = statistics.layers[0].heads[0]
    at = {size: head.persistence[i] for i, size in enumerate(statistics.set_sizes)}
    assert at[4] == pytest.approx((1.0,) * len(statistics.lags))
    odd = [1.0 if lag % 2 == 0 else 0.5 for lag in statistics.lags]
    assert at[8] == pytest.approx(odd)


def test_popularity_by_octave_of_age(statistics: TraceStatistics) -> None:
    """Of 63 selectable blocks the newest 16 are recent; ages 16 … 31 and 32 … 60 are the octaves. The best 4 are old
    and always there; of the best 8 two turns of four alternate, one of them a block across the two octaves."""
    head = statistics.layers[0].heads[0]
    young, old = (np.array(octave) for octave in statistics.popularity_groups)
    assert (young.sum(), old.sum()) == (16, 29)
    four, eight = (np.array(head.popularity[statistics.set_sizes.index(size)]) for size in (4, 8))
    assert four[: len(young)] @ young == 0
    assert four[len(young) :].tolist() == [1.0] * 4 + [0.0] * (len(old) - 4)
    assert eight[: len(young)] @ young == pytest.approx(1.5)
    assert eight[len(young) :] @ old == pytest.approx(6.5)


def test_groups_of_popularity_hold_every_block_and_the_first_ones_alone() -> None:
    for count in (1, 5, 32, 500, 60_000):
        groups = popularity_groups(count)
        assert sum(groups) == count
        assert min(groups) == groups[0] == 1
        assert max(groups) <= max(1, count / 10)


def test_drafts_against_target_and_the_position_before(statistics: TraceStatistics) -> None:
    state = statistics.layers[0].heads[0].drafts[0]["all"]
    eight = statistics.set_sizes.index(8)
    assert state.with_true[eight] == pytest.approx(0.5)
    assert state.with_before[eight] == pytest.approx(1.0)


def test_mass_is_where_it_was_put(statistics: TraceStatistics) -> None:
    head = statistics.layers[0].heads[0]
    assert head.sink_mass == pytest.approx(0.25 / (0.375 + 0.001 * 64), rel=0.08)
    assert head.octaves_by_rank[0] == 0.0
    assert head.octaves_by_rank[1] == pytest.approx(np.log2(0.001 / 0.125), abs=0.13)


def test_group_without_mass_has_sets_only() -> None:
    statistics = measure(_group(with_mass=False), SIZE)
    assert statistics.mass_ranks == ()
    assert statistics.layers[0].heads[0].octaves_by_rank == ()


def test_yaml_round_trip(statistics: TraceStatistics, tmp_path: Path) -> None:
    path = tmp_path / "statistics.yaml"
    save_statistics(statistics, path)
    again = load_statistics(path)
    assert again.set_sizes == statistics.set_sizes
    assert again.layers[0].heads[0].persistence[1] == pytest.approx(
        statistics.layers[0].heads[0].persistence[1], abs=1e-5
    )
    save_statistics(again, tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_text() == path.read_text()


def test_bad_yaml_names_file_and_key(statistics: TraceStatistics, tmp_path: Path) -> None:
    path = tmp_path / "statistics.yaml"
    save_statistics(statistics, path)
    path.write_text(path.read_text().replace("context_tokens: 1024", "context_tokens: -3"))
    with pytest.raises(InputError, match=r"statistics\.yaml: context_tokens"):
        load_statistics(path)
    path.write_text("set_sizes: [")
    with pytest.raises(InputError, match=r"statistics\.yaml"):
        load_statistics(path)


def test_too_short_a_request_is_refused() -> None:
    kv_len = CONTEXT + np.arange(10)
    true = np.tile(np.arange(12), (10, 1))[:, None, None]
    with pytest.raises(InputError, match="10 steps and 64 blocks"):
        measure(memory_group(kv_len, {SIZE: {"true": true}}), SIZE)


def test_stale_losses_by_hand() -> None:
    """One step, one head: the best two hold 0.9; the step before had blocks 0 and 2 (0.6), its best one 2 (0.1)."""
    mass = np.array([0.5, 0.4, 0.1], np.float32)
    losses = stale_losses(mass, np.array([0, 1], np.int32), np.array([2, 0], np.int32), (1, 2))
    assert losses == pytest.approx([0.4, 0.3])
