"""Overlap, recall and misses of predicted sets: by hand, and equal to a plain reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.traces import tiny
from traces.errors import InputError
from traces.group import TraceGroup
from traces.memory import MemoryGroup, memory_group
from traces.misses import AGE_BOUNDS_TOKENS, HISTORY_STEPS, miss_rows
from traces.overlap import Grid, expect_random, open_groups, overlap_rows, write_overlap
from traces.writer import TraceWriter


def by_hand(**more: Any) -> MemoryGroup:
    """Blocks of 4, 17 tokens and more: four selectable blocks and the open one; K = 2, one layer, one head."""
    true = np.array([[0, 1], [0, 2], [2, 3]])[:, None, None]
    draft = np.array([[-1, -1], [2, 0], [2, 1]])[:, None, None]
    mass = np.array([[4, 2, 0, 0, 2], [4, 0, 2, 0, 2], [0, 0, 4, 2, 2]])[:, None, None] / 8
    return memory_group([17, 18, 19], {4: {"true": true, "draft1": draft}}, {4: mass}, **more)


def test_rows_by_hand() -> None:
    found = list(overlap_rows(by_hand(accepted=[[False, True, False]]), 4, 2))
    rows = {
        (row["predictor"], row["guess"]): row for row in found if row["distance"] == 1 and row["selector"] != "exact"
    }
    assert rows["previous", "all"]["overlap"] == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert rows["draft", "all"]["overlap"] == pytest.approx((2 / 2 + 1 / 2) / 2)
    assert rows["random", "all"]["overlap"] == pytest.approx(2 / 4)
    assert rows["previous", "all"]["recall"] == pytest.approx(((4 + 2) / 8 + (4 + 2) / 8) / 2, abs=1e-6)
    assert rows["draft", "all"]["recall"] == pytest.approx((8 / 8 + (4 + 2) / 8) / 2, abs=1e-6)
    assert rows["draft", "all"]["recall_true"] == pytest.approx(1, abs=1e-6)
    assert rows["random", "all"]["recall"] == pytest.approx(2 / 8 + 2 / 4 * 6 / 8, abs=1e-6)
    assert (rows["draft", "right"]["overlap"], rows["draft", "wrong"]["overlap"]) == (1, 0.5)
    assert (rows["previous", "right"]["steps"], rows["previous", "wrong"]["steps"]) == (1, 1)
    assert ("draft", "none") not in rows
    with pytest.raises(InputError, match="5 blocks of 4 are not ranked"):
        list(overlap_rows(by_hand(), 4, 5))


def test_a_block_that_filled_since_is_held_but_not_predicted() -> None:
    true = np.array([[0, 1], [0, 4]])[:, None, None]
    mass = np.array([[4, 0, 0, 0, 4, 0], [2, 0, 0, 0, 4, 2]])[:, None, None] / 8
    group = memory_group([20, 21], {4: {"true": true}}, {4: mass})
    row = next(row for row in overlap_rows(group, 4, 2) if row["predictor"] == "previous")
    assert row["overlap"] == 0.5
    assert row["recall"] == pytest.approx(1, abs=1e-6)
    chance = next(row for row in overlap_rows(group, 4, 2) if row["predictor"] == "random")
    assert chance["overlap"] == pytest.approx(2 / 4 * 1 / 2), "drawn from 0 … 3, which lacks block 4"
    places = {row["bin"]: row for row in miss_rows(group, 4, 2) if row["by"] == "place"}
    assert sum(row["true_blocks"] for row in places.values()) == 1, "block 4 is resident"


def test_misses_by_hand() -> None:
    """Step 1 needs 0 (stayed) and 2 (new), step 2 needs 2 (stayed) and 3 (new); the draft of step 2 lacks 3."""
    rows = {
        (row["predictor"], row["by"], row["bin"]): row
        for row in miss_rows(by_hand(), 4, 2)
        if row["distance"] == 1 and row["guess"] == "all"
    }
    assert [rows["draft", "change", name]["true_blocks"] for name in ("stayed", "returned", "new")] == [1, 0, 1]
    assert [rows["draft", "change", name]["missed_blocks"] for name in ("stayed", "returned", "new")] == [0, 0, 0.5]
    assert rows["draft", "change", "new"]["missed_mass"] == pytest.approx(2 / 8 / 2, abs=1e-6)
    assert rows["previous", "change", "new"]["missed_blocks"] == 1
    assert rows["draft", "place", "first block"]["true_blocks"] == 0.5
    assert rows["draft", "place", "0 to 64"]["missed_blocks"] == 0.5
    assert rows["draft", "churn", "40 % and more"]["row_share"] == 1
    assert ("draft", "churn", "0 to 5 %") not in rows
    # Two steps ahead step 2 needs 2 and 3, and neither was ever needed before.
    later = {row["bin"]: row for row in miss_rows(by_hand(), 4, 2) if row["by"] == "change" and row["distance"] == 2}
    assert later["new"]["true_blocks"] == 2


@pytest.fixture
def trace_folder(tmp_path: Path) -> Path:
    steps = 70
    with TraceWriter(tmp_path / "tiny.zarr", tiny.trace_attributes()) as writer:
        group = writer.group("task", tiny.group_attributes(steps))
        for truth in tiny.truth_of(steps):
            group.append(tiny.record_of(truth))
    return tmp_path / "tiny.zarr"


@pytest.fixture
def group(trace_folder: Path) -> TraceGroup:
    return next(open_groups([str(trace_folder)]))[1]


def reference(group: TraceGroup, size: int, count: int, name: str, distance: int) -> list[dict[str, Any]]:
    """Step by step with Python sets: overlap, recall and misses by (by, bin)."""
    true, predicted, dense = group.ranking("true", size), group.ranking(name, size), group.mass(size).dense()
    shift = distance if name == "true" else 0
    rows = []
    for t in range(distance, group.num_positions):
        now, then = (int(group.kv_len[at] - 1) // size for at in (t, t - distance))
        for layer in range(true.shape[1]):
            for head in range(true.shape[2]):
                needed = {int(b) for b in true[t, layer, head, :count]}
                named = {int(b) for b in predicted[t - shift, layer, head, :count] if b >= 0}
                filled, mass = set(range(then, now)), dense[t, layer, head]
                missed: dict[tuple[str, Any], set[int]] = {}
                before = {int(b) for b in true[t - distance, layer, head, :count]}
                lately = {
                    int(b)
                    for at in range(max(0, t - distance - HISTORY_STEPS), t - distance)
                    for b in true[at, layer, head, :count]
                }
                for block in needed - named - filled:
                    kind = "stayed" if block in before else "returned" if block in lately else "new"
                    age = int(group.kv_len[t]) - (block + 1) * size
                    place = 0 if block == 0 else 1 + sum(age >= bound for bound in AGE_BOUNDS_TOKENS)
                    for key in (("change", kind), ("place", place)):
                        missed.setdefault(key, set()).add(block)
                rows.append(
                    {
                        "layer": layer, "head": head, "overlap": len(needed & named) / count,
                        "recall": sum(float(mass[b]) for b in named | filled | {now}),
                        "recall_true": sum(float(mass[b]) for b in needed | {now}), "missed": missed,
                        "mass": {key: sum(float(mass[b]) for b in blocks) for key, blocks in missed.items()},
                    }
                )  # fmt: skip
    return rows


@pytest.mark.parametrize(("name", "distance"), [("true", 1), ("true", 3), ("draft1", 1), ("draft2", 2)])
def test_equal_to_the_plain_reference(group: TraceGroup, name: str, distance: int) -> None:
    size, count, predictor = 4, 7, "previous" if name == "true" else "draft"
    expected = reference(group, size, count, name, distance)
    rows = [
        row
        for row in overlap_rows(group, size, count)
        if (row["predictor"], row["distance"], row["guess"], row["selector"]) == (predictor, distance, "all", "minmax")
    ]
    assert len(rows) == 4
    for row in rows:
        own = [r for r in expected if (group.layers(size)[r["layer"]], r["head"]) == (row["layer"], row["kv_head"])]
        for column in ("overlap", "recall", "recall_true"):
            assert row[column] == pytest.approx(np.mean([r[column] for r in own]), abs=1e-6)
    for index, layer in enumerate(group.layers(size)):
        own = [r for r in expected if r["layer"] == index]
        for row in miss_rows(group, size, count):
            if (row["predictor"], row["distance"], row["guess"], row["layer"]) != (predictor, distance, "all", layer):
                continue
            key = (row["by"], row["order"] if row["by"] == "place" else row["bin"])
            if row["by"] == "churn":
                continue
            blocks = np.mean([len(r["missed"].get(key, ())) for r in own])
            assert row["missed_blocks"] == pytest.approx(blocks, abs=1e-6), key
            assert row["missed_mass"] == pytest.approx(np.mean([r["mass"].get(key, 0) for r in own]), abs=1e-6)


def test_bins_add_up_to_what_overlap_leaves(group: TraceGroup) -> None:
    count = 7
    overlap = [r for r in overlap_rows(group, 4, count) if r["predictor"] == "draft" and r["selector"] == "minmax"]
    for row in (r for r in overlap if r["kv_head"] == 0):
        heads = [r["overlap"] for r in overlap if all(r[k] == row[k] for k in ("layer", "distance", "guess"))]
        for by in ("change", "place", "churn"):
            bins = [
                r
                for r in miss_rows(group, 4, count)
                if r["predictor"] == "draft" and r["by"] == by
                and all(r[k] == row[k] for k in ("layer", "distance", "guess"))
            ]  # fmt: skip
            found = sum(r["true_blocks"] - r["missed_blocks"] for r in bins) / count
            assert found == pytest.approx(np.mean(heads), abs=1e-6)
            if by == "churn":
                assert sum(r["row_share"] for r in bins) == pytest.approx(1)


def test_random_is_the_mean_of_draws(group: TraceGroup) -> None:
    size, count, distance, draws = 4, 7, 2, 400
    expected = expect_random(group, size, count, 0, distance)
    assert expected.recall is not None
    rng = np.random.default_rng(0)
    true, dense = group.ranking("true", size)[:, 0, :, :count], group.mass(size).dense()[:, 0]
    selectable = (group.kv_len - 1) // size
    for t in (distance, 40, group.num_positions - 1):
        now, then = int(selectable[t]), int(selectable[t - distance])
        overlap, recall = [], []
        for _ in range(draws):
            drawn = set(rng.choice(then, count, replace=False).tolist())
            overlap.append(len(drawn & set(true[t, 0].tolist())) / count)
            recall.append(dense[t, 0, sorted(drawn | set(range(then, now + 1)))].sum())
        for values, value in ((overlap, expected.overlap), (recall, expected.recall)):
            assert value[t - distance, 0] == pytest.approx(np.mean(values), abs=float(4 * np.std(values) / draws**0.5))


def test_block_sizes_agree_where_blocks_come_in_pairs() -> None:
    """Blocks of 4 ranked as the halves of blocks of 8: the same sets, so the same overlap and recall."""
    rng = np.random.default_rng(1)
    kv_len = np.arange(65, 69)
    wide = np.stack([[rng.permutation(8) for _ in range(2)] for _ in kv_len])[:, None, :, :5]
    fine = np.stack([2 * wide, 2 * wide + 1], axis=-1).reshape(*wide.shape[:3], 10)
    mass = rng.dirichlet(np.ones(18), size=(len(kv_len), 1, 2))
    mass[..., 16] += mass[..., 17]
    mass[..., 17] = 0
    pooled = mass.reshape(*mass.shape[:3], 9, 2).sum(axis=-1)
    narrow = memory_group(kv_len, {4: {"true": fine}}, {4: mass})
    coarse = memory_group(kv_len, {8: {"true": wide}}, {8: pooled})
    for one, other in zip(overlap_rows(narrow, 4, 6, 2), overlap_rows(coarse, 8, 3, 2), strict=True):
        assert (one["predictor"], one["distance"]) == (other["predictor"], other["distance"])
        if one["selector"] == "minmax":
            assert one["overlap"] == pytest.approx(other["overlap"])
            assert one["recall"] == pytest.approx(other["recall"], abs=0.02), "levels are 1/8 octave"


def test_a_synthetic_trace_without_every_mass_has_no_recall(trace_folder: Path) -> None:
    group = next(open_groups([str(trace_folder)]))[1]
    assert not group.has_block_mass(5)
    rows = list(overlap_rows(group, 5, 6))
    assert rows
    assert all(row["recall"] is None and row["overlap"] is not None for row in rows)
    assert all(row["missed_mass"] is None for row in miss_rows(group, 5, 6))


def test_without_a_guess_the_draft_is_the_step_that_issued_it() -> None:
    group = next(open_groups(["smollm2-135m-reasoning"]))[1]
    rows = [row for row in overlap_rows(group, 64, 8) if row["guess"] == "none" and row["selector"] == "minmax"]
    draft, previous = (
        {tuple(row[k] for k in ("layer", "kv_head", "distance")): row for row in rows if row["predictor"] == kind}
        for kind in ("draft", "previous")
    )
    assert len(draft) == 6 * 3 * 4
    for key, row in draft.items():
        assert 0 < row["steps"] < 0.2 * 128
        assert (row["overlap"], row["recall"]) == (previous[key]["overlap"], previous[key]["recall"])


def test_files_and_refusals(trace_folder: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    path = tmp_path / "overlap.parquet"
    number = write_overlap([str(trace_folder)], path, Grid((28,), None, (4, 8)))
    table = pq.read_table(path).to_pydict()
    assert len(table["trace"]) == number
    assert set(table["num_blocks"]) == {7, 3}
    assert set(table["task"]) == {"task"}
    assert set(table["guess"]) == {"all", "right"}
    with pytest.raises(InputError, match="none ranks a budget"):
        write_overlap([str(trace_folder)], path, Grid((4096,), None))
    with pytest.raises(InputError, match="both named 'tiny-trace'"):
        write_overlap([str(trace_folder)] * 2, path, Grid())
    with pytest.raises(InputError, match="max_distance 9"):
        Grid(max_distance=9)
