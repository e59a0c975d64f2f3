"""Which folder a verb writes, and what its manifest says before any point has run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oasis_sim.request import Request
from simulator.cache import cache_key
from simulator.catalog import load_hardware, load_model
from simulator.experiment import resolve
from simulator.provenance import provenance, utc_now
from simulator.results import RunFolder
from simulator.specs.base import Spec
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
        "content_hashes": content_hashes(grid),
        "policies": resolved_policies(request, grid),
    }


def content_hashes(grid: Grid) -> dict[str, dict[str, str]]:
    """sha256 of each trace, hardware profile and model that the points name: a name's content may change."""
    hashes: dict[str, dict[str, str]] = {"traces": {}, "hardware": {}, "models": {}}
    for point in grid.points:
        if point.trace not in hashes["traces"]:
            hashes["traces"][point.trace] = resolve(point).trace.content_hash
        if point.hardware not in hashes["hardware"]:
            hashes["hardware"][point.hardware] = _spec_hash(load_hardware(point.hardware))
        if point.model not in hashes["models"]:
            hashes["models"][point.model] = _spec_hash(load_model(point.model))
    return hashes


def resolved_policies(request: Request, grid: Grid) -> dict[str, dict[str, Any]]:
    """Policy of each system with all defaults, without the keys that differ between its points."""
    policies: dict[str, dict[str, Any]] = {}
    for point in grid.points:
        if point.system not in policies:
            policy = resolve(point).policy.model_dump(mode="json")
            policies[point.system] = {key: value for key, value in policy.items() if key not in request.swept_policy}
    return policies


def _spec_hash(spec: Spec) -> str:
    return cache_key(spec.model_dump(mode="json"))
