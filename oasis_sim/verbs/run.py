"""`oasis-sim run`: one point."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from oasis_sim.output import print_json
from oasis_sim.request import one_point
from oasis_sim.run_folder import run_folder
from simulator.provenance import utc_now
from simulator.sweep import make_grid, point_row
from traces.errors import InputError


def run(
    file: str | None,
    flags: Mapping[str, Sequence[str]],
    assignments: Sequence[str],
    out: str | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Simulate, write the run folder, print a card or one flat JSON object. Returns the exit code."""
    request = one_point(file, flags, assignments)
    grid = make_grid(request.points)
    start_s = time.perf_counter()
    with run_folder("run", request, grid, out) as folder:
        try:
            row = folder.rows.get(grid.keys[0]) or point_row(grid.points[0])
            if row["status"] != "ok":
                raise InputError(str(row["error"]))
        except BaseException:
            folder.discard()
            raise
        if row["point_key"] not in folder.rows:
            folder.append([row])
        folder.finish([row], {"finished": utc_now(), "wall_s": round(time.perf_counter() - start_s, 3)})
    if as_json:
        print_json({**row, "out": str(folder.path)})
    else:
        from oasis_sim.run_card import print_card

        print_card(row, request.points[0], folder.path)
    return 0
