"""From what happened in a serving run to the columns of one result row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.metrics import BREAKDOWN
from simulator.remote import on_drives, over_network
from simulator.serving.demand_table import DemandTable
from simulator.serving.iteration import Iteration
from simulator.serving.loop import Replica
from simulator.serving.network import WINDOW_S
from simulator.serving.offered import offered_load
from simulator.serving.pools import Pool
from simulator.serving.records import RequestLog
from simulator.step_layout import D_BUSY, H_BUSY, NUM_PARTS, R_BUSY, STEP, T_EXPOSED, T_SOFTWARE
from simulator.summary import SATURATED, active_params

Row = dict[str, Any]
WAITS_FOR_MEMORY = 0.1
"""Share of iterations that had tokens left for the next request but no memory, from which memory is what binds. A
convention; others carry prompts, so it stays far below 1 where memory alone holds the queue."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Run:
    """What a row is summarised from."""

    log: RequestLog
    replicas: Sequence[Replica]
    iterations: Sequence[Iteration]
    """One per replica."""
    demand: DemandTable
    """One for all replicas."""
    static_bytes: int
    """Weights and activations per GPU."""
    tensor_parallel: int
    prefill: Sequence[Replica] = ()
    """Replicas that prefill for others; the rest of this is about those that decode."""


def summarise(run: Run) -> Row:
    """Metrics of `simulator.metrics.METRICS`, BREAKDOWN and SERVING; undefined is None."""
    log, num_replicas = run.log, len(run.replicas)
    duration_s = log.last_finish_s - (log.first_arrival_s or 0.0)
    done_s = np.sum([iteration.done_s for iteration in run.iterations], axis=0)
    num_iterations = max(log.num_iterations, 1)
    per_second = 1.0 / duration_s if duration_s > 0 else 0.0
    tokens = max(log.output_tokens, 1)
    h2d, d2h, read, written = (
        sum(getattr(i, f"{way}_bytes") for i in run.iterations) for way in ("h2d", "d2h", "remote_read", "remote_write")
    )
    placement = run.iterations[0].setting.placement
    beyond_host = (read + written) / tokens
    num_gpus = num_replicas * run.tensor_parallel
    link_busy_s, remote_busy_s, exposed_s = (float(done_s[column]) for column in (H_BUSY, R_BUSY, T_EXPOSED))
    busy_s = max(link_busy_s, remote_busy_s)
    wall_s = duration_s * num_replicas
    row: Row = {
        "throughput_tokens_per_s": log.output_tokens * per_second,
        "throughput_per_gpu_tokens_per_s": log.output_tokens * per_second / num_gpus,
        **times(log),
        "exposed_transfer_s": exposed_s / num_iterations,
        "hidden_fraction": float(np.clip(1 - exposed_s / busy_s, 0, 1)) if busy_s > 0 else None,
        **demand_metrics(run),
        "h2d_bytes_per_token": h2d / tokens,
        "d2h_bytes_per_token": d2h / tokens,
        "remote_bytes_per_token": beyond_host if over_network(placement) or run.prefill else 0.0,
        "nvme_bytes_per_token": beyond_host if on_drives(placement) else 0.0,
        "link_utilization": min(1.0, link_busy_s / wall_s) if wall_s > 0 else 0.0,
        "link_busy_s": link_busy_s / num_iterations,
        "remote_utilization": min(1.0, remote_busy_s / wall_s) if wall_s > 0 else 0.0,
        "remote_busy_s": remote_busy_s / num_iterations,
        **{name: float(seconds) / num_iterations for name, seconds in zip(BREAKDOWN, done_s[:NUM_PARTS], strict=True)},
        "num_requests": log.num_arrived,
        "num_finished": log.num_finished,
        "num_refused": log.num_refused,
        "first_refused": first_refused(log),
        "duration_s": duration_s,
        "requests_per_s": log.num_finished * per_second,
        "goodput_requests_per_s": log.num_met_slo * per_second,
        "slo_attainment": log.num_met_slo / log.num_arrived,
        **offered_load(log),
        "in_system_mean": log.request_seconds * per_second,
        "batch_mean": log.sum_decoding / num_iterations,
        "batch_peak": log.peak_decoding,
        "num_iterations": log.num_iterations,
        "iteration_mean_s": float(done_s[STEP]) / num_iterations,
        "gpu_utilization": min(1.0, sum(r.busy_s for r in run.replicas) / wall_s) if wall_s > 0 else 0.0,
        "d2h_utilization": min(1.0, float(done_s[D_BUSY]) / wall_s) if wall_s > 0 else 0.0,
        "trace_groups": ", ".join(group.name for group in run.demand.groups) or None,
    }
    row |= handover_metrics(run, duration_s)
    row |= tallies(run, per_second) | prefix_metrics(run) | pool_peaks(run) | host_per_request(run)
    row["bound"], row["bound_detail"] = bound(run, row, done_s)
    return row


