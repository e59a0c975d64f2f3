"""One point from names to a result row: resolve, check capacity, replay, play on the timeline, summarise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from simulator.cache import cache_key, load_json, store_json
from simulator.capacity import Footprint, footprint
from simulator.demand import Demand
from simulator.experiment import ResolvedExperiment, resolve
from simulator.metrics import COLUMNS, PARAMETERS, SERVING
from simulator.parallel import rank_mappings
from simulator.policy_composition import resolve_policy
from simulator.replay import REPLAY_VERSION, replay, replay_by_gpu
from simulator.selectors.table import SELECTORS
from simulator.specs.experiment import ExperimentSpec
from traces.errors import CapacityError, InputError

Row = dict[str, Any]

TIMELINE_VERSION = 15
"""Part of every point's cache key; raised when a change of cost, links or timeline moves a result."""


def point_key(experiment: ExperimentSpec) -> str:
    """Content hash of everything that decides the point's result; also its cache key."""
    return cache_key(_key_parts(resolve(experiment)))


def _key_parts(point: ResolvedExperiment) -> dict[str, Any]:
    spec = point.spec
    replays = _replays(point)
    return {
        "kind": "point",
        "timeline_version": TIMELINE_VERSION,
        "replay_version": REPLAY_VERSION if replays else None,
        "system": spec.system,
        "model": point.model.model_dump(mode="json"),
        "hardware": point.hardware.model_dump(mode="json"),
        "trace": point.group.content_hash if replays else None,
        "trace_name": spec.trace,
        "group": point.group.name,
        "mapping": spec.mapping.model_dump(mode="json") if replays else None,
        "policy": {
            key: value
            for key, value in point.policy.model_dump(mode="json").items()
            if f"policy.{key}" not in point.ignored
        },
        "workload": {
            key: value
            for key, value in (spec.workload.model_dump() | {"context_tokens": point.context_tokens}).items()
            if f"workload.{key}" not in point.ignored
        },
        "serving": _serving_key(point),
        "placement": {
            key: value
            for key, value in spec.placement.model_dump(mode="json").items()
            if f"placement.{key}" not in point.ignored
        },
        "engine": spec.engine.model_dump(mode="json"),
        "seed": spec.seed,
    }


def _replays(point: ResolvedExperiment) -> bool:
    return point.policy.selector != "all" or point.policy.verify_drafts


def _serving_key(point: ResolvedExperiment) -> dict[str, Any] | None:
    """What decides a serving run beyond the rest: its keys, and what its request file holds."""
    serving = point.spec.serving
    if serving is None:
        return None
    keys = {k: v for k, v in serving.model_dump(mode="json").items() if f"serving.{k}" not in point.ignored}
    if serving.requests is not None:
        keys["requests"] = hashlib.sha256(Path(serving.requests).read_bytes()).hexdigest()
    return {**keys, "trace_group": point.spec.trace_group}


