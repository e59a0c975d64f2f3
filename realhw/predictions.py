"""What the simulator says about one point that ran on a GPU.

First exact equality of what moved (counts, and hashes of ids and slots, against `simulator.residency`), then the time
of a decode step against the timeline on a calibrated profile. The timeline plays the blocks that the rules give for the
very rows that the GPU ran, so that a difference in time is not a difference in demand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from realhw.decode_point import Point, trace_hash
from realhw.expected_moves import ExpectedMoves, expected_moves, mismatches
from realhw.point_policy import policy_of
from realhw.step_trace import StepTrace
from simulator.catalog import load_model
from simulator.demand import COUNT_FIELDS, SHARE_FIELDS, Demand
from simulator.engine_rates import engine_rates
from simulator.metrics import BREAKDOWN
from simulator.specs.experiment import EngineSpec, PlacementSpec, WorkloadSpec
from simulator.specs.hardware import HardwareSpec
from simulator.specs.policy import PolicySpec
from simulator.step_layout import DRAFT, FFN, LM_HEAD, PLAN, QKV, SAMPLING, SCORE
from simulator.step_work import RunWork, build_run_work
from simulator.timeline import play
from simulator.topology import HostTopology
from traces.errors import InputError

WARM_UP_STEPS = 4
"""Steps before the slots and the transfers have settled."""


def steady_steps(point: Point) -> slice:
    """Steps that means use: settled, and with plans still being issued."""
    return slice(WARM_UP_STEPS, point.num_steps - max(1, point.flow().distance))


def run_work(point: Point, trace: StepTrace, expected: ExpectedMoves | None, hardware: HardwareSpec) -> RunWork:
    """Every step's work for the rows that the GPU ran: requests at the batch's mean context, as kernels see it."""
    model, policy = load_model(point.model), policy_of(point)
    workload = WorkloadSpec(
        batch_size=point.batch_size, context_tokens=point.context_tokens, output_tokens=point.num_steps
    )

    def build(of: PolicySpec, context_tokens: int, demands: tuple[Demand, ...], offsets: np.ndarray) -> RunWork:
        return build_run_work(
            model, hardware, of, workload, PlacementSpec(), EngineSpec(), context_tokens, demands, offsets
        )

    mean_context, first = round(float(trace.kv_len[trace.offsets].mean())), np.zeros(1, dtype=np.int64)
    if expected is None:
        return build(policy, mean_context, (), first)
    # The demand is already the batch's sum: one request at offset 0. Write-back depends on each request's own offset,
    # and the runner's is a kernel whatever fetches.
    whole = build(policy, mean_context, (_demand(point, expected, empty=False),), first)
    by_kernel = policy.model_copy(update={"transport": "gather"})
    nothing = _demand(point, expected, empty=True)
    each = build(by_kernel, int(trace.kv_len[0]), (nothing,), trace.offsets.astype(np.int64))
    return replace(whole, work=replace(whole.work, write_s=each.work.write_s), d2h_bytes=each.d2h_bytes)


def _demand(point: Point, expected: ExpectedMoves, empty: bool) -> Demand:
    zeros = np.zeros(expected.fetched.shape, dtype=np.int32)
    counts: dict[str, Any] = dict.fromkeys(COUNT_FIELDS, zeros)
    if not empty:
        for name in ("fetched", "evicted", "runs", "in_slack"):
            counts[name] = getattr(expected, name).astype(np.int32)
    shares: dict[str, Any] = dict.fromkeys(SHARE_FIELDS, zeros.astype(np.float64))
    flow = point.flow()
    blocks = -(-(point.context_tokens + np.arange(point.num_steps)) // point.block_size_tokens)
    return Demand(
        **counts, **shares, num_blocks=blocks.astype(np.int32), num_kv_heads=load_model(point.model).num_kv_heads,
        num_kept=flow.num_kept, num_slots=flow.num_slots, lookahead_k=flow.distance, admission_blocks=0,
        steady_start=0, steady_stop=point.num_steps,
    )  # fmt: skip


def transfer_over_compute(run: RunWork, steps: slice) -> float:
    """Link time alone over compute-stream time alone, of the steady steps."""
    layers = run.rules.num_layers
    once = run.work.durations_s[steps][:, [DRAFT, SAMPLING, LM_HEAD]].sum()
    per_layer = [QKV, FFN, *(range(SCORE, PLAN + 1) if run.rules.on_demand else ())]
    compute = once + layers * run.work.durations_s[steps][:, per_layer].sum() + run.work.attention_s[steps].sum()
    return float((run.work.first_s[steps].sum() + run.work.prefetch_s[steps].sum()) / compute)


def predict(row: dict[str, Any], hardware: HardwareSpec) -> dict[str, Any]:
    """One validation row of a campaign row that ran."""
    point = Point(**row["point"])
    trace = point.step_trace()
    if trace_hash(trace) != row["trace"]:
        raise InputError(
            f"point {row['key']} ({point.system}, {point.trace}): the block ids that the GPU ran are not those of the "
            "trace here; run the point again"
        )
    expected = None
    if "fetched" in row:
        expected = expected_moves(point.flow(), trace, point.num_steps)
    run = run_work(point, trace, expected, hardware)
    policy, steps = policy_of(point), steady_steps(point)
    kv_heads = load_model(point.model).num_kv_heads
    rates = engine_rates(hardware, policy.transport, policy.gather_ctas, point.batch_size, kv_heads)
    result = play([run], rates, HostTopology(hardware, 1, PlacementSpec()))
    predicted = result.step_s[0][steps]
    measured = np.array(row["step_s"])[:, steps]
    repeats = measured.mean(axis=1)
    low, mid, high = np.percentile(repeats, [25, 50, 75])
    return {
        "point_key": row["key"], "system": point.system, "model": point.model, "hardware": hardware.name,
        "workload.batch_size": point.batch_size, "workload.context_tokens": point.context_tokens,
        "policy.kv_budget_tokens": policy.kv_budget_tokens, "policy.block_size_tokens": point.block_size_tokens,
        "policy.fetch_cap": point.fetch_cap, "policy.lookahead_k": point.lookahead_k,
        "policy.gather_ctas": point.gather_ctas, "policy.transport": point.transport, "trace": point.trace,
        "aliased_requests": row["aliased_requests"], "num_layers": run.rules.num_layers,
        "again": bool(point.repeat or not point.aliased),
        "predicted_tpot_s": float(predicted.mean()), "measured_tpot_s": float(mid),
        "predicted_p50_s": float(np.median(predicted)), "measured_p50_s": float(np.median(measured)),
        "predicted_p99_s": float(np.quantile(predicted, 0.99)), "measured_p99_s": float(np.quantile(measured, 0.99)),
        "error": float(predicted.mean() / mid - 1), "repeat_spread": float((high - low) / mid),
        "transfer_over_compute": transfer_over_compute(run, steps),
        "byte_mismatches": 0 if expected is None else mismatches(row, expected),
        "fetched_blocks": 0 if expected is None else int(expected.fetched.sum()),
        "predicted_parts_s": dict(zip(BREAKDOWN, result.parts_s[0][steps].mean(axis=0).tolist(), strict=True)),
        "measured_parts_s": _mean_parts(row.get("parts_s"), steps),
    }  # fmt: skip


def _mean_parts(parts: list[dict[str, float]] | None, steps: slice) -> dict[str, float] | None:
    """Means of a run with time marks between the parts; the marks themselves slow overlapping work."""
    if not parts:
        return None
    names = list(dict.fromkeys(name for step in parts for name in step))
    return {name: float(np.mean([step.get(name, 0.0) for step in parts[steps]])) for name in names}
