"""What each point of a serving run left besides its row: requests, and use over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from analysis import style
from analysis.load import Run, read_table
from simulator.serving.offered import RATE

Kind = Literal["requests", "usage"]


@dataclass(frozen=True)
class PointFile:
    """One point's file, with the system and what else sets it apart."""

    system: str
    setting: str
    """Empty where systems alone differ."""
    table: pd.DataFrame


def point_files(run: Run, kind: Kind, columns: Sequence[str]) -> list[PointFile]:
    """Of the points that ran, in grid order, those that have a file. Raises InputError for one that is none."""
    ok = run.results[run.results["status"] == "ok"]
    varied = [c for c in ok.columns if ("." in c or c in ("model", "hardware", "trace")) and ok[c].nunique() > 1]
    found = []
    for _, row in ok.iterrows():
        path = point_file(run, kind, row)
        if path is not None:
            given = [f"{short(c)} {style.value_text(row[c])}" for c in varied if pd.notna(row[c])]
            found.append(PointFile(str(row["system"]), ", ".join(given), read_table(path, columns, f"a {kind} file")))
    return found


def point_file(run: Run, kind: Kind, row: pd.Series[Any]) -> Path | None:
    paths = (run.folder / kind / f"{row['point_key'][:12]}.parquet", run.folder / f"{kind}.parquet")
    return next((path for path in paths if path.is_file()), None)


def some_settings(files: Sequence[PointFile], most: int) -> tuple[list[str], int]:
    """At most `most` of the settings, evenly from the first to the last, and how many are left out."""
    settings = list(dict.fromkeys(file.setting for file in files))
    if len(settings) <= most:
        return settings, 0
    chosen = sorted({round(i * (len(settings) - 1) / (most - 1)) for i in range(most)})
    return [settings[i] for i in chosen], len(settings) - len(chosen)


def short(column: str) -> str:
    return {RATE: "arrivals/s"}.get(column, column.rpartition(".")[2].replace("_", " "))
