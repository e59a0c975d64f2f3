"""Which point of a sweep is best, and what its neighbours cost.

Throughput alone would always choose "fetch nothing", so a point is admissible only with recall of at least
`objective.min_recall`; its default follows the point's own budget and block size (`simulator.sweep`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.metrics import BREAKDOWN, METRICS, PARAMETERS
from traces.errors import InputError

Row = dict[str, Any]

RECALL_MARGIN = 0.01
"""Recall that an admissible point may lose against uncapped on-demand retrieval. An assumption."""

BETTER_SMALL = {
    "tpot_mean_s",
    "tpot_p50_s",
    "tpot_p99_s",
    "ttft_p50_s",
    "exposed_transfer_s",
    "churn",
    "h2d_bytes_per_token",
    "d2h_bytes_per_token",
    "remote_bytes_per_token",
    "admission_bytes",
    "hbm_bytes_peak",
    "host_bytes_peak",
    *BREAKDOWN,
}


def require_objective(maximize: str) -> None:
    """Refuse a column that is no metric, or that is better when small (write `-tpot_mean_s` to maximise its negative).

    Raises InputError with the nearest valid names.
    """
    numeric = [name for name, unit in METRICS.items() if unit] + list(BREAKDOWN)
    name = maximize.removeprefix("-")
    if name not in numeric:
        near = difflib.get_close_matches(name, numeric, 3) or ["throughput_tokens_per_s"]
        raise InputError(f"objective.maximize: {name!r} is not a numeric result column; nearest: {', '.join(near)}")
    if name in BETTER_SMALL and name == maximize:
        raise InputError(f"objective.maximize: {name} is better when small: write -{name}")


def score(row: Row, maximize: str) -> float | None:
    """Value to maximise; null when the row has none."""
    value = row.get(maximize.removeprefix("-"))
    if row["status"] != "ok" or value is None:
        return None
    return -float(value) if maximize.startswith("-") else float(value)


def is_admissible(row: Row) -> bool:
    return row["status"] == "ok" and row["recall"] is not None and row["recall"] >= (row["min_recall"] or 0.0)


def best_row(rows: Iterable[Row], maximize: str) -> Row | None:
    """Admissible row with the largest score; of equal ones that with more recall, then the first. Null if none."""
    scored = [(value, row) for row in rows if is_admissible(row) and (value := score(row, maximize)) is not None]
    return max(scored, key=lambda item: (item[0], item[1]["recall"]))[1] if scored else None


def nearest_row(rows: Iterable[Row], maximize: str) -> Row | None:
    """Row that misses its recall threshold by least; of equal ones the one with the largest score. Null if none ran."""
    scored = [
        (row["recall"] - (row["min_recall"] or 0.0), value, row)
        for row in rows
        if row["recall"] is not None and (value := score(row, maximize)) is not None
    ]
    return max(scored, key=lambda item: item[:2])[2] if scored else None


def best_by_system(rows: Sequence[Row], maximize: str) -> list[Row]:
    """For each system, in order of appearance, its best row, else its nearest, else its first (which did not run)."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["system"], []).append(row)
    return [best_row(group, maximize) or nearest_row(group, maximize) or group[0] for group in groups.values()]


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A row that differs from the best one in one parameter, by one value of the grid."""

    parameter: str
    row: Row


def swept_parameters(rows: Sequence[Row]) -> list[str]:
    """Parameters with more than one value among the rows (null, "does not apply", is not counted)."""
    names = [*PARAMETERS, *sorted({key for row in rows for key in row if "." in key} - set(PARAMETERS))]
    return [name for name in names if len({row.get(name) for row in rows} - {None}) > 1]


def neighbours(rows: Sequence[Row], center: Row) -> list[Neighbour]:
    """Rows beside `center` on each swept parameter: next smaller and next larger number, or each other name."""
    swept = swept_parameters(rows)
    found: list[Neighbour] = []
    for parameter in swept:
        rest = [name for name in swept if name != parameter]
        line = [
            row
            for row in rows
            if row.get(parameter) is not None
            and row is not center
            and all(row.get(name) == center.get(name) for name in rest)
        ]
        here = center.get(parameter)
        if isinstance(here, int | float):
            below = [row for row in line if row[parameter] < here]
            above = [row for row in line if row[parameter] > here]
            line = [
                *([max(below, key=lambda row: row[parameter])] if below else []),
                *([min(above, key=lambda row: row[parameter])] if above else []),
            ]
        found.extend(Neighbour(parameter, row) for row in line)
    return found