def run_point(
    experiment: ExperimentSpec,
    use_cache: bool = True,
    requests_path: Path | None = None,
    usage_path: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Row:
    """One flat row with `simulator.metrics.COLUMNS`. A batch that does not fit gives status `does_not_fit`.

    A serving run adds `simulator.metrics.SERVING`; `requests_path`, `usage_path` and `on_progress` are
    `serving.run.serve`'s.
    Raises InputError or TraceError for what cannot be simulated.
    """
    point = resolve(experiment)
    parts = _key_parts(point)
    serves = point.spec.serving is not None
    # What happened to each request is not kept beside the row: who asks for it has it simulated.
    cached = load_json(parts) if use_cache and requests_path is None else None
    if cached is not None:
        # Which parameters show is asked of the experiment, not of whoever computed the point first.
        return {name: cached.get(name) for name in (*COLUMNS, *(SERVING if serves else ()))} | parameters(point)
    if serves:
        from simulator.serving.run import serve

        row = serve(point, requests_path, usage_path, on_progress) | parameters(point)
    else:
        row = _simulate(point)
    row["point_key"] = cache_key(parts)
    if use_cache:
        store_json(parts, row)
    return row


def _simulate(point: ResolvedExperiment) -> Row:
    spec = point.spec
    row: Row = dict.fromkeys(COLUMNS)
    row |= parameters(point)
    fits = point_footprint(point)
    try:
        fits.require(spec.workload.batch_size)
    except CapacityError as error:
        row |= {"status": "does_not_fit", "error": str(error), "bound": "capacity"}
        row |= {"max_batch_size": fits.max_batch_size, "hbm_bytes_peak": fits.hbm_bytes(spec.workload.batch_size)}
        row["remote_bytes_peak"] = fits.remote_bytes(spec.workload.batch_size) * point.num_gpus
        row["host_bytes_peak"] = fits.host_bytes(spec.workload.batch_size) * point.num_gpus
        return row
    row |= _play(point, demands_by_gpu(point), fits)
    row["status"] = "ok"
    return row


def demands_by_gpu(point: ResolvedExperiment) -> tuple[Demand, ...]:
    """What each GPU of a replica asks for, one after another; nothing for dense attention, unless drafts are verified:
    then it still says how far each step gets."""
    if not _replays(point):
        return ()
    mappings = rank_mappings(point.mapping, point.spec.placement.tensor_parallel)
    return replay_by_gpu(point.group, point.policy, mappings, point.spec.seed)


def _play(point: ResolvedExperiment, demands: tuple[Demand, ...], fits: Footprint) -> Row:
    from simulator import summary
    from simulator.engine_rates import engine_rates
    from simulator.timeline import play
    from simulator.topology import HostTopology

    spec, policy = point.spec, point.policy
    topology = HostTopology(point.hardware, point.num_gpus, spec.placement)
    runs = run_works(point, demands)
    shortest = summary.warm_up_steps(runs[0]) + 1
    if runs[0].work.durations_s.shape[0] < shortest:
        raise InputError(
            f"workload.output_tokens {spec.workload.output_tokens} leaves no step to measure: the first "
            f"{shortest - 1} warm up, use at least {shortest}"
        )
    batch_size, kv_heads = spec.workload.batch_size, point.shard.num_kv_heads
    rates = engine_rates(point.hardware, policy.transport, policy.gather_ctas, batch_size, kv_heads)
    return summary.summarise(
        summary.Point(
            model=point.shard,
            hardware=point.hardware,
            policy=policy,
            placement=spec.placement,
            batch_size=spec.workload.batch_size,
            context_tokens=point.context_tokens,
            demands=demands,
            footprint=fits,
            runs=runs,
            result=play(runs, rates, topology),
        )
    )


def timeline_records(
    experiment: ExperimentSpec, num_steps: int, on_step: Callable[[int], None] | None = None
) -> list[Any]:
    """`step_reference.EngineRecord` of every operation of the first GPU's first `num_steps` steps.

    Played on the per-layer reference, with the link share that it has when all of the host transfer. `on_step` hears
    how many steps are done.
    """
    from simulator.engine_rates import engine_rates
    from simulator.step_reference import StepReference
    from simulator.timeline import SharedLinks
    from simulator.topology import HostTopology

    point = resolve(experiment)
    workload = point.spec.workload.model_copy(update={"output_tokens": num_steps})
    point = replace(point, spec=point.spec.model_copy(update={"workload": workload}))
    runs = run_works(point, demands_by_gpu(point))
    topology = HostTopology(point.hardware, point.num_gpus, point.spec.placement)
    share = SharedLinks.of_runs(topology, runs).begin_all()[0]
    policy, kv_heads = point.policy, point.shard.num_kv_heads
    rates = engine_rates(point.hardware, policy.transport, policy.gather_ctas, workload.batch_size, kv_heads)
    return StepReference(runs[0].rules, runs[0].work, rates, share).play(on_step).records


def run_works(point: ResolvedExperiment, demands: Sequence[Demand]) -> list[Any]:
    """Work of each replica's batch; every request of every replica starts at its own seeded demand row."""
    from simulator.step_work import build_run_work

    spec = point.spec
    num_rows = demands[0].steady_stop - demands[0].steady_start if demands else 1
    return [
        build_run_work(
            point.shard,
            point.hardware,
            point.policy,
            spec.workload,
            spec.placement,
            spec.engine,
            point.context_tokens,
            demands,
            np.random.default_rng([spec.seed, replica]).integers(0, num_rows, spec.workload.batch_size),
        )
        for replica in range(point.num_replicas)
    ]


def point_footprint(point: ResolvedExperiment) -> Footprint:
    """Memory at the longest KV length of the run."""
    spec = point.spec
    kv_len = point.context_tokens + spec.workload.output_tokens - 1
    return footprint(point.shard, point.hardware, point.policy, spec.engine, kv_len, point.num_gpus, spec.placement)


def parameters(point: ResolvedExperiment) -> Row:
    """Parameter columns under the schema's dotted names; null where the system ignores them.

    Keys that the experiment overrides beyond `simulator.metrics.PARAMETERS` are added.
    """
    spec = point.spec
    values: Row = {
        "system": spec.system,
        "model": point.model.name,
        "hardware": point.hardware.name,
        "trace": spec.trace,
        "trace_group": point.group.name,
        "mapping": None if point.policy.selector == "all" else point.mapping.name,
        "workload.batch_size": spec.workload.batch_size,
        "workload.context_tokens": point.context_tokens,
        "workload.output_tokens": spec.workload.output_tokens,
        "placement.host_numa": spec.placement.host_numa,
        "placement.num_gpus": point.num_gpus,
        "placement.tensor_parallel": spec.placement.tensor_parallel,
        "placement.kv_tier": spec.placement.kv_tier,
        "seed": spec.seed,
    }
    resolved = {f"policy.{key}": value for key, value in point.policy.model_dump(mode="json").items()}
    shown = dict.fromkeys(PARAMETERS) | values
    for key in (*(p for p in PARAMETERS if p.startswith("policy.")), *(f"policy.{key}" for key in spec.policy)):
        shown[key] = resolved[key]
    if point.hardware.link.gather_ctas is not None:
        shown["policy.gather_ctas"] = resolved["policy.gather_ctas"]
    if spec.placement.kv_tier != "host":
        shown |= {f"placement.{key}": getattr(spec.placement, key) for key in ("remote_path", "nic_numa")}
        shown |= {key: resolved[key] for key in ("policy.host_residency", "policy.host_cache_tokens")}
    for section in ("engine", "mapping"):
        for key, value in getattr(spec, section).model_dump(mode="json", exclude_defaults=True).items():
            shown[f"{section}.{key}"] = value
    if spec.serving is not None:
        shown["trace_group"] = spec.trace_group
        for key, value in spec.serving.model_dump(mode="json", exclude_unset=True).items():
            shown[f"serving.{key}"] = value
    return {key: None if key in point.ignored else value for key, value in shown.items()}


def reference_recall(experiment: ExperimentSpec) -> float:
    """Recall of uncapped on-demand retrieval at the same budget and block size: the default threshold's base.

    By min/max scores where the point's selector ranks without a query, and by what the trace ranks where the budget
    goes beyond.
    """
    point = resolve(experiment)
    if point.policy.selector == "all":
        return 1.0
    size = point.policy.block_size_tokens
    ranked_tokens = point.group.max_ranked_blocks(size) * size
    keeps = SELECTORS[point.policy.selector].keeps
    policy = resolve_policy(
        "retrieval",
        {
            "selector": "minmax" if keeps else point.policy.selector,
            "kv_budget_tokens": min(point.policy.kv_budget_tokens or 0, ranked_tokens),
            "block_size_tokens": size,
        },
        point.context_tokens,
    )
    return replay(point.group, policy, point.mapping, experiment.seed).mean_recall()
