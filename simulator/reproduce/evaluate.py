"""Simulate the rows of a published experiment, at its inputs or at others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from simulator.catalog import load_model
from simulator.experiment import expand
from simulator.points import run_point
from simulator.policy_composition import resolve_policy
from simulator.reproduce.closed_forms import CLOSED_FORMS, Setting
from simulator.reproduce.sources import profile_with, recipe_trace
from simulator.reproduce.table import Experiment, Row
from simulator.specs.experiment import ExperimentSpec
from traces.errors import InputError

CHURN = "recipe.churn"
STEPS = "recipe.steps"
BATCH_SHARE = "batch.share"
HARDWARE = "hardware."
SERVING = "serving."
BATCH = "workload.batch_size"


@dataclass
class Evaluation:
    """One experiment with some inputs replaced and some keys overridden; points are simulated once."""

    experiment: Experiment
    replaced: Mapping[str, Any] = field(default_factory=dict)
    """By name of the input."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys that hold for every point, whatever the table says: another setting than the published one."""
    _rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    _largest: dict[str, int] = field(default_factory=dict)

    def value(self, row: Row) -> float | None:
        """What the row comes to; None where it is not simulated. Raises InputError for a point that cannot be."""
        asked = row.simulated
        if asked is None:
            return None
        if asked.closed_form is not None:
            settings = self.settings(asked.point)
            context = int(settings["workload.context_tokens"])
            policy = {k.removeprefix("policy."): v for k, v in settings.items() if k.startswith("policy.")}
            setting = Setting(
                load_model(settings["model"]),
                resolve_policy(settings["system"], policy, context),
                context,
            )
            return CLOSED_FORMS[asked.closed_form](setting)
        assert asked.column is not None
        found = self._column(asked.point, asked.column)
        if asked.relative_to is None:
            return found
        reference = self._column(asked.relative_to, asked.column)
        if reference == 0:
            raise InputError(f"point {asked.relative_to}: {asked.column} is 0, so nothing is relative to it")
        return found / reference

    def point(self, name: str) -> dict[str, Any]:
        """Result row of a point. Raises InputError where its batch does not fit."""
        if name not in self._rows:
            settings = self.settings(name)
            batch_of = self.experiment.points[name].batch_of
            if batch_of is not None and BATCH not in self.overrides:
                share = 1.0 if batch_of == name else float(self.inputs(name).get(BATCH_SHARE, 1.0))
                settings[BATCH] = max(1, round(share * self.largest_batch(batch_of)))
            row = run_point(self._spec(name, settings))
            if row["status"] != "ok":
                raise InputError(f"point {name}: {row['error']}")
            self._rows[name] = row
        return self._rows[name]

    def largest_batch(self, name: str) -> int:
        """Requests that fit at the experiment's context, in a closed batch."""
        if name not in self._largest:
            self._largest[name] = self._find_largest_batch(name)
        return self._largest[name]

    def _find_largest_batch(self, name: str) -> int:
        closed = {key: value for key, value in self.settings(name).items() if not key.startswith(SERVING)}
        row = run_point(self._spec(name, {**closed, BATCH: 1}))
        if row["status"] != "ok":
            raise InputError(f"point {name}, one request: {row['error']}; give --batch")
        return int(row["max_batch_size"])

    def batches(self) -> dict[str, int]:
        """Requests in flight of each point simulated so far, in a serving run at most."""
        return {name: int(row[BATCH] or row["batch_peak"]) for name, row in self._rows.items()}

    def is_served(self, name: str) -> bool:
        """Whether a point is a serving run."""
        return any(
            key.startswith(SERVING) for key in (*self.experiment.settings, *self.experiment.points[name].settings)
        )

    def settings(self, name: str) -> dict[str, Any]:
        """Dotted keys of a point: the experiment's, its inputs', the point's own, then the overrides (serving keys only
        where it is a serving run)."""
        plain = {
            key: value
            for key, value in self.inputs(name).items()
            if key not in (CHURN, STEPS, BATCH_SHARE) and not key.startswith(HARDWARE)
        }
        served = self.is_served(name)
        overrides = {key: value for key, value in self.overrides.items() if served or not key.startswith(SERVING)}
        return {**self.experiment.settings, **plain, **self.experiment.points[name].settings, **overrides}

    def inputs(self, point: str) -> dict[str, Any]:
        """Value of each input of a point by its key."""
        return {
            given.key: self.replaced.get(name, given.value)
            for name, given in self.experiment.inputs.items()
            if not given.points or point in given.points
        }

    def _trace(self, name: str, settings: Mapping[str, Any]) -> str:
        recipe, inputs = self.experiment.recipe, self.inputs(name)
        assert recipe is not None, "a point that is simulated replays a trace"
        recipe = recipe.model_copy(update={"steps": inputs.get(STEPS, recipe.steps)})
        context_tokens = int(settings["workload.context_tokens"])
        return str(recipe_trace(recipe, inputs.get(CHURN), settings["model"], context_tokens))

    def _spec(self, name: str, settings: Mapping[str, Any]) -> ExperimentSpec:
        inputs, trace = self.inputs(name), self._trace(name, settings)
        figures = {key.removeprefix(HARDWARE): inputs[key] for key in inputs if key.startswith(HARDWARE)}
        if self.overrides.keys() & {"hardware", "placement.tensor_parallel", "placement.num_gpus"}:
            figures = {}  # reported for one GPU of the published kind
        if any(key.startswith(SERVING) for key in settings):
            settings = self._served(name, settings)
        built = {
            **settings,
            "trace": trace,
            "hardware": profile_with(settings["hardware"], figures),
        }
        return expand(built, {})[0]

    def _served(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """A closed batch's keys as those of requests: prompts as long as its context, outputs as its trace, and no more
        in flight than its batch."""
        recipe = self.experiment.recipe
        assert recipe is not None, "a serving run replays a trace"
        keys = {key: value for key, value in settings.items() if not key.startswith("workload.")}
        keys.setdefault("serving.prompt_tokens", settings["workload.context_tokens"])
        keys.setdefault("serving.output_tokens", self.inputs(name).get(STEPS, recipe.steps))
        if BATCH in settings:
            keys.setdefault("serving.max_num_seqs", settings[BATCH])
        return keys

    def _column(self, name: str, column: str) -> float:
        value = self.point(name)[column]
        if value is None:
            raise InputError(f"point {name}: {column} is not defined for its system")
        return float(value)
