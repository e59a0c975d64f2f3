"""Run a request's points into a run folder: with progress, resumed where it was cut, its outcome in the manifest."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oasis_sim.interruption import points_kept, told_on_interruption
from oasis_sim.output import tell_without_effect, told_where_not_written
from oasis_sim.progress import PointProgress
from oasis_sim.request import Request
from oasis_sim.run_folder import run_folder
from simulator.objective import best_row
from simulator.provenance import utc_now
from simulator.results import Row
from simulator.sweep import make_grid, run_grid


def run_points(
    verb: str, request: Request, out: str | None, num_jobs: int, quiet: bool
) -> tuple[list[Row], Path, float]:
    """Simulate what the verb's run folder does not hold yet: rows in grid order, the folder, wall time in seconds."""
    grid = make_grid(request.points)
    tell_without_effect(request.without_effect)
    start_s = time.perf_counter()

    def kept() -> str:
        return points_kept(len(folder.rows), len(grid.points), folder.path)

    with (
        run_folder(verb, request, grid, out) as folder,
        told_on_interruption(kept),
        told_where_not_written(kept),
    ):
        num_done = sum(row["status"] != "failed" for key, row in folder.rows.items() if key in set(grid.keys))
        with PointProgress(len(grid.points), num_done, quiet) as progress:
            rows = run_grid(grid, folder, num_jobs, progress.advance)
        wall_s = time.perf_counter() - start_s
        folder.finish(rows, _outcome(rows, request, wall_s, num_jobs))
    return rows, folder.path, wall_s


def _outcome(rows: Sequence[Row], request: Request, wall_s: float, num_jobs: int) -> dict[str, Any]:
    best = best_row(rows, request.maximize)
    return {
        "finished": utc_now(),
        "wall_s": round(wall_s, 3),
        "jobs": num_jobs,
        "num_points_by_status": {
            status: sum(row["status"] == status for row in rows) for status in ("ok", "does_not_fit", "failed")
        },
        "best_point_key": best and best["point_key"],
    }