def times(log: RequestLog) -> Row:
    """Mean and quantiles over finished requests, of inter-token latency over their tokens, under the names of the
    result columns."""
    row: Row = {}
    for name in ("ttft", "tpot", "e2e", "queue", "second_token", "handover"):
        seconds = log.times_s(f"{name}_s")
        row[f"{name}_mean_s"] = float(seconds.mean()) if len(seconds) else None
        for label, share in QUANTILES.items():
            row[f"{name}_{label}_s"] = float(np.quantile(seconds, share)) if len(seconds) else None
    row["itl_mean_s"] = log.gaps.mean_s
    return row | {f"itl_{label}_s": log.gaps.quantile_s(share) for label, share in QUANTILES.items()}


def tallies(run: Run, per_second: float) -> Row:
    total = [replica.scheduler.tally for replica in (*run.replicas, *run.prefill)]
    num_short = sum(replica.scheduler.tally.num_short for replica in run.replicas)
    return {
        "prefill_tokens_per_s": sum(tally.prefilled_tokens for tally in total) * per_second,
        "num_preemptions": sum(tally.num_preemptions for tally in total),
        "memory_wait_share": min(1.0, num_short / max(1, run.log.num_iterations)),
        "num_swaps": sum(tally.num_swaps for tally in total),
        "recomputed_tokens": sum(tally.recomputed_tokens for tally in total),
        "swapped_bytes": run.tensor_parallel * sum(tally.swapped_bytes for tally in total),
    }


def handover_metrics(run: Run, duration_s: float) -> Row:
    """What crossed the network between prefill and decode replicas; null where they are one."""
    names = (
        "prefill_gpu_utilization", "prefill_blocked_s", "prefill_staging_bytes_peak", "admission_network_bytes",
        "network_bytes_per_request", "network_utilization", "network_peak_bytes_per_s", "network_burst_factor",
        "network_backlog_peak_bytes", "layer_push_share",
    )  # fmt: skip
    handover = run.replicas[0].handover
    if handover is None or not handover.tally.num_requests:
        return dict.fromkeys(names)
    tally, traffic, num_links = handover.tally, handover.links[0].traffic, len(handover.links)
    bursts, num_prefill = traffic.bursts, len(run.prefill)
    values = (
        sum(replica.busy_s for replica in run.prefill) / (duration_s * num_prefill),
        sum(replica.blocked_s for replica in run.prefill) / num_prefill,
        run.tensor_parallel * sum(replica.scheduler.pools.host_peak_bytes for replica in run.prefill),
        tally.admission_bytes / tally.num_handovers,
        traffic.total_bytes / tally.num_requests,
        min(1.0, traffic.busy_s / (duration_s * num_links)),
        bursts.peak_bytes / WINDOW_S,
        bursts.peak_bytes * bursts.num_windows / traffic.total_bytes,
        traffic.backlog_peak_bytes,
        tally.num_expected / tally.num_handovers,
    )
    return dict(zip(names, values, strict=True))


def awaited_share(run: Run, duration_s: float) -> float:
    """Share of the run in which the network between prefill and decode carried what requests wait for."""
    handover = run.replicas[0].handover
    if handover is None or duration_s <= 0:
        return 0.0
    return handover.links[0].traffic.awaited_s / (duration_s * len(handover.links))


def host_per_request(run: Run) -> Row:
    """Host memory of a request on the replicas that decode, all GPUs: over time, and the most that one came to hold."""
    request_s = sum(replica.request_s for replica in run.replicas)
    byte_s = sum(replica.host_byte_s for replica in run.replicas)
    peak = max(replica.scheduler.tally.host_request_peak_bytes for replica in run.replicas)
    return {
        "host_bytes_per_request_mean": run.tensor_parallel * byte_s / request_s if request_s > 0 else None,
        "host_bytes_per_request_peak": run.tensor_parallel * peak,
    }


def prefix_metrics(run: Run) -> Row:
    """What a prefix cache found; null without one."""
    caches = [replica.scheduler.prefix for replica in (*run.replicas, *run.prefill)]
    found = [cache.tally for cache in caches if cache is not None]
    names = ("prefix_hit_share", "prefix_host_hit_share", "prefix_reused_tokens", "prefix_loaded_bytes")
    if not found:
        return dict.fromkeys(names)
    blocks = max(1, sum(tally.num_blocks for tally in found))
    loaded_bytes = run.tensor_parallel * sum(tally.loaded_bytes for tally in found)
    shares = [sum(tally.hit_blocks for tally in found), sum(tally.host_hit_blocks for tally in found)]
    reused_tokens = sum(tally.reused_tokens for tally in found)
    return dict(zip(names, (*(hits / blocks for hits in shares), reused_tokens, loaded_bytes), strict=True))


