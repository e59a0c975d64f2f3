"""Whether a run kept up with the work that came: offered against served tokens, and how long it went on afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from simulator.serving.records import RequestLog

Row = Mapping[str, Any]

RATE = "serving.rate_per_s"
KEPT = 0.9
"""Share of requests within the SLO from which a system is said to keep it. A convention."""
KEEPS_UP = 0.95
"""Share of the offered tokens from which a run is said to keep up. A convention."""
FAST_TPOT = 0.1
"""Quantile of TPOT at which the last requests are taken to decode: the batch empties around them, while the median is
slow where the run is overloaded. A convention."""
BURST = "latencies there are those of one burst, not of a rate"
OFFERED = ("offered_tokens_per_s", "offered_prompt_tokens_per_s", "served_share", "drain_s", "overloaded")


def offered_load(log: RequestLog) -> dict[str, Any]:
    """The columns OFFERED; null where arrivals have no rate (all at once, or none finished).

    Offered is what requests that fit bring, over the time from the first arrival to the last. `drain_s` runs from the
    last arrival to the last finish. The backlog at the last arrival is the larger of two times: what the last tenth of
    the requests waited in the queue (median), and what of the drain goes beyond the requests' own time (their prefill
    and their output at FAST_TPOT, the batch empties; a backlog of preempted requests is not in the queue of new ones).
    `served_share` = arriving / (arriving + backlog). Where the drain is longer than the arrivals, all of it counts: a
    finite number of requests is one burst then. `overloaded`: `served_share` is below KEEPS_UP.
    """
    span_s = log.last_arrival_s - (log.first_arrival_s or 0.0)
    if not log.num_finished or span_s <= 0:
        return dict.fromkeys(OFFERED)
    drain_s = max(0.0, log.last_finish_s - log.last_arrival_s)
    tpot_s = log.times_s("tpot_s")
    token_s = float(np.quantile(tpot_s, FAST_TPOT)) if len(tpot_s) else 0.0
    unqueued_s = log.times_s("ttft_s") - log.times_s("queue_s") + token_s * (log.finished("output_tokens") - 1)
    own_s = float((log.finished("arrival_s") + unqueued_s).max()) - log.last_arrival_s
    newest_first = np.argsort(-log.finished("arrival_s"), kind="stable")
    waited_s = float(np.median(log.times_s("queue_s")[newest_first[: -(-log.num_finished // 10)]]))
    backlog_s = max(waited_s, drain_s - max(0.0, own_s))
    if drain_s > span_s:
        backlog_s = drain_s
    served_share = span_s / (span_s + backlog_s)
    return {
        "offered_tokens_per_s": log.output_tokens / span_s,
        "offered_prompt_tokens_per_s": log.prompt_tokens / span_s,
        "served_share": served_share,
        "drain_s": drain_s,
        "overloaded": bool(served_share < KEEPS_UP),
    }


def is_overloaded(row: Row) -> bool:
    return row.get("overloaded") in (True,)


def keeps_slo(row: Row) -> bool:
    """KEPT of the requests are within the SLO, at a rate that the point keeps up with."""
    return row["slo_attainment"] >= KEPT and not is_overloaded(row)


def kept_rates(rows: Sequence[Row]) -> dict[str, float | None]:
    """Per system the highest rate up to which the SLO is kept at every rate that ran, by the best point of each; null
    where it is missed at the lowest."""
    points: dict[str, dict[float, bool]] = {}
    for row in rows:
        at = points.setdefault(str(row["system"]), {})
        at[row[RATE]] = at.get(row[RATE], False) or keeps_slo(row)
    reached: dict[str, float | None] = {}
    for system, at in points.items():
        rates = list(itertools.takewhile(at.__getitem__, sorted(at)))
        reached[system] = rates[-1] if rates else None
    return reached


def overload_line(rows: Sequence[Row]) -> str | None:
    """One sentence on the points of `rows` that are overloaded; null where none is."""
    over = [row for row in rows if is_overloaded(row)]
    if not over:
        return None
    offered = _range([row["offered_tokens_per_s"] for row in over])
    served = _range([row["throughput_tokens_per_s"] for row in over])
    figures = f"{offered} output tokens/s offered, {served} served"
    if len(rows) == 1:
        return f"Overloaded: {figures}, {over[0]['drain_s']:,.0f} s from the last arrival to the last token; {BURST}."
    if len(over) == len(rows):
        return f"Overloaded at every {'rate' if _differ(rows, RATE) else 'point'}: {figures}; {BURST}."
    where = f"{len(over)} of {len(rows)} points"
    if _differ(rows, RATE):
        lowest: dict[str, float] = {}
        for row in over:
            lowest[str(row["system"])] = min(row[RATE], lowest.get(str(row["system"]), row[RATE]))
        where = ", ".join(f"{system} at {rate:g} a second and more" for system, rate in lowest.items())
        if any(not is_overloaded(r) and r[RATE] >= lowest.get(str(r["system"]), float("inf")) for r in rows):
            where = f"{len(over)} of {len(rows)} points, the first " + where
    return f"Overloaded: {where} ({figures}); {BURST}."


def _differ(rows: Sequence[Row], name: str) -> bool:
    return len({row.get(name) for row in rows}) > 1


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return low if low == high else f"{low} to {high}"
