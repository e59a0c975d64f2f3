"""Which points are compared, which are admissible, and which is best: the rules every plot shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from simulator.metrics import PARAMETERS

CASE_COLUMNS = ("model", "hardware", "trace", "trace_group", "workload.context_tokens")
"""Points are compared only within one value of each: another model or context is another question."""
CONTEXT_COLUMNS = ("trace_group", "workload.context_tokens")
DESCRIPTIVE = ("mapping",)
"""Parameters that follow from others and are never an axis."""


class NotDrawn(Exception):
    """A plot that these results cannot fill; the message is the reason that the report lists."""


@dataclass(frozen=True)
class Case:
    """Rows that may be compared with each other, in grid order, and the column that the best one maximises."""

    rows: pd.DataFrame
    objective: str = "throughput_tokens_per_s"

    @property
    def ok(self) -> pd.DataFrame:
        """Points that ran and have a value of the objective."""
        return self.rows[(self.rows["status"] == "ok") & self.rows[self.objective].notna()]

    @property
    def systems(self) -> list[str]:
        return list(dict.fromkeys(self.rows["system"].astype(str)))

    @property
    def subtitle(self) -> str:
        """Model, GPU, trace and context, each with its only value or how many there are."""
        first = self.rows.iloc[0]
        parts = []
        for column, text in (
            ("model", "{}"),
            ("hardware", "on {}"),
            ("workload.context_tokens", "{} tokens of context"),
        ):
            values = self.rows[column].dropna().unique()
            if len(values) == 1:
                parts.append(text.format(f"{int(values[0]):,}" if "tokens" in text else first[column]))
            elif len(values) > 1:
                parts.append(
                    text.format(f"{int(min(values)):,} to {int(max(values)):,}" if "tokens" in text else "several")
                )
        traces = self.rows["trace"].dropna().unique()
        if len(traces) == 1:
            parts.append(f"trace {traces[0]}")
        return " · ".join(parts).replace(" · on ", " on ")


def split_cases(rows: pd.DataFrame, objective: str, columns: Sequence[str] = CASE_COLUMNS) -> list[Case]:
    """One case per combination of `columns`, in order of first appearance."""
    groups = rows.groupby(list(columns), dropna=False, sort=False)
    return [Case(group, objective) for _, group in groups]


def is_bound_only(system: str) -> bool:
    """True for systems that know the future: they bound what prediction can gain and cannot be built."""
    return "oracle" in system.split("-")


def is_admissible(rows: pd.DataFrame) -> pd.Series[bool]:
    """Whether each point ran and keeps the recall its run asked for; an unknown recall is not admissible."""
    return (rows["status"] == "ok") & (rows["recall"] >= rows["min_recall"].fillna(0.0))


def best_point(rows: pd.DataFrame, objective: str) -> pd.Series[Any] | None:
    """The admissible row with the largest objective, of equals the one with more recall, then the first; or None."""
    return _first_by(rows[is_admissible(rows)], [objective, "recall"])


def nearest_point(rows: pd.DataFrame, objective: str) -> pd.Series[Any] | None:
    """The row that misses its recall by least, of equals the one with the larger objective; None if none ran.

    Where no recall is known it is the row with the largest objective.
    """
    ran = rows[(rows["status"] == "ok") & rows[objective].notna()]
    if ran["recall"].isna().all():
        return _first_by(ran, [objective])
    return _first_by(ran.assign(margin=ran["recall"] - ran["min_recall"].fillna(0.0)), ["margin", objective])


def _first_by(rows: pd.DataFrame, columns: list[str]) -> pd.Series[Any] | None:
    valued = rows.dropna(subset=columns).sort_values(columns, ascending=False, kind="stable")
    return None if valued.empty else valued.iloc[0][[c for c in rows.columns if c != "margin"]]


def best_buildable(case: Case) -> pd.Series[Any] | None:
    """The best admissible point of systems that can be built; of all where only bounds were run."""
    buildable = case.ok[~case.ok["system"].map(is_bound_only).astype(bool)]
    found = best_point(buildable, case.objective) if len(buildable) else None
    return found if found is not None else best_point(case.ok, case.objective)


def best_by_system(case: Case) -> pd.DataFrame:
    """Each system's best admissible point, else its nearest (column `admissible` tells), best first.

    Systems without a point that ran are left out.
    """
    chosen = []
    for _, rows in case.ok.groupby("system", sort=False):
        point = best_point(rows, case.objective)
        admissible = point is not None
        if point is None:
            point = nearest_point(rows, case.objective)
        if point is not None:
            chosen.append({**point.to_dict(), "admissible": admissible, "row": point.name})
    if not chosen:
        raise NotDrawn("no point ran with a value of " + case.objective)
    return pd.DataFrame(chosen).sort_values(case.objective, ascending=False, kind="stable").reset_index(drop=True)


def left_out(case: Case) -> list[str]:
    """Systems of the case without a point that ran, each with what happened to it."""
    ran = set(case.ok["system"].astype(str))
    notes = []
    for system in case.systems:
        if system not in ran:
            statuses = set(case.rows.loc[case.rows["system"] == system, "status"])
            notes.append(f"{system} ({'does not fit' if statuses == {'does_not_fit'} else 'did not run'})")
    return notes


def swept_parameters(rows: pd.DataFrame) -> list[str]:
    """Parameter columns with two or more values, in the schema's order, then the further keys of the run."""
    named = [c for c in PARAMETERS if c in rows and c not in DESCRIPTIVE]
    further = [c for c in rows.columns if "." in c and c not in PARAMETERS]
    return [c for c in (*named, *further) if _comparable(rows[c]).nunique() > 1]


def matching(rows: pd.DataFrame, point: pd.Series[Any], free: Iterable[str]) -> pd.DataFrame:
    """Rows of the point's system that equal it in every swept parameter outside `free` (null equals null)."""
    released = set(free)
    own: pd.DataFrame = rows[rows["system"] == point["system"]]
    kept = np.ones(len(own), dtype=bool)
    for column in swept_parameters(own):
        if column not in released:
            value = point[column]
            same = own[column].isna() if _is_null(value) else _comparable(own[column]) == _hashable(value)
            kept &= same.to_numpy(dtype=bool)
    matched: pd.DataFrame = own[kept]
    return matched


def sorted_values(values: pd.Series[Any]) -> list[Any]:
    """Distinct non-null values: numbers ascending, names in order of appearance."""
    distinct = list(dict.fromkeys(values.dropna().map(_hashable)))
    return sorted(distinct) if all(isinstance(v, int | float) for v in distinct) else distinct


def _comparable(values: pd.Series[Any]) -> pd.Series[Any]:
    """The values as numbers or text: cells that hold lists or mappings by their text."""
    return values.map(_hashable, na_action="ignore") if values.dtype == object else values


def _hashable(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    return value if isinstance(value, int | float | str | bool) else str(value)


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)
