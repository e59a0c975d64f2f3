"""Recorded rankings carried without a trace reader, and what they make the harness move."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from realhw.decode_point import Point, trace_hash
from realhw.expected_moves import expected_moves
from realhw.point_list import TRACE, TRACE_CONTEXT, traced_points
from realhw.predictions import policy_of
from realhw.recorded_rankings import RecordedRankings, export_rankings, load_rankings
from simulator.catalog import load_model
from simulator.mapping import resolve_mapping
from simulator.replay import replay
from simulator.specs.experiment import MappingSpec
from traces.catalog import resolve
from traces.errors import InputError
from traces.reader import open_trace


@pytest.fixture(scope="module")
def rankings() -> RecordedRankings:
    return export_rankings(TRACE)


def test_a_file_gives_the_same_run_as_the_trace(rankings: RecordedRankings, tmp_path: Path) -> None:
    rankings.save(tmp_path / f"{TRACE}.npz")
    again = load_rankings(tmp_path / f"{TRACE}.npz")
    assert (again.name, again.content_hash, again.group) == (TRACE, rankings.content_hash, rankings.group)
    for point in traced_points()[:1]:
        assert trace_hash(point.step_trace(tmp_path)) == trace_hash(point.step_trace())


@pytest.mark.parametrize(("system", "k"), [("prefetch-previous", 1), ("oasiskv", 1), ("oasiskv", 2), ("retrieval", 1)])
def test_the_harness_moves_what_replay_moves(system: str, k: int, rankings: RecordedRankings) -> None:
    """From the trace's first row the harness and the simulator's replay fetch and evict the same counts."""
    point = Point(system, 1, TRACE_CONTEXT, 48, fetch_cap=0.1, lookahead_k=k, model="SmolLM2-135M", trace=TRACE)
    shift = k if system == "prefetch-previous" else 0
    ranking = f"draft{k}" if system == "oasiskv" else "true"
    trace = rankings.step_trace(point.model, 16, ranking, shift, np.zeros(1, dtype=np.int32), 48)
    found = expected_moves(point.flow(), trace, point.num_steps)
    group = open_trace(resolve(TRACE)).group(rankings.group)
    mapping = resolve_mapping(load_model(point.model), group, 16, MappingSpec())
    demand = replay(group, policy_of(point), mapping, 0)
    planned = slice(1, point.num_steps - point.flow().distance)
    assert found.fetched[planned].sum() > 100
    assert np.array_equal(found.fetched[planned], demand.fetched[planned])
    assert np.array_equal(found.runs[planned], demand.runs[planned])
    assert np.array_equal(found.in_slack[planned], demand.in_slack[planned])


def test_a_point_that_the_trace_does_not_serve_is_named(rankings: RecordedRankings, tmp_path: Path) -> None:
    point = Point("oasiskv", 2, TRACE_CONTEXT, 48, trace=TRACE)
    for change, message in (
        ({"context_tokens": 4096}, "starts at 6144 tokens, the point says 4096"),
        ({"block_size_tokens": 4}, "no ranking true at 4 tokens"),
        ({"lookahead_k": 7}, "no ranking draft7 at 16 tokens"),
        ({"num_kept": 300}, "ranks 128 blocks of 16 tokens, need K = 300"),
    ):
        with pytest.raises(InputError, match=message):
            replace(point, **change).step_trace()  # type: ignore[arg-type]
    offsets = np.zeros(1, dtype=np.int32)
    with pytest.raises(InputError, match="exported without model tiny"):
        rankings.step_trace("tiny", 16, "true", 0, offsets, 48)
    with pytest.raises(InputError, match=r"no.npz"):
        load_rankings(tmp_path / "no.npz")
    (tmp_path / "bad.npz").write_bytes(b"PK nothing")
    with pytest.raises(InputError, match="holds no exported rankings"):
        load_rankings(tmp_path / "bad.npz")
    with pytest.raises(InputError, match="system 'h2o': the harness runs dense"):
        replace(point, system="h2o")
