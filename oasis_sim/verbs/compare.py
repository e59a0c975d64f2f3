"""`oasis-sim compare`: systems side by side at one setting, each at its best."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from oasis_sim.output import EXIT_INPUT, print_json, tell_without_effect, told_where_not_written
from oasis_sim.request import Request, make_request, read_settings, require_lists, said
from oasis_sim.run_points import run_points
from oasis_sim.settings import Settings, command_line_settings
from simulator.executors import checked_num_jobs
from simulator.experiment import expand, resolve, without_effect
from simulator.objective import best_by_system, best_row, nearest_row
from simulator.specs.experiment import ExperimentSpec
from simulator.systems import SYSTEMS, get_system
from traces.errors import InputError

DEFAULT_GRID = Path(__file__).parent.with_name("default_compare.yaml")


def compare(
    file: str | None,
    flags: Mapping[str, Sequence[str]],
    assignments: Sequence[str],
    out: str | None,
    as_json: bool,
    quiet: bool,
    num_jobs: int | None,
) -> int:
    """Simulate, write the run folder and its picture, print the table or one JSON document. Returns the exit code."""
    processes = checked_num_jobs(num_jobs)
    own, given = read_settings(file or str(DEFAULT_GRID)), command_line_settings(flags, assignments)
    request, left_out = comparison(own | given)
    tell_without_effect(without_effect(said(own if file else {}, given), request.points))
    rows, folder, _ = run_points("compare", request, out, processes, quiet)
    from analysis.report import plot_one

    with told_where_not_written(lambda: f"all points stay in {folder}; repeat the command to go on"):
        pictures = plot_one(folder, "comparison")
    best = best_row(rows, request.maximize)
    chosen = best_by_system(rows, request.maximize)
    if as_json:
        nearest = None if best else nearest_row(rows, request.maximize)
        print_json({"rows": chosen, "best": best, "nearest": nearest, "left_out": left_out, "out": str(folder)})
    else:
        from oasis_sim.compare_table import print_comparison

        print_comparison(rows, chosen, best, left_out, request, folder, pictures)
    return 0 if any(row["status"] == "ok" for row in rows) else EXIT_INPUT


def comparison(settings: Settings) -> tuple[Request, dict[str, str]]:
    """Points of every system that the setting serves, and why each other system is left out.

    Systems that are named must be served. Raises InputError for one that is not, and where none is.
    """
    require_lists(settings)
    named = settings.get("system")
    points: list[ExperimentSpec] = []
    left_out: dict[str, str] = {}
    for system in named or [name for name in SYSTEMS if "oracle" not in name]:
        get_system(str(system))
        kept, reason = _served({**settings, "system": [system]})
        points += kept
        if not kept:
            if named:
                raise InputError(f"system {system}: {reason}")
            left_out[str(system)] = reason
    if not points:
        raise InputError(next(iter(left_out.values())))
    systems = list(dict.fromkeys(point.system for point in points))
    config = make_request({key: values[:1] for key, values in settings.items()} | {"system": systems[:1]}).config
    for key, values in {**settings, "system": systems}.items():
        section, _, name = key.rpartition(".")
        (config[section] if section else config)[name] = values if len(values) > 1 else values[0]
    return Request(tuple(points), config), left_out


def _served(settings: Settings) -> tuple[list[ExperimentSpec], str]:
    """One system's points that can be simulated, and the first reason why another cannot."""
    points, reason = [], ""
    for values in itertools.product(*settings.values()):
        try:
            (point,) = expand(dict(zip(settings, values, strict=True)), {})
            if point not in points:
                resolve(point)
                points.append(point)
        except InputError as error:
            reason = reason or str(error)
    return points, reason
