"""`oasis-sim run`: one point."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from oasis_sim.interruption import points_kept, told_on_interruption
from oasis_sim.next_command import sweep_around
from oasis_sim.output import print_json, tell_without_effect, told_where_not_written
from oasis_sim.progress import RequestProgress, StepProgress
from oasis_sim.request import one_point
from oasis_sim.run_folder import run_folder
from simulator.provenance import utc_now
from simulator.results import REQUESTS, USAGE, Row
from simulator.specs.experiment import ExperimentSpec
from simulator.sweep import make_grid, point_row
from traces.errors import InputError


def run(
    file: str | None,
    flags: Mapping[str, Sequence[str]],
    assignments: Sequence[str],
    out: str | None,
    as_json: bool,
    quiet: bool,
    timeline_steps: int | None = None,
) -> int:
    """Simulate, write the run folder, print a card or one flat JSON object. Returns the exit code."""
    if timeline_steps is not None and timeline_steps < 1:
        raise InputError(f"--timeline must be at least 1 step, got {timeline_steps}")
    request = one_point(file, flags, assignments)
    if timeline_steps is not None and request.points[0].serving is not None:
        raise InputError("--timeline shows the steps of a closed batch; leave it out or drop the serving section")
    num_steps = request.points[0].workload.output_tokens
    if timeline_steps is not None and timeline_steps > num_steps:
        raise InputError(
            f"--timeline {timeline_steps}: this run decodes {num_steps} steps (workload.output_tokens), so at most that"
        )
    grid = make_grid(request.points)
    tell_without_effect(request.without_effect)
    start_s = time.perf_counter()
    with run_folder("run", request, grid, out) as folder:
        try:
            row = folder.rows.get(grid.keys[0]) or _simulate(grid.points[0], folder.path, quiet)
            if row["status"] != "ok":
                raise InputError(str(row["error"]))
        except BaseException:
            folder.discard()
            raise
        with told_where_not_written(lambda: points_kept(len(folder.rows), 1, folder.path)):
            if row["point_key"] not in folder.rows:
                folder.append([row])
            if timeline_steps is not None:
                _write_timeline(grid.points[0], timeline_steps, folder.path, quiet)
            folder.finish([row], {"finished": utc_now(), "wall_s": round(time.perf_counter() - start_s, 3)})
    if as_json:
        print_json({**row, "out": str(folder.path)})
    else:
        if request.points[0].serving is not None:
            from oasis_sim.serving_card import print_card
        else:
            from oasis_sim.run_card import print_card

        print_card(row, request.points[0], folder.path, sweep_around(row, request.points[0], file, flags, assignments))
    return 0


def _simulate(point: ExperimentSpec, folder: Path, quiet: bool) -> Row:
    if point.serving is None:
        return point_row(point)
    progress = RequestProgress(quiet)
    kept = "a run keeps nothing, repeat the command to start anew"
    with told_on_interruption(lambda: f"{progress.served}; {kept}"), progress:
        return point_row(point, folder / REQUESTS, folder / USAGE, progress.update)


def _write_timeline(point: ExperimentSpec, num_steps: int, folder: Path, quiet: bool) -> None:
    """`timeline.json` of the first GPU's first steps, from the per-layer reference."""
    from analysis.timeline_export import spans_from_records, write_chrome_trace
    from simulator.points import timeline_records

    kept = f"the point stays in {folder}, without its timeline; repeat the command to go on"
    with told_on_interruption(lambda: kept), StepProgress(num_steps, quiet) as progress:
        spans = spans_from_records(timeline_records(point, num_steps, progress.update))
        write_chrome_trace(folder / "timeline.json", spans)
