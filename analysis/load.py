"""Reads what a finished `run` or `sweep` left in its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from simulator.metrics import BREAKDOWN, COLUMNS, EXTRA, METRICS, SERVING, STATUSES
from traces.errors import InputError

RESULTS = "results.parquet"
CONFIG = "config.yaml"
MANIFEST = "manifest.json"
PARTIAL = "points.jsonl"

TEXT_METRICS = ("bound", "bound_detail")
"""Result columns that hold words; every other metric is a number or null."""


def read_table(path: Path, columns: Sequence[str], what: str) -> pd.DataFrame:
    """A parquet file that has at least `columns`. Raises InputError, calling it `what`, where it is none."""
    try:
        frame: pd.DataFrame = pq.read_table(path).to_pandas()
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not readable as parquet: {error}") from error
    lacking = [column for column in columns if column not in frame]
    if lacking:
        raise InputError(f"{path}: not {what}, it lacks {', '.join(lacking)}")
    return frame


@dataclass(frozen=True)
class Run:
    """A results folder in memory: one row per point in grid order, the resolved config and the provenance."""

    folder: Path
    results: pd.DataFrame
    config: dict[str, Any]
    manifest: dict[str, Any]

    @property
    def objective(self) -> str:
        """The column that the best point maximises, as the run was configured."""
        return find_objective(self.config).get("maximize") or "throughput_tokens_per_s"


def load_run(folder: Path) -> Run:
    """Load a results folder. Raises `InputError` where it is missing, foreign, or not finished."""
    results = load_results(folder)
    config = _parse(folder / CONFIG, yaml.safe_load, yaml.YAMLError)
    manifest = _parse(folder / MANIFEST, json.loads, json.JSONDecodeError)
    run = Run(folder, results, config, manifest)
    if run.objective not in results or not pd.api.types.is_numeric_dtype(results[run.objective]):
        raise InputError(
            f"{folder / CONFIG}: objective.maximize is {run.objective!r}, which is no numeric result column"
        )
    return run


def load_results(folder: Path) -> pd.DataFrame:
    """Rows of `results.parquet`, metrics as float64 with NaN for null, parameters as stored.

    Raises `InputError` where the folder is missing, was not written by oasis-sim, or is not finished.
    """
    if folder.is_file():
        raise InputError(f"{folder}: is a file; pass the folder that run or sweep wrote")
    if not folder.is_dir():
        raise InputError(f"{folder}: no such results folder")
    missing = [name for name in (RESULTS, CONFIG, MANIFEST) if not (folder / name).is_file()]
    # A run writes its manifest first; a validation has points too.
    if RESULTS in missing and MANIFEST not in missing and (folder / PARTIAL).is_file():
        raise InputError(f"{folder}: not finished ({PARTIAL} without {RESULTS}); repeat the command to resume it")
    if missing:
        raise InputError(f"{folder}: not a complete results folder, it lacks {', '.join(missing)}")
    try:
        frame: pd.DataFrame = pq.read_table(folder / RESULTS).to_pandas()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{folder / RESULTS}: not readable as parquet ({_first_line(error)})") from error
    lacking = [column for column in COLUMNS if column not in frame]
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise InputError(f"{folder / RESULTS}: not a results table, it lacks {', '.join(lacking[:3])}{more}")
    if frame.empty:
        raise InputError(f"{folder / RESULTS}: holds no point")
    unknown = sorted(set(frame["status"].astype(str)) - set(STATUSES))
    if unknown:
        raise InputError(f"{folder / RESULTS}: unknown status {unknown[0]!r} (known: {', '.join(STATUSES)})")
    for column in (*METRICS, *BREAKDOWN, *EXTRA):
        if column in TEXT_METRICS:
            continue
        try:
            frame[column] = pd.to_numeric(frame[column]).astype("float64")
        except (TypeError, ValueError) as error:
            raise InputError(f"{folder / RESULTS}: column {column} is not numeric ({_first_line(error)})") from error
    if "slo_attainment" in frame:
        for column in [column for column in SERVING if column not in frame]:
            frame[column] = None if SERVING[column] in ("", "bool") else math.nan  # of an older version
    return frame.reset_index(drop=True)


def find_objective(config: dict[str, Any]) -> dict[str, Any]:
    """The objective block, at the top of the config or inside its experiment; empty where there is none."""
    inner = config.get("objective")
    if isinstance(inner, dict):
        return inner
    for value in config.values():
        if isinstance(value, dict) and isinstance(value.get("objective"), dict):
            return dict(value["objective"])
    return {}


def _parse(path: Path, parse: Any, error_type: type[Exception]) -> dict[str, Any]:
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except (error_type, UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path}: not readable ({_first_line(error)})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: must hold a mapping, holds a {type(value).__name__}")
    return value


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
