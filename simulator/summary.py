"""From what happened on the timeline to the columns of one result row (`simulator.metrics`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator import cost
from simulator.capacity import Footprint
from simulator.demand import Demand
from simulator.metrics import BREAKDOWN
from simulator.remote import on_drives, over_network, stream_write_bytes_per_s
from simulator.specs.experiment import PlacementSpec
from simulator.specs.hardware import HardwareSpec
from simulator.specs.model import ModelSpec
from simulator.specs.policy import KV_BYTES_PER_ELEMENT, PolicySpec
from simulator.step_layout import T_EXPOSED
from simulator.step_work import RunWork
from simulator.timeline import TimelineResult

SATURATED = 0.95
"""Link utilisation from which the link is what binds, whatever else the step waits for. A convention."""


@dataclass(frozen=True, slots=True)
class Point:
    """What a row is summarised from."""

    model: ModelSpec
    """One GPU's shard."""
    hardware: HardwareSpec
    policy: PolicySpec
    placement: PlacementSpec
    batch_size: int
    context_tokens: int
    demands: tuple[Demand, ...]
    """One per GPU of a replica; none for dense attention."""
    footprint: Footprint
    runs: Sequence[RunWork]
    """One per replica."""
    result: TimelineResult

    @property
    def num_gpus(self) -> int:
        return len(self.runs) * self.model.tensor_parallel


def warm_up_steps(run: RunWork) -> int:
    """Steps left out of every mean: the first, and those before the first prefetch can have been used."""
    return run.rules.lookahead_k + 1


def summarise(point: Point) -> dict[str, Any]:
    """Metrics, breakdown and plot columns; undefined is None."""
    warm_up = warm_up_steps(point.runs[0])
    step_s = point.result.step_s[:, warm_up:]
    parts_s = point.result.parts_s[:, warm_up:].mean(axis=(0, 1))
    link_s, remote_s = point.result.h2d_busy_s[:, warm_up:], point.result.remote_busy_s[:, warm_up:]
    gained = np.array([tokens_gained(point, run)[warm_up:] for run in point.runs])
    tokens = float(gained.sum())
    throughput = float((gained.sum(axis=1) / step_s.sum(axis=1)).sum())
    tokens_per_step = tokens / (step_s.size * point.batch_size)
    # Per token of a request: a step with verified drafts gains several.
    parts_s = parts_s / tokens_per_step
    link_busy_s, remote_busy_s = float(link_s.mean()) / tokens_per_step, float(remote_s.mean()) / tokens_per_step
    tpot_s = float(step_s.mean()) / tokens_per_step
    token_s = step_s * point.batch_size / gained
    exposed_s = float(parts_s[T_EXPOSED])

    def bytes_per_token(name: str) -> float:
        return sum(float(getattr(run, name)[warm_up:].sum()) for run in point.runs) / tokens

    beyond_host = bytes_per_token("remote_read_bytes") + bytes_per_token("remote_write_bytes")
    busy_s = max(link_busy_s, remote_busy_s)
    kv_len = point.context_tokens + round(point.result.step_s.shape[1] * tokens_per_step) - 1
    row: dict[str, Any] = {
        "throughput_tokens_per_s": throughput,
        "throughput_per_gpu_tokens_per_s": throughput / point.num_gpus,
        "tpot_mean_s": tpot_s,
        "tpot_p50_s": float(np.quantile(token_s, 0.5)),
        "tpot_p99_s": float(np.quantile(token_s, 0.99)),
        "ttft_p50_s": ttft_p50_s(point),
        "exposed_transfer_s": exposed_s,
        "hidden_fraction": float(np.clip(1 - exposed_s / busy_s, 0, 1)) if busy_s > 0 else None,
        **demand_metrics(point.demands, point.policy),
        "h2d_bytes_per_token": bytes_per_token("h2d_bytes"),
        "d2h_bytes_per_token": bytes_per_token("d2h_bytes"),
        "remote_bytes_per_token": beyond_host if over_network(point.placement) else 0.0,
        "nvme_bytes_per_token": beyond_host if on_drives(point.placement) else 0.0,
        "admission_bytes": admission_bytes(point),
        "link_utilization": min(1.0, link_busy_s / tpot_s),
        "link_busy_s": link_busy_s,
        "remote_utilization": min(1.0, remote_busy_s / tpot_s),
        "remote_busy_s": remote_busy_s,
        "hbm_bytes_peak": point.footprint.hbm_bytes(point.batch_size),
        "host_bytes_peak": point.footprint.host_bytes(point.batch_size) * point.num_gpus,
        "remote_bytes_peak": point.footprint.remote_bytes(point.batch_size) * point.num_gpus,
        "max_batch_size": point.footprint.max_batch_size,
        "tokens_per_iteration": tokens_per_step,
        "iteration_s": float(step_s.mean()),
        "draft_overhead_s": float(np.mean([run.draft_overhead_s for run in point.runs])),
        **{name: float(seconds) for name, seconds in zip(BREAKDOWN, parts_s, strict=True)},
    }
    row |= ceilings(point, kv_len, tokens_per_step)
    alone = point.runs[0]
    for name, rate, fetched in (
        ("h2d_ceiling_tokens_per_s", alone.link_bytes_per_s, bytes_per_token("h2d_bytes")),
        ("remote_ceiling_tokens_per_s", alone.remote_bytes_per_s, bytes_per_token("remote_read_bytes")),
    ):
        row[name] = point.num_gpus * rate / fetched if fetched else None
    row["bound"], row["bound_detail"] = bound(point, row)
    return row


