"""One timed figure and its JSON line; calibration writes them as it goes, profiles are fitted to them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traces.errors import InputError

KV_HEADS, HEAD_DIM = 8, 128
"""Of measurements that do not say, and of the geometry that fits hold for (Qwen3-8B)."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Median and interquartile range over `repetitions`, in seconds unless `unit` says otherwise."""

    kind: str
    median: float
    spread: float
    repetitions: int
    num_bytes: int = 0
    """Bytes that the operation must move."""
    unit: str = "s"
    params: Mapping[str, Any] = field(default_factory=dict)


class Recorder:
    """Appends measurements to a JSONL file, flushing each; the first line describes the device.

    A file of the same device is continued after its last finished part; one of another device is replaced.
    """

    def __init__(self, path: Path, device: Mapping[str, Any]) -> None:
        self.path = path
        self.rows: list[Measurement] = []
        self.finished: set[str] = set()
        self._start = time.perf_counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        if not self._resume(dict(device)):
            self._write("w", {"device": dict(device), "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})

    def _resume(self, device: dict[str, Any]) -> bool:
        """Keep what earlier runs finished; rows of a part that was cut off go, since it runs again."""
        if not self.path.exists():
            return False
        lines = list(_json_lines(self.path))
        if not lines or not isinstance(lines[0], dict) or lines[0].get("device") != device:
            return False
        ends = [i for i, line in enumerate(lines) if "finished" in line]
        self.finished = {lines[i]["finished"] for i in ends}
        kept = lines[: ends[-1] + 1] if ends else lines[:1]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self.rows = [_measurement(line) for line in kept[1:] if "kind" in line]
        return True

    def finish(self, part: str) -> None:
        """Mark a part as measured: a later run on the same file leaves it out."""
        self.finished.add(part)
        self._write("a", {"finished": part})

    def _write(self, mode: str, row: Mapping[str, Any]) -> None:
        with self.path.open(mode, encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")

    def add(
        self, kind: str, median: float, spread: float, repetitions: int, num_bytes: int = 0, unit: str = "s",
        **params: Any,
    ) -> Measurement:  # fmt: skip
        """Record one figure."""
        row = Measurement(kind, median, spread, repetitions, num_bytes, unit, params)
        self.rows.append(row)
        at_s = round(time.perf_counter() - self._start, 2)
        self._write(
            "a",
            {
                "kind": kind, "median": median, "spread": spread, "repetitions": repetitions, "bytes": num_bytes,
                "unit": unit, "params": params, "at_s": at_s,
            },
        )  # fmt: skip
        return row


@dataclass(frozen=True, slots=True)
class RawCalibration:
    """A measurement file: the device, when, and every figure."""

    device: dict[str, Any]
    started: str
    rows: tuple[Measurement, ...]

    def select(self, kind: str, **params: Any) -> list[Measurement]:
        """Rows of a kind whose params have these values."""
        return [r for r in self.rows if r.kind == kind and all(r.params.get(k) == v for k, v in params.items())]

    def one(self, kind: str, **params: Any) -> Measurement:
        """The only such row; `InputError` when there is none."""
        found = self.select(kind, **params)
        if len(found) != 1:
            raise InputError(f"measurements: {len(found)} rows of {kind} {params}, need 1")
        return found[0]


def read_measurements(path: Path) -> RawCalibration:
    """Parse a measurement file; a torn last line (a killed run) is dropped. Raises `InputError`."""
    lines = _json_lines(path)
    head = next(lines, None)
    if not isinstance(head, dict) or "device" not in head:
        raise InputError(f"{path}: first line does not describe a device")
    rows = tuple(_measurement(row) for row in lines if "kind" in row)
    return RawCalibration(head["device"], head.get("started", ""), rows)


def _measurement(row: Mapping[str, Any]) -> Measurement:
    return Measurement(
        row["kind"], row["median"], row["spread"], row["repetitions"], row.get("bytes", 0), row.get("unit", "s"),
        row["params"],
    )  # fmt: skip


def _json_lines(path: Path) -> Iterator[Any]:
    text = path.read_text(encoding="utf-8").splitlines()

    def parse() -> Iterator[Any]:
        for number, line in enumerate(text, 1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                if number != len(text):
                    raise InputError(f"{path}, line {number}: not JSON") from None

    return iter(list(parse()))
