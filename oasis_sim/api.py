"""oasis-sim from a notebook: the same points, folders and best point as the command line.

    from oasis_sim import api

    row = api.run({"system": "oasiskv", "policy.fetch_cap": 0.05})
    found = api.sweep({"system": ["quest", "oasiskv"], "policy": {"fetch_cap": [0.02, 0.05, 0.1]}})
    found.frame, found.best["throughput_tokens_per_s"], found.folder
    frame = api.load("runs/sweep-0123abcd")

Keys are those of an experiment file, nested or dotted; in a sweep any of them may be a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oasis_sim.request import make_request
from oasis_sim.settings import flatten
from oasis_sim.shadowing import require_own_packages
from simulator.objective import best_row
from simulator.sweep import make_grid, point_row
from traces.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

require_own_packages()


@dataclass(frozen=True, slots=True)
class SweepResult:
    rows: list[dict[str, Any]]
    """Grid order, columns of `simulator.metrics`; undefined is None."""
    best: dict[str, Any] | None
    """Row that maximises `objective.maximize` with enough recall."""
    folder: Path

    @property
    def frame(self) -> pd.DataFrame:
        """`rows` as pandas reads them from the run folder: undefined numbers are NaN."""
        return load(self.folder)


def run(experiment: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Simulate one point, write nothing, return its row; `status` says whether it fits.

    Raises InputError for a key, name or value that cannot be used.
    """
    request = make_request(flatten(experiment or {}, "experiment"))
    if len(request.points) > 1:
        raise InputError(f"run takes one value per key, got {len(request.points)} points; use sweep")
    return point_row(make_grid(request.points).points[0])


def sweep(experiment: Mapping[str, Any], out: str | Path | None = None, jobs: int = 1) -> SweepResult:
    """Simulate all combinations of the listed values into a run folder, resuming what is in it.

    With `jobs` above 1 worker processes import the calling script: guard it with `if __name__ == "__main__"`.
    Raises InputError as `run` does, and for a folder that cannot be written or holds another experiment.
    """
    from oasis_sim.run_points import run_points

    request = make_request(flatten(experiment, "experiment"))
    rows, folder, _ = run_points("sweep", request, None if out is None else str(out), jobs, quiet=True)
    return SweepResult(rows, best_row(rows, request.maximize), folder)


def load(folder: str | Path) -> pd.DataFrame:
    """Table of a finished run folder, one row per point. Raises InputError when it is missing or unfinished."""
    from analysis.load import load_results

    return load_results(Path(folder))