def pool_peaks(run: Run) -> Row:
    """Largest bytes per GPU over the replicas; outside HBM those of all GPUs together."""
    pools = [replica.scheduler.pools for replica in run.replicas]
    peak = np.max([p.peak for p in pools], axis=0)
    return {
        "hbm_bytes_peak": run.static_bytes + max(p.hbm_peak_bytes for p in pools),
        "host_bytes_peak": run.tensor_parallel * sum(p.host_peak_bytes for p in pools),
        "remote_bytes_peak": run.tensor_parallel * sum(p.remote_peak_bytes for p in pools),
        "full_kv_bytes_peak": int(peak[Pool.FULL_KV]),
        "sparse_kv_bytes_peak": int(peak[Pool.SPARSE_KV]),
        "compressed_keys_bytes_peak": int(peak[Pool.COMPRESSED_KEYS]),
        "draft_kv_bytes_peak": int(peak[Pool.DRAFT_KV]),
        "kv_pool_utilization_peak": max(p.hbm_peak_bytes / p.hbm_bytes for p in pools),
    }


def demand_metrics(run: Run) -> Row:
    """Content metrics as means over decode steps: those that drew demand rows, and those that had all they needed."""
    names = ("hit_rate", "overlap", "recall", "recall_upper", "churn")
    decode_steps = run.log.sum_decoding
    if not run.demand.groups:
        return {**dict.fromkeys(names), "recall": 1.0, "recall_upper": 1.0}
    if not decode_steps:
        return dict.fromkeys(names)
    sums = dict.fromkeys(names, 0.0)
    for index, group in enumerate(run.demand.groups):
        uses = run.demand.uses(index)
        for demand in group.demands:
            steady = slice(demand.steady_start, demand.steady_stop)
            kept = np.minimum(demand.num_kept, demand.num_blocks)[:, None]
            for name, values in (
                ("hit_rate", demand.hit / kept),
                ("overlap", demand.overlap),
                ("recall", demand.recall),
                ("recall_upper", demand.recall_upper),
                ("churn", demand.fetched / demand.num_kept),
            ):
                per_step = values[steady].mean(axis=1) / (demand.num_kv_heads * len(group.demands))
                sums[name] += float(uses @ per_step)
    resident = decode_steps - int(run.demand.row_uses.sum())
    means: Row = {name: (total + resident * (name != "churn")) / decode_steps for name, total in sums.items()}
    return means if run.iterations[0].transfers else {**means, "overlap": None, "churn": None}


def first_refused(log: RequestLog) -> str | None:
    request = log.first_refused
    if request is None:
        return None
    return f"request {request.index}: {request.prompt_tokens:,} prompt and {request.output_tokens:,} output tokens"


def bound(run: Run, row: Row, done_s: NDArray[np.float64]) -> tuple[str, str]:
    """What limits the iterations, and a sentence with the figures.

    h2d, remote: the link or the way beyond the host, whichever is busier, is saturated, or waiting for it is the
    largest share of the time; remote also where requests wait for a network between prefill and decode that is
    saturated. software: the CPU's share is. capacity: requests had to make room, or the next one waits for memory
    (`WAITS_FOR_MEMORY`). Else compute or hbm, by the larger of the times that the rows' products and the weights' reads
    need alone.
    """
    total_s = max(float(done_s[STEP]), 1e-12)
    exposed, software = float(done_s[T_EXPOSED]) / total_s, float(done_s[T_SOFTWARE]) / total_s
    detail = (
        f"GPUs busy {row['gpu_utilization']:.0%} of the run, mean batch {row['batch_mean']:.1f}, host link busy "
        f"{row['link_utilization']:.0%}, exposed {exposed:.0%} of an iteration"
    )
    on_link, beyond = row["link_utilization"], row["remote_utilization"]
    if beyond:
        way = "pulling" if run.prefill else run.iterations[0].setting.placement.kv_tier
        detail = f"{way} busy {beyond:.0%}, {detail}"
    awaited = awaited_share(run, row["duration_s"])
    if awaited:
        detail = f"network busy {awaited:.0%} with what requests wait for, {detail}"
    if awaited >= SATURATED * row["gpu_utilization"] > 0:
        return "remote", detail
    saturated = max(on_link, beyond) >= SATURATED * row["gpu_utilization"] > 0
    if saturated or exposed >= max(1 - exposed - software, software):
        return ("remote" if beyond >= on_link else "h2d"), detail
    if software >= 1 - exposed - software:
        return "software", detail
    if row["num_preemptions"] or row["memory_wait_share"] >= WAITS_FOR_MEMORY:
        waits = f"memory is short in {row['memory_wait_share']:.0%} of the iterations"
        return "capacity", f"{row['num_preemptions']:,} preemptions, {waits}; {detail}"
    setting = run.iterations[0].setting
    gpu = setting.hardware.gpu
    rows = run.log.sum_decoding + sum(r.scheduler.tally.prefilled_tokens for r in run.replicas)
    compute_s = 2.0 * rows * active_params(setting.model) / gpu.bf16_sustained_flops.value
    read_s = run.log.num_iterations * setting.model.weight_bytes / gpu.hbm_read_bytes_per_s.value
    return ("compute" if compute_s > read_s else "hbm"), detail
