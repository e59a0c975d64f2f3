"""`oasis-sim sweep`: a grid of points, its best one and why it is best."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oasis_sim.output import EXIT_INPUT, points_kept, print_json, told_on_interruption
from oasis_sim.progress import PointProgress
from oasis_sim.request import Request, many_points
from oasis_sim.run_folder import run_folder
from simulator.executors import checked_num_jobs
from simulator.objective import best_row, nearest_row
from simulator.provenance import utc_now
from simulator.results import Row
from simulator.sweep import make_grid, run_grid


def sweep(
    file: str | None,
    flags: Mapping[str, Sequence[str]],
    assignments: Sequence[str],
    out: str | None,
    as_json: bool,
    quiet: bool,
    num_jobs: int | None,
) -> int:
    """Simulate, write the run folder, print the summary or one JSON document. Returns the exit code."""
    processes = checked_num_jobs(num_jobs)
    request = many_points(file, flags, assignments)
    rows, path, wall_s = run_request(request, out, processes, quiet)
    best, nearest = best_row(rows, request.maximize), nearest_row(rows, request.maximize)
    if as_json:
        print_json({"rows": rows, "best": best, "nearest": None if best else nearest, "out": str(path)})
    else:
        from oasis_sim.sweep_summary import print_summary

        print_summary(rows, request, path, wall_s)
    return 0 if any(row["status"] == "ok" for row in rows) else EXIT_INPUT


def run_request(request: Request, out: str | None, num_jobs: int, quiet: bool) -> tuple[list[Row], Path, float]:
    """Rows in grid order, the run folder, and the wall time in seconds."""
    grid = make_grid(request.points)
    start_s = time.perf_counter()
    with run_folder("sweep", request, grid, out) as folder:
        num_done = sum(row["status"] != "failed" for key, row in folder.rows.items() if key in set(grid.keys))
        with (
            told_on_interruption(lambda: points_kept(len(folder.rows), len(grid.points), folder.path)),
            PointProgress(len(grid.points), num_done, quiet) as progress,
        ):
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
