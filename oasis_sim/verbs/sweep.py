"""`oasis-sim sweep`: a grid of points, its best one and why it is best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oasis_sim.output import EXIT_INPUT, print_json
from oasis_sim.request import many_points
from oasis_sim.run_points import run_points
from simulator.executors import checked_num_jobs
from simulator.objective import best_row, nearest_row


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
    rows, path, wall_s = run_points("sweep", request, out, processes, quiet)
    best, nearest = best_row(rows, request.maximize), nearest_row(rows, request.maximize)
    if as_json:
        print_json({"rows": rows, "best": best, "nearest": None if best else nearest, "out": str(path)})
    else:
        from oasis_sim.sweep_summary import print_summary

        print_summary(rows, request, path, wall_s)
    return 0 if any(row["status"] == "ok" for row in rows) else EXIT_INPUT