def tokens_gained(point: Point, run: RunWork) -> NDArray[np.float64]:
    """Tokens that a replica's batch gains in each step, float64 [T]."""
    if run.tokens is not None:
        return run.tokens
    return np.full(run.work.durations_s.shape[0], float(point.batch_size))


def demand_metrics(demands: Sequence[Demand], policy: PolicySpec) -> dict[str, float | None]:
    """Content metrics over the steady rows, mean over GPUs. Dense attention selects nothing: most of its are null."""
    if policy.selector == "all":
        return {"hit_rate": None, "overlap": None, "recall": 1.0, "recall_upper": 1.0, "churn": None}
    moves = policy.offloads

    def mean(metric: Callable[[Demand], float]) -> float:
        return math.fsum(map(metric, demands)) / len(demands)

    return {
        "hit_rate": mean(Demand.hit_rate),
        "overlap": mean(Demand.mean_overlap) if moves else None,
        "recall": mean(Demand.mean_recall),
        "recall_upper": mean(Demand.mean_recall_upper),
        "churn": mean(Demand.churn) if moves else None,
    }


def admission_bytes(point: Point) -> int:
    """KV bytes of one request that must be in the HBM of its replica before its first decode step."""
    element = KV_BYTES_PER_ELEMENT[point.policy.kv_dtype]
    if point.policy.residency == "streamed":
        return 0
    if not point.demands or point.policy.residency == "everything":
        return point.model.tensor_parallel * point.model.kv_bytes(point.context_tokens, element)
    return sum(demand.admission_blocks for demand in point.demands) * point.model.block_bytes(
        point.policy.block_size_tokens, element
    )


def ttft_p50_s(point: Point) -> float:
    """Median over the batch when all prompts arrive at once and are prefilled one after another.

    A system whose KV lives outside HBM writes it there layer by layer while it prefills: the slowest stage counts.
    """
    prefill_s = cost.prefill_s(point.hardware, point.model, point.context_tokens)
    if point.policy.offloads:
        element = KV_BYTES_PER_ELEMENT[point.policy.kv_dtype]
        kv_bytes = point.model.kv_bytes(point.context_tokens, element)
        prefill_s = max(prefill_s, kv_bytes / point.hardware.link.d2h_bytes_per_s.value)
        if point.placement.kv_tier != "host":
            prefill_s = max(prefill_s, kv_bytes / stream_write_bytes_per_s(point.hardware, point.placement))
    return float(np.median(np.arange(1, point.batch_size + 1))) * prefill_s


