"""Timeline records as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

Source of the format: "Trace Event Format" (Chromium project), complete events `X`, times in microseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from traces.errors import InputError, writing

OVERLAP_TOLERANCE_S = 1e-12
ENGINE_ORDER = ("compute", "side stream", "H2D", "D2H", "gather", "NIC")
"""Tracks of a GPU from top to bottom; others follow by name."""


@dataclass(frozen=True, slots=True)
class Span:
    """One interval on a track: `process` groups tracks (a GPU), times in seconds since the run's start."""

    process: str
    track: str
    label: str
    start_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict)


class TimelineRecord(Protocol):
    """What the simulator records of one operation on one engine; a negative layer belongs to the whole step."""

    @property
    def gpu(self) -> int: ...
    @property
    def engine(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def layer(self) -> int: ...
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...


def spans_from_records(records: Iterable[TimelineRecord]) -> list[Span]:
    """One span per record: the GPU is the process, the engine the track, step and layer the arguments."""
    spans = []
    for r in records:
        args = {"step": r.step} | ({"layer": r.layer} if r.layer >= 0 else {})
        spans.append(Span(f"GPU {r.gpu}", r.engine, r.kind, r.start_s, r.end_s, args))
    return spans


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """Trace-event JSON as a dict. Intervals that overlap on one track are shown on numbered lanes of it.

    Raises `InputError` for a span that is not finite or ends before it starts.
    """
    ordered = sorted(spans, key=lambda s: (s.process, _track_rank(s.track), s.start_s, s.end_s))
    events: list[dict[str, Any]] = []
    process_ids: dict[str, int] = {}
    lane_ids: dict[tuple[str, str, int], int] = {}
    lane_ends: dict[tuple[str, str], list[float]] = {}
    for span in ordered:
        if not (math.isfinite(span.start_s) and math.isfinite(span.end_s) and span.end_s >= span.start_s):
            raise InputError(f"timeline span {span.label!r} on {span.track}: from {span.start_s} s to {span.end_s} s")
        if span.process not in process_ids:
            process_ids[span.process] = len(process_ids) + 1
            events.append(_name("process_name", process_ids[span.process], 0, span.process))
        ends = lane_ends.setdefault((span.process, span.track), [])
        lane = next((i for i, end in enumerate(ends) if end <= span.start_s + OVERLAP_TOLERANCE_S), len(ends))
        ends[lane : lane + 1] = [span.end_s]
        key = (span.process, span.track, lane)
        if key not in lane_ids:
            lane_ids[key] = len(lane_ids) + 1
            name = span.track if lane == 0 else f"{span.track} ({lane + 1})"
            events.append(_name("thread_name", process_ids[span.process], lane_ids[key], name))
        events.append(
            {
                "ph": "X",
                "name": span.label,
                "cat": span.track,
                "pid": process_ids[span.process],
                "tid": lane_ids[key],
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": dict(span.args),
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(path: Path, spans: Iterable[Span]) -> None:
    """Write `chrome_trace` as JSON, whole or not at all. Raises `InputError` where the path cannot be written."""
    text = json.dumps(chrome_trace(spans), allow_nan=False)
    partial = path.with_name(path.name + ".partial")
    with writing(path):
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def _track_rank(track: str) -> tuple[int, str]:
    return (ENGINE_ORDER.index(track) if track in ENGINE_ORDER else len(ENGINE_ORDER), track)


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
