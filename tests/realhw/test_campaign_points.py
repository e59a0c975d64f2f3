"""The campaign's points, and a point that ran on a real H200 against the simulator's rules."""

import json
from pathlib import Path

import numpy as np
import pytest

from realhw.campaign import part_seconds
from realhw.decode_point import Point, trace_hash
from realhw.expected_moves import expected_moves
from realhw.flows import footprint
from realhw.geometry import geometry
from realhw.point_list import CELLS, default_points, smoke_points
from realhw.step_trace import StepTrace, synthetic_step_trace
from traces.errors import InputError

RECORDED = Path(__file__).resolve().parents[2] / "docs" / "validation" / "h200" / "campaign.jsonl"


def recorded_rows():
    return [json.loads(line) for line in RECORDED.read_text().splitlines()[1:]]


def test_recorded_moves_of_the_gpu_equal_the_simulator_s_rules():
    """Ids, slots and victims by hash, and counts, of a run on an H200."""
    row = next(r for r in recorded_rows() if r["point"]["batch_size"] == 1 and r["point"]["context_tokens"] == 4096
               and "fetched" in r)  # fmt: skip
    point = Point(**row["point"])
    trace = point.step_trace()
    assert trace_hash(trace) == row["trace"]
    expected = expected_moves(point.flow(), trace, point.num_steps)
    assert expected.fetched.tolist() == row["fetched"]
    assert expected.evicted.tolist() == row["evicted"]
    assert expected.fetched_hash == row["fetched_hash"]
    assert expected.evicted_hash == row["evicted_hash"]
    assert expected.fetched.sum() > 1000


def test_recorded_points_are_enough_and_finite():
    rows = recorded_rows()
    ok = [r for r in rows if r["status"] == "ok"]
    assert len(ok) >= 40
    assert all(r["finite"] for r in ok)
    for r in rows:
        if r["status"] == "does_not_fit":
            assert r["need_bytes"] > r["have_bytes"]


def test_default_points_are_distinct_and_mostly_fit_an_h200():
    points = default_points()
    assert len({p.key() for p in points}) == len(points)
    hbm_bytes = 150_109_880_320
    fit = [
        p for p in points
        if footprint(geometry(p.model), p.flow(), p.batch_size, p.context_tokens, p.num_steps).hbm_bytes < hbm_bytes
    ]  # fmt: skip
    assert 40 <= len(fit) < len(points)
    assert all(len([p for p in points if (p.batch_size, p.context_tokens) == cell]) >= 6 for cell in CELLS)
    for name in ("transport", "model", "trace", "block_size_tokens", "lookahead_k", "aliased", "repeat"):
        assert len({getattr(p, name) for p in points}) >= 2, name
    assert {p.transport for p in smoke_points()} == {"gather", "ce-batched", "ce-contiguous"}


def test_parts_end_at_their_marks():
    marks = [
        ("step", 0.0),
        ("qkv", 1.0),
        ("ffn", 3.0),
        ("qkv", 4.0),
        ("ffn", 7.0),
        ("step", 7.5),
        ("qkv", 8.0),
        ("step", 9.0),
    ]
    assert part_seconds(marks) == [{"qkv": 2.0, "ffn": 5.0}, {"qkv": 0.5}]


def test_synthetic_ids_are_distinct_selectable_and_churn_as_asked():
    trace = synthetic_step_trace(20, 2, 2, 16, 640, 16, np.array([0]), churn=0.5, miss=0.2, seed=1)
    again = synthetic_step_trace(20, 2, 2, 16, 640, 16, np.array([0]), churn=0.5, miss=0.2, seed=1)
    assert np.array_equal(trace.true, again.true)
    assert trace.true.min() >= 0
    assert trace.true.max() < 39
    assert all(len(set(row)) == 16 for row in trace.true.reshape(-1, 16).tolist())
    calm = synthetic_step_trace(20, 2, 2, 16, 640, 16, np.array([0]), churn=0.05, miss=0.2, seed=1)

    def churn(ids):
        return np.mean([len(np.setdiff1d(b, a)) for a, b in zip(ids[:-1, 0, 0], ids[1:, 0, 0], strict=True)])

    assert churn(trace.true) > 2 * churn(calm.true) > 0


def test_traces_that_cannot_serve_are_named():
    with pytest.raises(InputError, match="39 selectable blocks at step 0, need at least 64"):
        synthetic_step_trace(4, 1, 1, 64, 640, 16, np.array([0]))
    ids = np.zeros((3, 1, 1, 1), dtype=np.int32)
    with pytest.raises(InputError, match="must grow by one"):
        StepTrace(ids, ids, 0, np.array([5, 7, 8], dtype=np.int32), np.array([0], dtype=np.int32))
