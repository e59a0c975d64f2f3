"""The published figures as data: experiments with their inputs, the points that stand for them, and the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from simulator.specs.base import Name, PositiveInt, Spec
from simulator.specs.validation import suggest, validated
from simulator.yaml_io import load_yaml

PUBLISHED = Path(__file__).with_name("published.yaml")
Origin = Literal["published", "catalog", "assumed", "derived"]
"""Who says a value: the publication, a figure reported elsewhere, nobody, or one of the experiment's own rows."""
Text = Annotated[str, Field(min_length=1)]


class Input(Spec):
    """One input of an experiment, the same for all of its rows."""

    key: Name
    """Dotted key of an experiment, `recipe.churn`, `recipe.steps`, `batch.share` (of the largest batch of another
    point), or `hardware.` and the dotted name of a profile's figure."""
    value: int | float | str
    origin: Origin
    reason: Text
    points: tuple[Name, ...] = ()
    """Points that it is for; none named: all."""
    vary: tuple[int | float | str, ...] | None = None
    """Values whose effect is shown. Null: 25 % less and more."""

    @property
    def is_free(self) -> bool:
        """Whether nobody but us says it."""
        return self.origin in ("assumed", "derived")

    @property
    def variations(self) -> tuple[int | float | str, ...]:
        if self.vary is not None:
            return self.vary
        if isinstance(self.value, str):
            return ()
        if isinstance(self.value, int):
            return (round(self.value * 0.75), round(self.value * 1.25))
        return (self.value * 0.75, self.value * 1.25)


class Point(Spec):
    settings: dict[str, Any] = Field(default_factory=dict)
    """Dotted keys beyond those of the experiment."""
    batch_of: Name | None = None
    """Point whose largest batch that fits is this one's batch (its own: `batch.share` is not applied); null:
    `workload.batch_size`."""


class Simulated(Spec):
    """A column of a point, divided by that of another where one is named; or a closed form of a point's bytes."""

    point: Name
    column: Name | None = None
    relative_to: Name | None = None
    closed_form: Name | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Simulated:
        if (self.column is None) == (self.closed_form is None):
            raise ValueError("give either column or closed_form")
        return self


class Row(Spec):
    setting: Text
    published: float
    unit: Text
    simulated: Simulated | None = None
    derives: Name | None = None
    """Input that was derived from this row: the row is fitted, not predicted."""
    made_from: Text | None = None
    """What of the inputs is this very figure: the row is fitted, and shows only that it survived."""
    not_simulated: Text | None = None
    """Why there is no figure."""
    solve: Name | None = None
    """Input whose value would make the row true, shown where it is missed."""

    @model_validator(mode="after")
    def _simulated_or_not(self) -> Row:
        if (self.simulated is None) == (self.not_simulated is None):
            raise ValueError("give either simulated or not_simulated")
        return self

    @property
    def fitted(self) -> bool:
        return self.derives is not None or self.made_from is not None


class Recipe(Spec):
    """Synthesised trace of an experiment (`traces.synth.recipes`)."""

    name: Name
    layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    """Layers generated, by relative depth of the simulated model's 36ths; the others repeat them."""
    steps: PositiveInt
    kv_heads: PositiveInt | None = None
    """KV heads generated; the model's others repeat them. Null: all."""


class Experiment(Spec):
    name: Name
    title: Text
    source: Text
    recipe: Recipe | None = None
    """Null: no row replays a trace."""
    settings: dict[str, Any]
    """Dotted keys of every point."""
    published_keys: tuple[Name, ...] = ()
    """Keys of `settings` that the publication states; the others are the simulator's own choice."""
    inputs: dict[Name, Input] = Field(default_factory=dict)
    points: dict[Name, Point] = Field(default_factory=dict)
    rows: tuple[Row, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_exist(self) -> Experiment:
        for row in self.rows:
            named = [row.simulated.point, row.simulated.relative_to] if row.simulated else []
            _require(self.points, named, "point")
            _require(self.inputs, (row.derives, row.solve), "input")
            if row.derives is not None and self.inputs[row.derives].origin != "derived":
                raise ValueError(f"input {row.derives} is derived from a row, so its origin must be derived")
        _require(self.points, [point.batch_of for point in self.points.values()], "point")
        _require(self.points, [name for given in self.inputs.values() for name in given.points], "point")
        derived = {name for name, given in self.inputs.items() if given.origin == "derived"}
        undone = derived - {row.derives for row in self.rows}
        if undone:
            raise ValueError(f"input {min(undone)} is derived, but no row derives it")
        return self

    @property
    def num_free_inputs(self) -> int:
        return sum(given.is_free for given in self.inputs.values())


class Table(Spec):
    experiments: tuple[Experiment, ...] = Field(min_length=1)


@lru_cache(maxsize=1)
def published() -> tuple[Experiment, ...]:
    """Experiments of the shipped table."""
    return validated(Table, load_yaml(PUBLISHED), PUBLISHED.name).experiments


def _require(known: Mapping[str, Any], names: Sequence[str | None], kind: str) -> None:
    for name in names:
        if name is not None and name not in known:
            raise ValueError(f"unknown {kind} {name!r}: {suggest(name, known)}")