def ceilings(point: Point, kv_len: int, tokens_per_step: float) -> dict[str, float | None]:
    """Tokens/s of the host's GPUs if HBM or compute alone bound, and the KV and metadata bytes HBM serves per token.

    Every byte and operation of a token is counted on each GPU that it costs.
    """
    model, policy, gpu = point.model, point.policy, point.hardware.gpu
    element = KV_BYTES_PER_ELEMENT[policy.kv_dtype]
    read = float(model.kv_bytes(kv_len, element))
    if policy.selector != "all":
        num_blocks = -(-kv_len // policy.block_size_tokens)
        budget_blocks = min((policy.kv_budget_tokens or 0) // policy.block_size_tokens + 1, num_blocks)
        window = len(model.sliding_layers) * min(kv_len, model.sliding_window or 0)
        read = float(model.working_set_bytes(budget_blocks, policy.block_size_tokens, element))
        read += window * model.kv_bytes_per_token_per_layer(element)
        read += cost.scored_bytes(model, policy, num_blocks)
    replicas, batch = len(point.runs), point.batch_size
    gained = replicas * batch * tokens_per_step
    rows = batch * (1 + cost.draft_rows(policy))
    params_bytes = weight_read_bytes(model, rows)
    hbm_s = (params_bytes + batch * read) / gpu.hbm_read_bytes_per_s.value
    flops = 2.0 * rows * active_params(model)
    return {
        "kv_bytes_read_per_token": read * model.tensor_parallel / tokens_per_step,
        "hbm_ceiling_tokens_per_s": gained / hbm_s,
        "compute_ceiling_tokens_per_s": gained * gpu.bf16_sustained_flops.value / flops,
    }


def weight_read_bytes(model: ModelSpec, rows: int) -> float:
    """Weights one step reads: every layer's projections, the dense or expected active experts' FFN, lm_head."""
    layers = model.num_layers * (model.qkv_bytes + model.o_bytes) + model.num_dense_ffn_layers * model.ffn_bytes
    return layers + model.num_moe_layers * model.moe_layer_read_bytes(rows) + model.lm_head_bytes


def active_params(model: ModelSpec) -> int:
    """Parameters that one token multiplies with."""
    params = model.num_layers * (model.qkv_params + model.o_params) + model.num_dense_ffn_layers * model.ffn_params
    if model.moe is not None:
        experts = model.moe.experts_per_token + model.moe.shared_experts
        params += model.num_moe_layers * (experts * model.expert_params + model.router_params)
    return params + model.lm_head_params


def bound(point: Point, row: dict[str, Any]) -> tuple[str, str]:
    """What limits the point, and a sentence with the figures.

    capacity: not one more request fits. h2d, remote: the link or the way beyond the host, whichever is busier, is
    saturated, or waiting for it is the largest share of the step. software: the CPU's share is. Else hbm or compute,
    whichever ceiling is lower.
    """
    tpot_s = row["tpot_mean_s"]
    waiting, software = row["t_exposed_wait_s"], row["t_software_s"]
    kernels = tpot_s - waiting - software
    on_link, beyond = row["link_utilization"], row["remote_utilization"]
    link = f"host link busy {on_link:.0%}, exposed {waiting / tpot_s:.0%} of the step"
    if beyond:
        link = f"{point.placement.kv_tier} busy {beyond:.0%}, {link}"
    if max(on_link, beyond) >= SATURATED or waiting >= max(kernels, software):
        return ("remote" if beyond >= on_link else "h2d"), link
    if software >= kernels:
        return "software", f"CPU overhead is {software / tpot_s:.0%} of the step"
    hbm, compute = row["hbm_ceiling_tokens_per_s"], row["compute_ceiling_tokens_per_s"]
    nearest = min(hbm, compute)
    reached = f"{row['throughput_tokens_per_s'] / nearest:.0%} of the {'HBM' if hbm <= compute else 'compute'} ceiling"
    if point.batch_size == row["max_batch_size"]:
        return "capacity", f"memory is full at this batch; {reached}; {link}"
    return ("hbm" if hbm <= compute else "compute"), f"{reached}; {link}"
