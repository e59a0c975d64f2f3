"""From what a user named to what is simulated: names looked up, defaults made numbers, impossible points refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from simulator.catalog import load_hardware, load_model
from simulator.ignored_parameters import ignored_parameters
from simulator.mapping import Mapping as TraceMapping
from simulator.parallel import gpus_in_use, shard
from simulator.policy_bounds import require_rank, require_sinks, require_slots
from simulator.policy_composition import compose_policy, resolve_policy
from simulator.remote import require_tier
from simulator.serving.handover_rules import require_handover
from simulator.specs.base import Spec
from simulator.specs.experiment import ExperimentSpec, PlacementSpec, WorkloadSpec
from simulator.specs.hardware import HardwareSpec
from simulator.specs.model import ModelSpec
from simulator.specs.policy import PolicySpec
from simulator.specs.serving import KV_BUDGET_TOKENS, ServingSpec, ignored_serving_parameters
from simulator.specs.validation import submodel, suggest, validated
from simulator.systems import serving_of
from simulator.topology import HostTopology
from simulator.trace_choice import choose_group, replayable_mapping
from simulator.verified_trace import open_verified
from traces.catalog import resolve as resolve_trace
from traces.errors import InputError
from traces.reader import Trace, TraceGroup


@dataclass(frozen=True, slots=True)
class ResolvedExperiment:
    """One point, ready to run. In `spec` names are as the catalog spells them, context, trace group and number of GPUs
    filled in, and placement keys that the policy ignores are at their defaults."""

    spec: ExperimentSpec
    model: ModelSpec
    """The whole; `shard` is what one GPU has."""
    hardware: HardwareSpec
    policy: PolicySpec
    """Budget and slack are numbers (null only where they do not exist)."""
    trace: Trace
    group: TraceGroup
    mapping: TraceMapping
    ignored: frozenset[str]
    """Dotted parameters that this point's policy does not look at."""

    @property
    def shard(self) -> ModelSpec:
        """The part of the model on one GPU of a replica."""
        return shard(self.model, self.spec.placement.tensor_parallel)

    @property
    def num_gpus(self) -> int:
        """GPUs of the host in use."""
        return self.spec.placement.num_gpus or self.spec.placement.tensor_parallel

    @property
    def num_replicas(self) -> int:
        return self.num_gpus // self.spec.placement.tensor_parallel

    @property
    def context_tokens(self) -> int:
        """KV length at the first decode step."""
        return int(self.group.kv_len[0])


