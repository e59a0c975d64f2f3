from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulator.metrics import COLUMNS
from simulator.results import TABLE, RunFolder
from simulator.specs.experiment import ExperimentSpec
from simulator.sweep import MAX_GROUP_POINTS, Grid, group_by_replay, run_grid
from tests.simulator.fake_points import row_of


def _point(batch_size: int, fetch_cap: float = 1.0, **keys: Any) -> ExperimentSpec:
    return ExperimentSpec.model_validate(
        {"workload": {"batch_size": batch_size}, "policy": {"fetch_cap": fetch_cap}, **keys}
    )


def _grid(points: list[ExperimentSpec]) -> Grid:
    return Grid(tuple(points), tuple(row_of(point)["point_key"] for point in points))


POINTS = [_point(batch, cap) for cap in (0.1, 0.5, 1.0) for batch in (1, 2, 32, 128)]


def _run(path: Path, num_jobs: int, seen: list[dict[str, Any]]) -> list[dict[str, Any]]:
    grid = _grid(POINTS)
    with RunFolder(path, grid.experiment_hash, {}, {}) as folder:
        rows = run_grid(grid, folder, num_jobs, seen.extend, row_of)
        folder.finish(rows, {})
    return rows


def test_rows_and_table_are_the_same_at_any_number_of_jobs(tmp_path: Path) -> None:
    one, three = _run(tmp_path / "one", 1, []), _run(tmp_path / "three", 3, [])
    assert one == three == [row_of(point) for point in POINTS]
    assert (tmp_path / "one" / TABLE).read_bytes() == (tmp_path / "three" / TABLE).read_bytes()


def test_finished_points_are_reported_once_and_not_run_again(tmp_path: Path) -> None:
    first: list[dict[str, Any]] = []
    again: list[dict[str, Any]] = []
    rows = _run(tmp_path / "run", 1, first)
    assert _run(tmp_path / "run", 1, again) == rows
    assert len(first) == len(POINTS)
    assert again == []


def test_a_stopped_sweep_continues_where_it_was(tmp_path: Path) -> None:
    grid = _grid(POINTS)
    with RunFolder(tmp_path / "run", grid.experiment_hash, {}, {}) as folder:
        folder.append([row_of(point) for point in POINTS[5:9]])
    seen: list[dict[str, Any]] = []
    rows = _run(tmp_path / "run", 1, seen)
    assert [row["point_key"] for row in rows] == list(grid.keys)
    assert {row["point_key"] for row in seen} == set(grid.keys) - set(grid.keys[5:9])


def test_a_point_that_failed_is_tried_again(tmp_path: Path) -> None:
    grid = _grid(POINTS[:1])
    with RunFolder(tmp_path / "run", grid.experiment_hash, {}, {}) as folder:
        folder.append([dict.fromkeys(COLUMNS) | {"point_key": grid.keys[0], "status": "failed"}])
        (row,) = run_grid(grid, folder, 1, lambda rows: None, row_of)
    assert row["status"] == "ok"


def test_points_that_come_back_under_other_keys_are_not_taken_for_results(tmp_path: Path) -> None:
    grid = Grid(tuple(POINTS[:2]), ("one", "another"))
    with (
        RunFolder(tmp_path / "run", grid.experiment_hash, {}, {}) as folder,
        pytest.raises(RuntimeError, match="2 points came back under other keys"),
    ):
        run_grid(grid, folder, 1, lambda rows: None, row_of)


def test_points_of_one_replay_share_a_group() -> None:
    numa = [_point(8, 0.5, placement={"host_numa": where}) for where in ("local", "far", "interleave")]
    gpus = [_point(8, 0.5, hardware=name) for name in ("h200-sxm", "l40s")]
    others = [_point(8, 0.1), _point(8, 0.5, system="quest"), _point(8, 0.5, seed=1)]
    groups = group_by_replay([others[0], *numa, others[1], *gpus, _point(16, 0.5), others[2]])
    assert groups == [[others[0]], [*numa, *gpus, _point(16, 0.5)], [others[1]], [others[2]]]


def test_a_large_group_is_split() -> None:
    points = [_point(batch) for batch in range(1, 2 * MAX_GROUP_POINTS + 2)]
    groups = group_by_replay(points)
    assert [len(group) for group in groups] == [MAX_GROUP_POINTS, MAX_GROUP_POINTS, 1]
    assert [point for group in groups for point in group] == points


def test_the_hash_follows_points_and_objective_only() -> None:
    base = _grid(POINTS).experiment_hash
    assert base == _grid([point.model_copy(update={"name": "label"}) for point in POINTS]).experiment_hash
    assert base != _grid(POINTS[1:]).experiment_hash
    stricter = [ExperimentSpec.model_validate({**p.model_dump(), "objective": {"min_recall": 0.9}}) for p in POINTS]
    assert base != _grid(stricter).experiment_hash
