"""Runs the points of a grid into a run folder: grouped by replay, resumed where an earlier run stopped."""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from simulator.executors import run_groups
from simulator.metrics import COLUMNS, PARAMETERS
from simulator.objective import RECALL_MARGIN
from simulator.results import Row, RunFolder
from simulator.specs.experiment import EngineSpec, ExperimentSpec, PlacementSpec
from simulator.specs.serving import ServingSpec
from simulator.systems import get_system
from traces.errors import OasisError

MAX_GROUP_POINTS = 16
"""Points that one worker takes at once: few enough that a kill loses little and the work spreads evenly."""


NOT_IN_REFERENCE = (
    "slack_blocks",
    "eviction",
    "transport",
    "gather_ctas",
    "miss_rule",
    "fetch_cap",
    "fetch_cap_scope",
    "lookahead_k",
    "lookahead_mode",
    "write_back",
    "draft_head",
    "verify_drafts",
)
"""Policy keys that the recall of uncapped on-demand retrieval does not depend on."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Distinct points in grid order with their keys."""

    points: tuple[ExperimentSpec, ...]
    keys: tuple[str, ...]

    @property
    def experiment_hash(self) -> str:
        """Names what the grid computes: its points (with software versions, in their keys) and what `best` means."""
        objectives = sorted({point.objective.model_dump_json() for point in self.points})
        return hashlib.sha256(json.dumps([self.keys, objectives]).encode()).hexdigest()


def make_grid(points: Sequence[ExperimentSpec]) -> Grid:
    """Validate every point and drop those that equal an earlier one in all that their system looks at.

    Raises InputError for the first point that cannot be simulated, before any is.
    """
    from simulator.points import point_key

    distinct: dict[str, ExperimentSpec] = {}
    for point in points:
        distinct.setdefault(point_key(point), point)
    return Grid(tuple(distinct.values()), tuple(distinct))


def run_grid(
    grid: Grid,
    folder: RunFolder,
    num_jobs: int,
    on_finished: Callable[[Sequence[Row]], None],
    simulate: Callable[[ExperimentSpec], Row] | None = None,
) -> list[Row]:
    """Rows of all points in grid order; those already in the folder are not run again, unless they failed.

    `on_finished` is called with the rows of each group once they are on the disk. `simulate` (default:
    `simulate_point`) must be importable by name.
    """
    open_points = [
        point
        for key, point in zip(grid.keys, grid.points, strict=True)
        if folder.rows.get(key, {"status": "failed"})["status"] == "failed"
    ]
    # Two files per serving point; closed batches write none.
    simulate = simulate or partial(simulate_point, folder=folder.path)
    for _, rows in run_groups(simulate, group_by_replay(open_points), num_jobs):
        folder.append(rows)
        on_finished(rows)
    lost = [key for key in grid.keys if key not in folder.rows]
    if lost:
        raise RuntimeError(f"{len(lost)} points came back under other keys: the simulator's files changed as it ran")
    return [folder.rows[key] for key in grid.keys]


def group_by_replay(points: Sequence[ExperimentSpec]) -> list[list[ExperimentSpec]]:
    """Points whose demand is the same (they differ in hardware, batch, placement or engine only), side by side.

    A serving point is a group of its own: it may take minutes, which an interruption of its group would lose.
    """
    groups: dict[str, list[ExperimentSpec]] = {}
    for number, point in enumerate(points):
        if point.serving is not None:
            groups[f"serving {number}"] = [point]
            continue
        replayed = point.model_dump(mode="json", exclude={"name", "hardware", "placement", "engine", "objective"})
        replayed["workload"].pop("batch_size")
        groups.setdefault(json.dumps(replayed, sort_keys=True), []).append(point)
    return [
        group[start : start + MAX_GROUP_POINTS]
        for group in groups.values()
        for start in range(0, len(group), MAX_GROUP_POINTS)
    ]


def simulate_point(point: ExperimentSpec, folder: Path | None = None) -> Row:
    """As `point_row`, but a fault of the program becomes a row with status `failed`: one point ends no sweep.

    A serving point writes its requests into `requests` in the folder, and what was used over time into `usage`, under
    the first 12 digits of its key.
    """
    from simulator.points import point_key

    requests_path = usage_path = None
    if folder is not None and point.serving is not None:
        name = f"{point_key(point)[:12]}.parquet"
        requests_path, usage_path = folder / "requests" / name, folder / "usage" / name
    try:
        return point_row(point, requests_path, usage_path)
    except OasisError:
        raise
    except Exception as error:
        return failed_row(point, error)


def point_row(
    point: ExperimentSpec,
    requests_path: Path | None = None,
    usage_path: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Row:
    """One row, with the recall that an admissible point needs in `min_recall`; the rest is `run_point`'s."""
    from simulator.points import run_point

    row = run_point(point, requests_path=requests_path, usage_path=usage_path, on_progress=on_progress)
    if row["status"] == "ok":
        row["min_recall"] = min_recall(point)
    return row


def min_recall(point: ExperimentSpec) -> float:
    """Least recall of an admissible point: as set, else that of uncapped on-demand retrieval minus the margin."""
    if point.objective.min_recall is not None:
        return point.objective.min_recall
    policy = {key: value for key, value in point.policy.items() if key not in NOT_IN_REFERENCE}
    changed: dict[str, Any] = {"policy": policy, "placement": PlacementSpec(), "engine": EngineSpec()}
    if point.serving is not None and not get_system(point.system).serving:
        changed["serving"] = ServingSpec()
    reference = point.model_copy(update=changed)
    return max(0.0, _reference_recall(reference.model_dump_json(exclude={"name", "objective"})) - RECALL_MARGIN)


@lru_cache(maxsize=1024)
def _reference_recall(point: str) -> float:
    """Of a point as JSON: the points of a sweep share few references."""
    from simulator.points import reference_recall

    return reference_recall(ExperimentSpec.model_validate_json(point))


def failed_row(point: ExperimentSpec, error: Exception) -> Row:
    """Row of a point whose simulation broke: its parameters as asked for, all results null."""
    from simulator.points import point_key

    asked: dict[str, Any] = point.model_dump(mode="json")
    row: Row = dict.fromkeys(COLUMNS)
    for name in PARAMETERS:
        section, _, key = name.rpartition(".")
        value = asked.get(section, {}).get(key) if section else asked.get(key)
        row[name] = None if isinstance(value, dict) else value
    frame = traceback.extract_tb(error.__traceback__)[-1]
    row["point_key"], row["status"] = point_key(point), "failed"
    row["error"] = f"{type(error).__name__}: {error} ({frame.name}, {frame.filename.rsplit('/', 1)[-1]}:{frame.lineno})"
    return row
