"""What the simulator says about points that ran on a GPU: `oasis-sim validate CAMPAIGN --hardware NAME`.

First exact equality of what moved (counts, and hashes of ids and slots, against `simulator.residency`), then the time
of a decode step against the timeline on a calibrated profile. The timeline plays the blocks that the rules give for the
very rows that the GPU ran, so that a difference in time is not a difference in demand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from realhw.decode_point import Point, trace_hash
from realhw.expected_moves import ExpectedMoves, HeadMoves, expected_moves, mismatches
from realhw.step_trace import StepTrace
from realhw.validation_summary import summarise
from simulator.catalog import load_hardware, load_model
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


def policy_of(point: Point) -> PolicySpec:
    """The point's flow as the simulator's policy."""
    flow = point.flow()
    common: dict[str, Any] = {
        "kv_budget_tokens": point.num_kept * point.block_size_tokens,
        "block_size_tokens": point.block_size_tokens,
        "gather_ctas": point.gather_ctas,
        "fetch_cap": point.fetch_cap,
        "lookahead_k": point.lookahead_k,
    }
    if flow.kind in ("dense", "quest"):
        selector = "all" if flow.kind == "dense" else "minmax"
        return PolicySpec(selector=selector, predictor="current", residency="everything", **common)
    if flow.kind == "on-demand":
        return PolicySpec(predictor="current", **common)
    if flow.draft_rows == 0:
        return PolicySpec(predictor="previous", **common)
    return PolicySpec(predictor="draft", residency="slack", slack_blocks=flow.slack_blocks, **common)


def steady_steps(point: Point) -> slice:
    """Steps that means use: settled, and with plans still being issued."""
    return slice(WARM_UP_STEPS, point.num_steps - 1 - point.flow().distance)


def run_work(point: Point, trace: StepTrace, expected: ExpectedMoves | None, hardware: HardwareSpec) -> RunWork:
    """Every step's work for the rows that the GPU ran."""
    model, policy = load_model(point.model), policy_of(point)
    workload = WorkloadSpec(
        batch_size=point.batch_size, context_tokens=point.context_tokens, output_tokens=point.num_steps
    )

    def build(demands: tuple[Demand, ...], offsets: np.ndarray) -> RunWork:
        return build_run_work(
            model, hardware, policy, workload, PlacementSpec(), EngineSpec(), point.context_tokens, demands, offsets
        )

    if expected is None:
        return build((), np.zeros(1, dtype=np.int64))
    # The demand is already the batch's sum: one request at offset 0. Write-back depends on each request's own offset.
    whole = build((_demand(point, expected, empty=False),), np.zeros(1, dtype=np.int64))
    each = build((_demand(point, expected, empty=True),), trace.offsets.astype(np.int64))
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


def predict(
    row: dict[str, Any], hardware: HardwareSpec, known: dict[Hashable, HeadMoves] | None = None
) -> dict[str, Any]:
    """One validation row of a campaign row that ran."""
    point = Point(**row["point"])
    trace = point.step_trace()
    if trace_hash(trace) != row["trace"]:
        raise ValueError(f"point {row['key']}: the trace that the GPU ran cannot be made again here")
    expected = None
    if "fetched" in row:
        expected = expected_moves(point.flow(), trace, point.num_steps, known)
    run = run_work(point, trace, expected, hardware)
    policy, steps = policy_of(point), steady_steps(point)
    rates = engine_rates(hardware, policy.transport, policy.gather_ctas, point.batch_size)
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
        "policy.gather_ctas": point.gather_ctas,
        "predicted_tpot_s": float(predicted.mean()), "measured_tpot_s": float(mid),
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


def read_campaign(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(head with device and start, rows of the points that ran). Raises InputError for anything else."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        # The last line may be torn by a kill; the point that it held is run again.
        head, *rows = [json.loads(line) for line in lines if line.endswith("}")]
        ran = [row for row in rows if row["status"] == "ok"]
        if not head["device"]["name"]:
            raise KeyError("device")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: is no campaign of decode points ({type(error).__name__}: {error})") from error
    return head, ran


def compare(
    campaign: Path, hardware_name: str, out: Path, commit: str | None, on_point: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Predict every point of a campaign; writes `points.jsonl` as it goes, `points.parquet` and `summary.json`.

    Returns the summary. Raises InputError for a file that is no campaign or an unknown profile.
    """
    head, rows = read_campaign(campaign)
    hardware = load_hardware(hardware_name)
    known: dict[str, dict[Hashable, HeadMoves]] = {}
    predictions = []
    out.mkdir(parents=True, exist_ok=True)
    with (out / "points.jsonl").open("w", encoding="utf-8") as file:
        for row in rows:
            shared = json.dumps({k: v for k, v in row["point"].items() if k != "batch_size"}, sort_keys=True)
            predictions.append(predict(row, hardware, known.setdefault(shared, {})))
            file.write(json.dumps(predictions[-1]) + "\n")
            file.flush()
            on_point(predictions[-1])
    _write_parquet(predictions, out / "points.parquet")
    provenance = {
        "device": head["device"]["name"],
        "driver": head["device"]["driver"],
        "date": head["started"],
        "commit": commit,
        "profile": hardware.name,
        "profile_date": hardware.date,
        "profile_device": hardware.device,
        "fetched_blocks_compared": sum(row["fetched_blocks"] for row in predictions),
    }
    summary = summarise(predictions, provenance)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def _write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    """Plain columns only: parts become `predicted.t_qkv_s` and `measured.qkv`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = []
    for row in rows:
        plain = {name: value for name, value in row.items() if not isinstance(value, dict)}
        for kind in ("predicted", "measured"):
            plain |= {f"{kind}.{part}": value for part, value in (row.get(f"{kind}_parts_s") or {}).items()}
        plain.pop("measured_parts_s", None)
        flat.append(plain)
    names = list(dict.fromkeys(name for row in flat for name in row))
    pq.write_table(pa.table({name: [row.get(name) for row in flat] for name in names}), path)
