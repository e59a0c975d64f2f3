from __future__ import annotations

import itertools
import json
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.timeline_export import Span, chrome_trace, spans_from_records, write_chrome_trace
from traces.errors import InputError


class Record(NamedTuple):
    gpu: int
    engine: str
    kind: str
    step: int
    layer: int
    start_s: float
    end_s: float


RECORDS = [
    Record(0, "compute", "attention", 3, 0, 0.0, 40.2e-6),
    Record(0, "compute", "ffn", 3, 0, 40.2e-6, 139.7e-6),
    Record(0, "H2D", "fetch", 3, 0, 10e-6, 60e-6),
    Record(0, "compute", "lm_head", 3, -1, 139.7e-6, 423.7e-6),
    Record(1, "compute", "attention", 3, 0, 0.0, 40.2e-6),
]


def test_written_json_loads_and_durations_agree(tmp_path):
    path = tmp_path / "timeline.json"
    write_chrome_trace(path, spans_from_records(RECORDS))
    loaded = json.loads(path.read_text())
    slices = [e for e in loaded["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == len(RECORDS)
    assert sum(e["dur"] for e in slices) == pytest.approx(sum(end - start for *_, start, end in RECORDS) * 1e6)
    lm_head = next(e for e in slices if e["name"] == "lm_head")
    assert lm_head["ts"] == pytest.approx(139.7)
    assert lm_head["dur"] == pytest.approx(284.0)
    assert lm_head["args"] == {"step": 3}
    assert next(e for e in slices if e["name"] == "fetch")["args"] == {"step": 3, "layer": 0}
    assert [p.name for p in tmp_path.iterdir()] == ["timeline.json"]


def test_gpus_are_processes_and_engines_are_named_threads():
    events = chrome_trace(spans_from_records(RECORDS))["traceEvents"]
    names = {(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert names == {
        ("process_name", "GPU 0"),
        ("process_name", "GPU 1"),
        ("thread_name", "compute"),
        ("thread_name", "H2D"),
    }
    assert len({e["tid"] for e in events if e["ph"] == "X"}) == 3


@given(st.lists(st.tuples(st.floats(0, 1e-2), st.floats(0, 1e-3)), max_size=30))
def test_no_two_slices_overlap_on_a_thread_and_no_time_is_lost(intervals):
    spans = [Span("GPU 0", "H2D", "fetch", start, start + length) for start, length in intervals]
    slices = [e for e in chrome_trace(spans)["traceEvents"] if e["ph"] == "X"]
    assert sorted((e["ts"], e["dur"]) for e in slices) == sorted(
        (s.start_s * 1e6, (s.end_s - s.start_s) * 1e6) for s in spans
    )
    for _, group in itertools.groupby(sorted(slices, key=lambda e: (e["tid"], e["ts"])), key=lambda e: e["tid"]):
        for earlier, later in itertools.pairwise(group):
            assert earlier["ts"] + earlier["dur"] <= later["ts"] + 1e-5


@pytest.mark.parametrize(("start", "end"), [(2.0, 1.0), (0.0, float("nan")), (float("-inf"), 0.0)])
def test_impossible_spans_are_refused(start, end):
    with pytest.raises(InputError, match="timeline span 'x' on C"):
        chrome_trace([Span("GPU 0", "C", "x", start, end)])


def test_an_unwritable_path_is_one_clear_line(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        write_chrome_trace(tmp_path / "missing" / "t.json", [])


def test_tracks_are_in_the_order_of_the_pipeline():
    events = chrome_trace(spans_from_records(reversed(RECORDS)))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"][:2] == ["compute", "H2D"]
