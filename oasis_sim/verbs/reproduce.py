"""`oasis-sim reproduce`: every published figure beside the simulated one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from oasis_sim.output import print_json
from oasis_sim.settings import command_line_settings
from simulator.catalog import load_hardware, load_model
from simulator.experiment import experiment_keys
from simulator.reproduce.report import Result, decode_step_rows, reproduce, row_document
from simulator.reproduce.sensitivity import derive
from simulator.reproduce.table import Experiment, published
from simulator.specs.validation import suggest
from traces.errors import InputError

DECODE_STEP = "decode-step-h200"


def run(
    experiment: str | None, given: Mapping[str, Any], assignments: Sequence[str], derived: bool, as_json: bool,
    quiet: bool,
) -> int:  # fmt: skip
    """Print the table or one JSON document. `given`: dotted keys of another setting, None where not set."""
    overrides = _overrides(given, assignments)
    chosen, with_steps = _chosen(experiment)
    if derived:
        return _derive(chosen, as_json)
    results = []
    for one in chosen:
        if overrides and not one.points:
            continue
        if not quiet and sys.stderr.isatty():
            print(f"{one.name} …", file=sys.stderr)
        results.append(reproduce(one, overrides))
    steps = decode_step_rows() if with_steps and not overrides else []
    if as_json:
        print_json(_document(results, steps))
    else:
        from oasis_sim.reproduce_tables import print_tables

        print_tables(results, steps, overrides)
    return 0


def _overrides(given: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Keys that are given. Raises InputError for an unknown key or name, a key given twice and no positive count."""
    overrides = {key: value for key, value in given.items() if value is not None}
    for key, values in command_line_settings({}, assignments).items():
        if key not in experiment_keys():
            raise InputError(f"unknown key {key!r}: {suggest(key, experiment_keys())}")
        if key in overrides or len(values) > 1:
            raise InputError(f"{key} is given twice" if key in overrides else f"{key}: takes one value here")
        overrides[key] = values[0]
    for key in ("workload.batch_size", "workload.context_tokens", "placement.tensor_parallel"):
        if key in overrides and (not isinstance(overrides[key], int) or overrides[key] < 1):
            raise InputError(f"{key}: must be a positive whole number, got {overrides[key]}")
    if "model" in overrides:
        load_model(overrides["model"])
    if "hardware" in overrides:
        load_hardware(overrides["hardware"])
    return overrides


def _chosen(name: str | None) -> tuple[Sequence[Experiment], bool]:
    """Experiments asked for, and whether the measured decode steps are among them."""
    names = [one.name for one in published()]
    if name is None:
        return published(), True
    if name not in (*names, DECODE_STEP):
        raise InputError(f"unknown experiment {name!r}: {suggest(name, (*names, DECODE_STEP))}")
    return [one for one in published() if one.name == name], name == DECODE_STEP


def _derive(experiments: Sequence[Experiment], as_json: bool) -> int:
    """Recompute every derived input from its row, beside the value that the table holds."""
    rows = [row for one in experiments for row in derive(one)]
    if as_json:
        print_json({"derived": rows})
    else:
        from oasis_sim.output import print_rows

        print_rows(rows)
    return 0


def _document(results: Sequence[Result], steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "rows": [row_document(result.experiment, row) for result in results for row in result.rows] + steps,
        "experiments": [
            {
                "name": result.experiment.name,
                "title": result.experiment.title,
                "source": result.experiment.source,
                "settings": result.experiment.settings,
                "published_keys": list(result.experiment.published_keys),
                "inputs": {name: given.model_dump(mode="json") for name, given in result.experiment.inputs.items()},
                "num_free_inputs": result.experiment.num_free_inputs,
                "batch_sizes": result.batches,
                "sensitivity": [asdict(effect) for effect in result.effects],
                "needs": [asdict(need) for need in result.needs],
            }
            for result in results
        ],
        "num_free_inputs": sum(result.experiment.num_free_inputs for result in results),
    }
