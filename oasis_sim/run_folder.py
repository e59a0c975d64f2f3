"""Which folder a verb writes, and what its manifest says before any point has run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oasis_sim.request import Request
from simulator.provenance import provenance, utc_now
from simulator.results import RunFolder
from simulator.sweep import Grid


def run_folder(verb: str, request: Request, grid: Grid, out: str | None) -> RunFolder:
    """`--out` as given, else `runs/` and the experiment's name or `<verb>-<first 8 hex of its hash>`."""
    name = request.name or f"{verb}-{grid.experiment_hash[:8]}"
    path = Path(out) if out is not None else Path("runs") / name
    return RunFolder(path, grid.experiment_hash, request.config, experiment_manifest(verb, request, grid))


def experiment_manifest(verb: str, request: Request, grid: Grid) -> dict[str, Any]:
    """Provenance of the run: what was asked, by which software, on which inputs."""
    return {
        "verb": verb,
        "started": utc_now(),
        **provenance(),
        "seed": request.points[0].seed,
        "objective": request.points[0].objective.model_dump(mode="json"),
        "num_points": len(grid.points),
    }