def resolve(experiment: ExperimentSpec) -> ResolvedExperiment:
    """Look up, fill in and check one point.

    Raises InputError: an unknown name, a context that no request of the trace has or the model cannot hold, a budget,
    block size or draft distance that the trace does not serve, a placement that the host does not have, and choices
    that do not go together. Raises TraceError for a trace that cannot be trusted.
    """
    experiment = experiment.model_copy(update={"serving": serving_of(experiment.system, experiment.serving)})
    model, hardware = load_model(experiment.model), load_hardware(experiment.hardware)
    compose_policy(experiment.system, experiment.policy, experiment.placement)
    trace = _open(resolve_trace(experiment.trace))
    group = choose_group(trace, experiment)
    context_tokens = int(group.kv_len[0])
    overrides = experiment.policy
    if experiment.serving is not None:
        _require_requests(experiment)
        _require_positions(experiment.serving.max_model_len, model)
        overrides = {"kv_budget_tokens": KV_BUDGET_TOKENS, **overrides}
    elif context_tokens + experiment.workload.output_tokens - 1 > model.longest_context:
        needed = context_tokens + experiment.workload.output_tokens - 1
        raise InputError(
            f"workload: {context_tokens} context and {experiment.workload.output_tokens} output tokens need {needed} "
            f"positions, {model.name} has {model.longest_context}"
        )
    policy = resolve_policy(experiment.system, overrides, context_tokens, experiment.placement)
    if hardware.link.gather_ctas is not None and "gather_ctas" not in overrides:
        policy = policy.model_copy(update={"gather_ctas": hardware.link.gather_ctas})
    require_rank(policy, model)
    require_sinks(policy)
    if experiment.serving is None:
        require_slots(policy, context_tokens + experiment.workload.output_tokens - 1)
    ignored = _ignored(experiment, policy)
    mapping = replayable_mapping(experiment, model, group, policy)
    shard(model, experiment.placement.tensor_parallel)
    num_gpus = gpus_in_use(hardware, experiment.placement)
    placement = _without_ignored_placement(experiment.placement, ignored).model_copy(update={"num_gpus": num_gpus})
    HostTopology(hardware, num_gpus, placement)
    require_tier(hardware, placement)
    if experiment.serving is not None:
        require_handover(experiment.serving, policy, hardware, placement, experiment.system)
    workload = experiment.workload
    if experiment.serving is None:
        workload = workload.model_copy(update={"context_tokens": context_tokens})
    spec = experiment.model_copy(
        update={
            "system": experiment.system.casefold(),
            "model": _catalog_spelling(experiment.model, model.name),
            "hardware": _catalog_spelling(experiment.hardware, hardware.name),
            "workload": workload,
            "placement": placement,
            "trace_group": group.name if experiment.serving is None else experiment.trace_group,
        }
    )
    return ResolvedExperiment(spec, model, hardware, policy, trace, group, mapping, ignored)


def expand(base: ExperimentSpec | Mapping[str, Any], grid: Mapping[str, Sequence[Any]]) -> list[ExperimentSpec]:
    """Experiments of a grid of dotted keys (`policy.fetch_cap`), first key outermost.

    `base`: an experiment, or its keys, nested or dotted. Each point keeps only the keys that its system looks at; of
    points that are then equal the first stays. Raises InputError: unknown key (with the nearest valid ones), bad
    value, or choices that do not go together.
    """
    fixed = base.model_dump(exclude_unset=True) if isinstance(base, ExperimentSpec) else dict(base)
    fixed = dict(_leaves(fixed))
    for key in (*fixed, *grid):
        _require_key(key)
    for key in grid:
        if not grid[key]:
            raise InputError(f"{key}: no value given")
    distinct: dict[str, ExperimentSpec] = {}
    for values in itertools.product(*grid.values()):
        settings = {**fixed, **dict(zip(grid, values, strict=True))}
        point, policy = _without_ignored(settings)
        distinct.setdefault(_identity(point, policy), point)
    return list(distinct.values())


def without_effect(keys: Iterable[str], points: Sequence[ExperimentSpec]) -> list[str]:
    """Those of the dotted keys that none of a grid's points kept, because its system or kind of run ignores them."""
    kept = {key for point in points for key, _ in _leaves(point.model_dump(exclude_unset=True))}
    return [key for key in keys if key not in kept]


@lru_cache(maxsize=1)
def experiment_keys() -> tuple[str, ...]:
    """Every dotted key of an experiment, policy keys included, in the schema's order."""
    return tuple(
        key
        for name, field in ExperimentSpec.model_fields.items()
        for key in (
            [f"policy.{choice}" for choice in PolicySpec.model_fields]
            if name == "policy"
            else _spec_keys(name, submodel(field.annotation))
        )
    )


def _spec_keys(name: str, inner: type[Spec] | None) -> list[str]:
    return [name] if inner is None else [f"{name}.{key}" for key in inner.model_fields]


def _require_key(key: str) -> None:
    if key not in experiment_keys():
        raise InputError(f"unknown key {key!r}: {suggest(key, experiment_keys())}")


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _build(settings: Mapping[str, Any]) -> ExperimentSpec:
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return validated(ExperimentSpec, tree)


