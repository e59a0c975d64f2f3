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

BETTER_LARGE = (
    "throughput_tokens_per_s",
    "hidden_fraction",
    "hit_rate",
    "overlap",
    "recall",
    "recall_upper",
    "max_batch_size",
)
"""Columns that `objective.maximize` may name."""


def require_objective(maximize: str) -> None:
    """Raise InputError, with the nearest names, unless `maximize` is a result column that is better when large."""
    if maximize in BETTER_LARGE:
        return
    if maximize in METRICS or maximize in BREAKDOWN:
        raise InputError(f"objective.maximize: {maximize} is not better when large; use {', '.join(BETTER_LARGE)}")
    near = difflib.get_close_matches(maximize, BETTER_LARGE, 3) or BETTER_LARGE
    raise InputError(f"objective.maximize: {maximize!r} is not a result column; nearest: {', '.join(near)}")


def score(row: Row, maximize: str) -> float | None:
    """Value to maximise; null when the row has none."""
    value = row.get(maximize)
    return None if row["status"] != "ok" or value is None else float(value)


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


def grid_edges(rows: Sequence[Row], center: Row) -> dict[str, str]:
    """Swept numbers of `center` that are the smallest or largest of the grid: a wider sweep may find a better one."""
    edges: dict[str, str] = {}
    for parameter in swept_parameters(rows):
        values = {row[parameter] for row in rows if isinstance(row.get(parameter), int | float)}
        here = center.get(parameter)
        if len(values) > 1 and here in (min(values), max(values)):
            edges[parameter] = "smallest" if here == min(values) else "largest"
    return edges
