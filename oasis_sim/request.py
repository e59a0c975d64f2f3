"""What the user asked for: YAML, flags and `--set` merged into points, before anything is simulated."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oasis_sim.settings import Settings, command_line_settings, flatten
from simulator.experiment import expand, without_effect
from simulator.objective import require_objective
from simulator.results import CONFIG
from simulator.specs.experiment import ExperimentSpec
from simulator.specs.serving import ServingSpec
from simulator.systems import get_system
from simulator.yaml_io import load_yaml
from traces.errors import InputError

DEFAULT_SWEEP = Path(__file__).with_name("default_sweep.yaml")
DEFAULT_SERVING_SWEEP = Path(__file__).with_name("default_serving_sweep.yaml")
_SECTIONS = tuple(ExperimentSpec.model_fields)


@dataclass(frozen=True, slots=True)
class Request:
    """Points in grid order (first key outermost, in the schema's order) and the document that asks for them."""

    points: tuple[ExperimentSpec, ...]
    config: dict[str, Any]
    """Nested keys with all defaults; a swept key holds its list. `oasis-sim sweep config.yaml` asks for it again."""

    without_effect: tuple[str, ...] = ()
    """Keys that someone named and that no point looks at."""

    @property
    def swept_policy(self) -> frozenset[str]:
        """Policy keys with more than one value."""
        return frozenset(key for key, value in self.config["policy"].items() if isinstance(value, list))

    @property
    def name(self) -> str | None:
        return self.points[0].name

    @property
    def maximize(self) -> str:
        return self.points[0].objective.maximize


def one_point(file: str | None, flags: Mapping[str, Sequence[str]], assignments: Sequence[str]) -> Request:
    """Request of `run`. Raises InputError when a key has more than one value."""
    own, given = read_settings(file), command_line_settings(flags, assignments)
    settings = own | given
    for key, values in settings.items():
        if len(values) > 1:
            raise InputError(f"run takes one value for {key}, got {', '.join(map(str, values))}; use sweep for a list")
    return make_request(settings, said(own, given))


def many_points(file: str | None, flags: Mapping[str, Sequence[str]], assignments: Sequence[str]) -> Request:
    """Request of `sweep`; without a file, flags override an embedded default: closed batches, or serving runs where a
    serving key is given."""
    given = command_line_settings(flags, assignments)
    default = DEFAULT_SERVING_SWEEP if any(key.startswith("serving.") for key in given) else DEFAULT_SWEEP
    own = read_settings(file or str(default))
    return make_request(own | given, said(own if file else {}, given))


def make_request(settings: Settings, said: Collection[str] = ()) -> Request:
    """Points of all combinations; `said`: keys that someone named. Raises InputError for a key or value that the
    schema refuses."""
    require_lists(settings)
    ordered = {key: settings[key] for key in sorted(settings, key=_schema_order)}
    fixed = {key: values[0] for key, values in ordered.items() if len(values) == 1}
    swept = {key: values for key, values in ordered.items() if len(values) > 1}
    points = tuple(expand(fixed, swept))
    require_objective(points[0].objective.maximize)
    if points[0].name is not None and Path(points[0].name).name != points[0].name:
        raise InputError(f"name: {points[0].name!r} names a folder in runs/ and cannot hold a path")
    config: dict[str, Any] = ExperimentSpec().model_dump(mode="json")
    if points[0].serving is not None:
        # What a system says of its own is left to it: another default here would override it.
        own = {key for point in points for key in get_system(point.system).serving}
        config["serving"] = ServingSpec().model_dump(mode="json", exclude=own)
    for key, values in ordered.items():
        section, _, name = key.rpartition(".")
        (config[section] if section else config)[name] = values if key in swept else values[0]
    return Request(points, config, tuple(without_effect(said, points)))


def said(own: Settings, given: Settings) -> list[str]:
    """Keys that someone named: those of the command line, and those of an experiment file that differ from the
    schema's defaults, which `config.yaml` spells out."""
    defaults = flatten(ExperimentSpec(serving=ServingSpec()).model_dump(mode="json"), "the schema")
    return [*given, *(key for key in own if key not in given and own[key] != defaults.get(key, [None]))]


def require_lists(settings: Settings) -> None:
    """Raises InputError for a value given twice, and for several where one holds for all points."""
    for key, values in settings.items():
        repeated = {str(value) for value in values if values.count(value) > 1}
        if repeated:
            raise InputError(f"{key}: value given twice: {', '.join(sorted(repeated))}")
        if len(values) > 1 and (key == "name" or key.startswith("objective.")):
            raise InputError(f"{key} cannot be swept: it takes one value")


def read_settings(file: str | None) -> Settings:
    """Dotted keys of an experiment file, each with the list of its values; none without a file."""
    if file is None:
        return {}
    if Path(file).is_dir():
        config = Path(file) / CONFIG
        raise InputError(f"{file}: is a folder; pass an experiment's YAML file{f', {config}' * config.is_file()}")
    tree = load_yaml(file)
    if tree is not None and not isinstance(tree, Mapping):
        raise InputError(f"{file}: expected a mapping of experiment keys, found {type(tree).__name__}")
    return flatten(tree or {}, file)


def _schema_order(key: str) -> tuple[int, str]:
    section = key.partition(".")[0]
    return (_SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS), key)