def _without_ignored(settings: Mapping[str, Any]) -> tuple[ExperimentSpec, PolicySpec]:
    point = _build(settings)
    served = point.model_copy(update={"serving": serving_of(point.system, point.serving)})
    _require_arrivals(served.serving)
    if "system" in settings:
        settings = {**settings, "system": point.system.casefold()}
    policy = compose_policy(point.system, point.policy, point.placement)
    ignored = _ignored(served, policy)
    kept = _build({key: value for key, value in settings.items() if key not in ignored})
    if point.serving is not None and kept.serving is None:  # none of its keys matters, but a serving run it is
        kept = kept.model_copy(update={"serving": ServingSpec()})
    return kept, policy


def _without_ignored_placement(placement: PlacementSpec, ignored: frozenset[str]) -> PlacementSpec:
    defaults = {
        name: field.default for name, field in PlacementSpec.model_fields.items() if f"placement.{name}" in ignored
    }
    return placement.model_copy(update=defaults)


def _ignored(point: ExperimentSpec, policy: PolicySpec) -> frozenset[str]:
    """Dotted parameters that cannot change this point's result."""
    ignored = ignored_parameters(policy, point.placement)
    if point.serving is not None:
        ignored |= {f"workload.{key}" for key in WorkloadSpec.model_fields}
        ignored |= ignored_serving_parameters(point.serving)
        replicas = (point.placement.num_gpus or 0) // point.placement.tensor_parallel
        apart = point.serving.disaggregation != "none"
        if replicas <= 1 and (not apart or point.serving.prefill_replicas in (None, 1)):
            ignored |= {"serving.router"}
    return ignored


def _require_arrivals(serving: ServingSpec | None) -> None:
    """Raises InputError for a rate without a word on how requests arrive: all at once, it would do nothing."""
    if serving is None or serving.arrivals is not None or serving.requests is not None:
        return
    if serving.rate_per_s is not None:
        raise InputError(
            f"serving.rate_per_s {serving.rate_per_s:g}: without serving.arrivals or serving.requests all requests "
            "come at once; add serving.arrivals=poisson"
        )


def _require_requests(point: ExperimentSpec) -> None:
    """Raises InputError for a request file that cannot be served and arrivals that come too late."""
    from simulator.serving.requests import make_workload

    if point.serving is not None:
        make_workload(point.serving, point.seed)


def _require_positions(max_model_len: int | None, model: ModelSpec) -> None:
    if max_model_len is not None and max_model_len > model.longest_context:
        raise InputError(
            f"serving.max_model_len {max_model_len}: {model.name} has {model.longest_context} positions, "
            "so at most that"
        )


def serving_groups(point: ResolvedExperiment) -> list[tuple[TraceGroup, TraceMapping]]:
    """Trace groups whose demand serves a serving run, with their mappings: the one named, or all that the policy can
    be replayed on."""
    if point.spec.trace_group is not None:
        return [(point.group, point.mapping)]
    serving = []
    for name in point.trace.group_names:
        group = point.trace.group(name)
        try:
            mapping = replayable_mapping(point.spec, point.model, group, point.policy)
        except InputError:
            continue
        serving.append((group, mapping))
    return serving


def _identity(point: ExperimentSpec, policy: PolicySpec) -> str:
    """Equal for points that must have equal results: the composed policy stands for the overrides."""
    data = point.model_dump(mode="json", exclude={"name", "objective", "policy"})
    return json.dumps([data, policy.model_dump(mode="json")], sort_keys=True)


def _catalog_spelling(given: str, name: str) -> str:
    """A catalog name in its own spelling; paths and ids stay as given."""
    return name if given.casefold() == name.casefold() else given


def _open(location: str) -> Trace:
    """A trace with the content hash that it states, opened once per process while its file stays the same."""
    path = Path(location)
    stamp = path.stat().st_mtime_ns if "://" not in location and path.exists() else 0
    return _open_cached(location, stamp)


@lru_cache(maxsize=8)
def _open_cached(location: str, stamp: int) -> Trace:
    return open_verified(location)
