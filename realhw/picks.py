"""Which points of a sweep a validation runs: extremes, the best, and random ones, of those that the harness can run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from realhw.decode_point import SYSTEMS, Point
from realhw.geometry import GEOMETRIES
from realhw.kernels.attention.limits import NUM_ROWS
from realhw.point_list import START_STRIDE, steps_for
from realhw.point_policy import policy_of
from simulator.policy_composition import resolve_policy
from traces.errors import InputError

Row = Mapping[str, Any]
_ONE_GPU = {
    "placement.host_numa": "local", "placement.kv_tier": "host", "placement.num_gpus": 1,
    "placement.tensor_parallel": 1, "engine.software_overhead_s": 0.0, "mapping.rule": "auto",
    "mapping.layers": "shared",
}  # fmt: skip
"""What the harness is: one GPU with its KV in local host memory, a graph without CPU time, the default mapping."""
_NO_MATTER = ("placement.remote_path", "placement.nic_numa", "engine.hbm_utilization")


@dataclass(frozen=True, slots=True)
class Pick:
    """A point to run and why it was picked."""

    point: Point
    reason: str
    simulated_tpot_s: float


def point_of(row: Row) -> Point:
    """The decode run of a sweep's row. Raises InputError saying what the harness does not have."""
    if row["system"] not in SYSTEMS:
        raise InputError(f"system {row['system']}")
    if row["model"] not in GEOMETRIES:
        raise InputError(f"model {row['model']}")
    for key, value in row.items():
        if _is_null(value) or key in _NO_MATTER:
            continue
        if key.startswith("serving."):
            raise InputError("serving runs")
        if key.split(".")[0] in ("placement", "engine", "mapping") and "." in key and _ONE_GPU.get(key) != value:
            raise InputError(f"{key} {value}")
    overrides = {
        key.removeprefix("policy."): _plain(value)
        for key, value in row.items()
        if key.startswith("policy.") and not _is_null(value)
    }
    context = int(row["workload.context_tokens"])
    simulated = resolve_policy(row["system"], overrides, context)
    if simulated.transport == "ce-per-block":
        raise InputError("policy.transport ce-per-block")
    size = simulated.block_size_tokens
    point = Point(
        row["system"], int(row["workload.batch_size"]), context, (simulated.kv_budget_tokens or context // 8) // size,
        size, float(simulated.fetch_cap), simulated.lookahead_k, simulated.gather_ctas, row["model"],
        steps_for(simulated.lookahead_k), start_stride=START_STRIDE, transport=simulated.transport,
        trace=row["trace"], trace_group=row["trace_group"],
    )  # fmt: skip
    runs = policy_of(point)
    for key, value in simulated.model_dump().items():
        if getattr(runs, key) != value:
            raise InputError(f"policy.{key} {value}")
    rows = point.flow().rows_per_request * GEOMETRIES[point.model].group_size
    if rows > NUM_ROWS:
        raise InputError(
            f"policy.lookahead_k {point.lookahead_k}: {rows} query rows per KV head, attention has {NUM_ROWS}"
        )
    return point


def runnable(rows: Sequence[Row]) -> tuple[list[tuple[Row, Point]], Counter[str]]:
    """Rows that fit and that the harness runs, with their points; how many of the others for which reason."""
    found, left_out = [], Counter[str]()
    for row in rows:
        if row["status"] != "ok":
            left_out["does not fit" if row["status"] == "does_not_fit" else "failed"] += 1
            continue
        try:
            point = point_of(row)
            point.step_trace()
        except InputError as error:
            left_out[str(error)] += 1
        else:
            found.append((row, point))
    return found, left_out


def pick(found: Sequence[tuple[Row, Point]], count: int, maximize: str, seed: int) -> list[Pick]:
    """Up to `count` points: by TPOT and by exposed transfer the extremes, each system's best, then random ones."""

    def tpot(i: int) -> float:
        return float(found[i][0]["tpot_mean_s"])

    def exposed(i: int) -> float:
        return float(_or(found[i][0].get("exposed_transfer_s"), 0.0)) / tpot(i)

    def objective(i: int) -> float:
        return float(_or(found[i][0].get(maximize), -np.inf))

    every = range(len(found))
    wanted: list[tuple[int, str]] = []
    if found:
        wanted += [(max(every, key=objective), f"best {maximize}"), (min(every, key=tpot), "least TPOT")]
        wanted += [(max(every, key=tpot), "most TPOT"), (max(every, key=exposed), "most exposed transfer")]
    for system in dict.fromkeys(row["system"] for row, _ in found):
        own = [i for i in every if found[i][0]["system"] == system]
        wanted.append((max(own, key=objective), f"best of {system}"))
    wanted += [(int(i), f"random, seed {seed}") for i in np.random.default_rng(seed).permutation(len(found))]
    reasons: dict[str, Pick] = {}
    for i, reason in wanted:
        if len(reasons) == count:
            break
        reasons.setdefault(found[i][1].key(), Pick(found[i][1], reason, tpot(i)))
    return list(reasons.values())


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def _or(value: Any, default: Any) -> Any:
    return default if _is_null(value) else value


def _plain(value: Any) -> Any:
    """A table's value as the schema takes it: whole numbers may have become floats beside nulls."""
    value = value.item() if isinstance(value, np.generic) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value
