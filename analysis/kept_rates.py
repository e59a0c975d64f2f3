"""Which rates a serving run kept: one rule and one sentence for table, picture and page."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

RATE = "serving.rate_per_s"
KEPT = 0.9
"""Share of requests within the SLO from which a system is said to keep it. A convention."""
BURST = "latencies there are those of one burst, not of a rate"


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
