"""What each point of a serving run left besides its row: requests, and use over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from analysis import style
from analysis.kept_rates import RATE
from analysis.load import Run, read_table

Kind = Literal["requests", "usage"]
ALIKE = 0.995
"""Share of the best figure from which a point is as good: three digits do not tell them apart."""


@dataclass(frozen=True)
class PointFile:
    """One point's file, with the system and what else sets it apart."""

    system: str
    setting: str
    """Empty where systems alone differ."""
    table: pd.DataFrame
    is_best: bool = False
    """One of the points with the most requests within the SLO a second."""
    is_best_of_system: bool = False
    """The first such point among those of its system that have a file."""


def best_points(ok: pd.DataFrame) -> list[Any]:
    """Index of the points with the most requests within the SLO a second, ties included; those that are overloaded
    only where all are."""
    keeping = ok[~ok["overloaded"].eq(True)]
    goodput = (ok if keeping.empty else keeping)["goodput_requests_per_s"]
    return list(goodput.index[goodput >= ALIKE * goodput.max()])


def point_files(run: Run, kind: Kind, columns: Sequence[str]) -> list[PointFile]:
    """Of the points that ran, in grid order, those that have a file. Raises InputError for one that is none."""
    ok = run.results[run.results["status"] == "ok"]
    varied = [c for c in ok.columns if ("." in c or c in ("model", "hardware", "trace")) and ok[c].nunique() > 1]
    found = []
    paths = {index: path for index, row in ok.iterrows() if (path := point_file(run, kind, row)) is not None}
    with_file = ok[ok.index.isin(list(paths))]
    best = set(best_points(ok))
    best_of_system = {best_points(rows)[0] for _, rows in with_file.groupby("system")}
    for index, row in with_file.iterrows():
        given = [f"{short(c)} {style.value_text(row[c])}" for c in varied if pd.notna(row[c])]
        table = read_table(paths[index], columns, f"a {kind} file")
        setting = ", ".join(given)
        found.append(PointFile(str(row["system"]), setting, table, index in best, index in best_of_system))
    return found


def point_file(run: Run, kind: Kind, row: pd.Series[Any]) -> Path | None:
    paths = (run.folder / kind / f"{row['point_key'][:12]}.parquet", run.folder / f"{kind}.parquet")
    return next((path for path in paths if path.is_file()), None)


def some_settings(files: Sequence[PointFile], most: int) -> tuple[list[str], list[str]]:
    """At most `most` of the settings, that of the best point first, then evenly from the first to the last; and those
    that are left out."""
    settings = list(dict.fromkeys(file.setting for file in files))
    best = next((file.setting for file in files if file.is_best), settings[0])
    others = [setting for setting in settings if setting != best]
    room = most - 1
    if len(others) > room:
        others = [others[i] for i in sorted({round(i * (len(others) - 1) / max(1, room - 1)) for i in range(room)})]
    chosen = [best, *others]
    return chosen, [setting for setting in settings if setting not in chosen]


def not_drawn(settings: Sequence[str]) -> list[str]:
    """The note that names settings which are left out."""
    return [f"Not drawn: {'; '.join(settings)}."] if settings else []


def short(column: str) -> str:
    return {RATE: "arrivals/s"}.get(column, column.rpartition(".")[2].replace("_", " "))
