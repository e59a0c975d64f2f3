"""`oasis-sim reproduce`: every published figure beside the simulated one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from oasis_sim.output import print_json
from oasis_sim.settings import command_line_settings
from simulator.catalog import load_hardware, load_model
from simulator.experiment import expand, experiment_keys
from simulator.reproduce.evaluate import SERVING, Evaluation
from simulator.reproduce.report import Result, decode_step_rows, reproduce, row_document
from simulator.reproduce.sensitivity import derive
from simulator.reproduce.table import Experiment, published
from simulator.specs.policy import PolicySpec
from simulator.specs.serving import ServingSpec
from simulator.specs.validation import suggest, validated
from traces.errors import InputError

DECODE_STEP = "decode-step-h200"


def run(
    experiment: str | None,
    flags: Mapping[str, Sequence[str]],
    assignments: Sequence[str],
    derived: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Print the table or one JSON document. `flags` and `assignments` give the keys of another setting."""
    overrides = _overrides(flags, assignments)
    chosen, with_steps = _chosen(experiment)
    _require_served(chosen, overrides)
    if derived:
        if overrides:
            raise InputError(f"--derive solves the inputs at the published setting; leave out {', '.join(overrides)}")
        return _derive(chosen, as_json)
    if overrides and not any(one.points for one in chosen):
        raise InputError(f"{experiment} was measured at one setting; leave out {', '.join(overrides)}")
    results = []
    for one in chosen:
        if overrides and not one.points:
            continue
        if not quiet and sys.stderr.isatty():
            print(f"{one.name} …", file=sys.stderr)
        results.append(reproduce(one, overrides))
    if overrides:
        _require_a_figure(results)
    steps = decode_step_rows() if with_steps and not overrides else []
    if as_json:
        print_json(_document(results, steps))
    else:
        from oasis_sim.reproduce_tables import print_tables

        print_tables(results, steps, overrides)
    return 0


def _require_a_figure(results: Sequence[Result]) -> None:
    """Raises InputError where no row can be simulated at another setting, with the first row's reason."""
    asked = [row for result in results for row in result.rows if row.row.simulated is not None]
    if asked and all(row.simulated is None for row in asked):
        raise InputError(f"no row can be simulated at this setting: {asked[0].problem}")


def _require_served(chosen: Sequence[Experiment], overrides: Mapping[str, Any]) -> None:
    """Raises InputError for serving keys where no row is a serving run."""
    keys = [key for key in overrides if key.startswith(SERVING)]
    if keys and not any(Evaluation(one).is_served(name) for one in chosen for name in one.points):
        raise InputError(f"{keys[0]}: no row of {chosen[0].name} is a serving run")


FIXED_KEYS = ("name", "system", "trace", "trace_group")
FIXED_SECTIONS = ("objective",)
"""What the rows themselves say, or what no row looks at."""


def _overrides(flags: Mapping[str, Sequence[str]], assignments: Sequence[str]) -> dict[str, Any]:
    """Keys that are given, each with one value. Raises InputError for a key that is unknown, given twice or no part of
    a setting, and for a name or value that the schema refuses."""
    overrides: dict[str, Any] = {}
    for key, values in command_line_settings(flags, assignments).items():
        if key not in experiment_keys():
            raise InputError(f"unknown key {key!r}: {suggest(key, experiment_keys())}")
        if len(values) > 1:
            raise InputError(f"{key}: takes one value here, got {', '.join(map(str, values))}")
        if key in FIXED_KEYS or key.partition(".")[0] in FIXED_SECTIONS:
            raise InputError(f"{key}: cannot be changed here, rows are of given systems and traces")
        overrides[key] = values[0]
    policy = {key.removeprefix("policy."): value for key, value in overrides.items() if key.startswith("policy.")}
    validated(PolicySpec, policy, key_prefix="policy")
    expand({key: value for key, value in overrides.items() if not key.startswith(("policy.", SERVING))}, {})
    served = {key.removeprefix(SERVING): value for key, value in overrides.items() if key.startswith(SERVING)}
    validated(ServingSpec, served, key_prefix="serving")
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
