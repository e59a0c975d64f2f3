"""From demand (blocks) and a hardware profile to the work of every step (seconds alone), for one replica's batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator import cost
from simulator import step_layout as at
from simulator.demand import Demand
from simulator.engine_rates import gather_wait_s
from simulator.fetch_path import fetch_path
from simulator.specs.experiment import EngineSpec, PlacementSpec, WorkloadSpec
from simulator.specs.hardware import HardwareSpec
from simulator.specs.model import ModelSpec
from simulator.specs.policy import PolicySpec, Predictor
from simulator.step_durations import attention_durations, compute_s, kernel_durations
from simulator.step_layout import StepRules, StepWork
from simulator.step_transfers import Transfers, batch_rows, fetch, stream_all, write_back
from simulator.topology import Solo

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RunWork:
    """One replica's run: rules, work (of any of its GPUs, which run in lockstep) and the bytes of all of them."""

    rules: StepRules
    work: StepWork
    h2d_bytes: Float
    """[T], over the batch."""
    d2h_bytes: Float
    """[T]."""
    link_bytes_per_s: float
    """H2D rate of the transport alone on one GPU's link."""
    remote_read_bytes: Float
    """[T], from beyond the host."""
    remote_write_bytes: Float
    """[T], to beyond the host."""
    remote_bytes_per_s: float = 0.0
    """Blocks from beyond the host alone on one GPU's way; 0: none come."""
    num_gpus: int = 1
    tokens: Float | None = None
    """[T], that the batch gains; None: one per request and step."""
    draft_overhead_s: float = 0.0
    """Mean seconds of a step that drafting and its rows add to the compute stream's kernels."""

    @property
    def solo(self) -> Solo:
        """What one GPU's transfers draw while they run alone, overheads included."""
        seconds = float(self.work.first_s.sum() + self.work.prefetch_s.sum())
        link = float(self.h2d_bytes.sum()) / self.num_gpus / seconds if seconds > 0 else self.link_bytes_per_s
        return Solo(link, self.remote_bytes_per_s or 1.0)


def build_run_work(
    model: ModelSpec,
    hardware: HardwareSpec,
    policy: PolicySpec,
    workload: WorkloadSpec,
    placement: PlacementSpec,
    engine: EngineSpec,
    context_tokens: int,
    demands: Sequence[Demand],
    offsets: NDArray[np.int64],
) -> RunWork:
    """Work of `workload.output_tokens` tokens per request. `offsets` [batch_size]: each request's first demand row.

    A step gains one token, or with verified drafts those of a demand row; the context then grows by their mean.
    `model` is what one GPU of the replica has and `demands` is one per GPU; none for dense attention, which moves
    nothing. The GPUs run in lockstep (`Transfers.of_the_slowest`).
    """
    batch_size = workload.batch_size
    tokens_per_step = demands[0].tokens_per_step() if policy.verify_drafts else 1.0
    num_steps = max(1, round(workload.output_tokens / tokens_per_step))
    kv_len = context_tokens + np.floor(np.arange(num_steps) * tokens_per_step).astype(np.int64)
    corrected_share = max((demand.corrected_share for demand in demands), default=0.0)
    path = fetch_path(model, hardware, policy, placement, corrected_share)
    rules = path.rules
    selects = np.zeros(model.num_layers, dtype=np.bool_)
    if rules.plan_waits:
        selects[list(model.full_attention_layers)] = True
    shape = (num_steps, model.num_full_attention_layers)
    moved = Transfers.none(shape)
    write_s, written_bytes = np.zeros(shape), np.zeros(num_steps)
    if policy.residency == "streamed":
        moved = stream_all(model, policy, path, kv_len, batch_size)
    elif demands and policy.offloads:
        # GPUs that hold the same heads ask for the same blocks.
        by_gpu = {id(demand): fetch(path, demand, offsets, num_steps) for demand in demands}
        moved = Transfers.of_the_slowest([by_gpu[id(demand)] for demand in demands])
    if policy.offloads:
        write_s, written_bytes = write_back(model, policy, path, kv_len, tokens_per_step, offsets)
        written_bytes *= model.tensor_parallel

    def per_layer(values: Float) -> Float:
        spread = np.zeros((num_steps, model.num_layers))
        spread[:, model.full_attention_layers] = values
        return spread

    def kernels(of: PolicySpec) -> tuple[Float, Float]:
        durations_s = kernel_durations(model, hardware, of, path, engine, batch_size, kv_len, corrected_share)
        return durations_s, attention_durations(model, hardware, of, batch_size, kv_len)

    durations_s, attention_s = kernels(policy)
    tokens, draft_overhead_s = None, 0.0
    if policy.verify_drafts:
        tokens = batch_rows(demands[0], demands[0].tokens_by_row()[:, None], offsets, num_steps)[:, 0]
    if cost.drafts(policy):
        plain = policy.model_copy(update={"predictor": _WITHOUT_DRAFTS[policy.predictor], "verify_drafts": False})
        draft_overhead_s = compute_s(durations_s, attention_s, selects) - compute_s(*kernels(plain), selects)
    prefetch_s = per_layer(moved.prefetch_s)
    gemm_s = durations_s[:, [at.QKV, at.FFN]].sum(axis=1, keepdims=True)
    wait_s = gather_wait_s(
        hardware, policy.transport, policy.gather_ctas, batch_size, gemm_s, attention_s, model.num_kv_heads
    )
    return RunWork(
        rules=rules,
        work=StepWork(
            durations_s=durations_s,
            attention_s=attention_s + per_layer(moved.fallback_s),
            scatter_s=per_layer(moved.scatter_s),
            selects=selects,
            first_s=per_layer(moved.first_s),
            prefetch_s=prefetch_s + wait_s * np.sign(prefetch_s),
            write_s=per_layer(write_s),
            waits_for_slots=per_layer(moved.waits_for_slots).astype(np.bool_),
            remote_first_s=per_layer(moved.remote_first_s),
            remote_prefetch_s=per_layer(moved.remote_prefetch_s),
        ),
        h2d_bytes=moved.h2d_bytes,
        d2h_bytes=np.zeros(num_steps) if rules.lands_in_slots else written_bytes,
        link_bytes_per_s=path.link.bytes_per_s,
        remote_read_bytes=moved.remote_bytes,
        remote_write_bytes=written_bytes if rules.remote else np.zeros(num_steps),
        remote_bytes_per_s=path.block_bytes / path.remote.read_s if path.remote is not None else 0.0,
        num_gpus=model.tensor_parallel,
        tokens=tokens,
        draft_overhead_s=draft_overhead_s,
    )


_WITHOUT_DRAFTS: dict[Predictor, Predictor] = {
    "current": "current", "previous": "previous", "draft": "previous", "oracle": "previous", "random": "previous",
    "previous-layer": "previous-layer",
}  # fmt: skip
"""A predictor that plans at the same place and needs no drafts."""
