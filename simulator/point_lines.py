"""`points.jsonl`: one finished point a line, sealed, so that a line is read back as it was written or refused."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.metrics import BREAKDOWN, COLUMNS, EXTRA, METRICS, SERVING, STATUSES
from traces.errors import InputError

Row = dict[str, Any]

SEAL = "crc32"
"""Last key of a line: CRC-32 of the line's JSON without it. It finds slips of an editor, not forgers."""
_UNITS = METRICS | dict.fromkeys(BREAKDOWN, "s") | EXTRA | SERVING


def json_line(row: Mapping[str, Any]) -> bytes:
    """One row as one line of strict JSON. Raises ValueError on NaN or infinity: undefined is null."""
    return (json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n").encode()


def point_line(row: Row) -> bytes:
    """A finished point as `read_points` takes it back."""
    return json_line({**row, SEAL: zlib.crc32(json_line(row))})


def read_points(path: Path) -> tuple[dict[str, Row], int]:
    """Rows of a `points.jsonl` by `point_key`, and the length in bytes of its whole lines.

    A last line without its newline was torn by a kill and is not counted. Raises `InputError` with file and line
    number for any other line that is not a point as it was written.
    """
    if not path.exists():
        return {}, 0
    rows: dict[str, Row] = {}
    whole_bytes = 0
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = _row(line)
        except ValueError as error:
            raise InputError(
                f"{path}:{number}: not a finished point: {error}; remove the line to have its point simulated again"
            ) from None
        rows[row["point_key"]] = row
        whole_bytes += len(line) + 1
    return rows, whole_bytes


def _row(line: bytes) -> Row:
    """Raises ValueError with the fault."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("no JSON") from None
    if not isinstance(row, dict):
        raise ValueError("no JSON object")
    lacking = [name for name in (*COLUMNS, SEAL) if name not in row]
    if lacking:
        raise ValueError(f"it lacks {lacking[0]}")
    for name, value in row.items():
        _require_type(name, value)
    seal = row.pop(SEAL)
    if seal != zlib.crc32(json_line(row)):
        raise ValueError("changed since it was written")
    return row


def _require_type(name: str, value: Any) -> None:
    """Raises ValueError for a value that its column cannot hold."""
    if name == "status":
        if value not in STATUSES:
            raise ValueError(f"status is {_short(value)}, not one of {', '.join(STATUSES)}")
    elif name == "point_key":
        if not isinstance(value, str) or not value:
            raise ValueError(f"point_key is {_short(value)}, not text")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}, not finite")
    elif _UNITS.get(name) == "bool":
        if not isinstance(value, bool | None):
            raise ValueError(f"{name} is {_short(value)}, not true or false")
    elif value is not None and name in _UNITS:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if _UNITS[name] and not is_number:
            raise ValueError(f"{name} is {_short(value)}, not a number")
        if not _UNITS[name] and not isinstance(value, str):
            raise ValueError(f"{name} is {_short(value)}, not text")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
