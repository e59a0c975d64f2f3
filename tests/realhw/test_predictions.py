"""Predictions of points that ran on real H200s, with the profile calibrated on one of them."""

import json
from pathlib import Path

import pytest

from realhw.decode_point import Point
from realhw.expected_moves import expected_moves, mismatches
from realhw.point_policy import policy_of
from realhw.predictions import predict, steady_steps
from simulator.catalog import load_hardware
from simulator.specs.base import Figure

H200 = Path(__file__).resolve().parents[2] / "docs" / "validation" / "h200"
RECORDED, SAME_MACHINE = H200 / "campaign.jsonl", H200 / "campaign-same-machine.jsonl"


def row_of(system, batch, context, campaign=RECORDED):
    rows = [json.loads(line) for line in campaign.read_text().splitlines()[1:]]
    wanted = {"system": system, "batch_size": batch, "context_tokens": context, "model": "Qwen3-8B"}
    return next(r for r in rows if r["status"] == "ok" and wanted.items() <= r["point"].items())


@pytest.fixture(scope="module")
def hardware():
    return load_hardware("h200-sxm-calibrated")


@pytest.mark.parametrize(("system", "batch"), [("dense", 16), ("dense", 64), ("quest", 16), ("quest", 32)])
def test_flows_without_transfers_are_predicted_within_five_percent(system, batch, hardware):
    found = predict(row_of(system, batch, 4096, SAME_MACHINE), hardware)
    assert abs(found["error"]) < 0.05
    assert found["byte_mismatches"] == found["fetched_blocks"] == 0
    assert found["transfer_over_compute"] == 0
    assert sum(found["predicted_parts_s"].values()) == pytest.approx(found["predicted_tpot_s"])
    assert found["repeat_spread"] < 0.02


def test_a_small_run_with_transfers_moves_what_the_rules_say_and_takes_about_as_long(hardware):
    found = predict(row_of("prefetch-previous", 1, 4096), hardware)
    assert found["byte_mismatches"] == 0
    assert found["fetched_blocks"] > 1000
    assert abs(found["error"]) < 0.1
    assert 0 < found["transfer_over_compute"] < 0.5


@pytest.mark.parametrize(("system", "layers"), [("quest", 0), ("retrieval", 0), ("prefetch-previous", 36)])
def test_side_streams_cost_each_layer_of_flows_that_plan_beside_compute_and_no_other(system, layers, hardware):
    row = row_of(system, 1, 4096)

    def tpot_s(side_streams_s, pairs):
        figure = Figure(value=side_streams_s, source="a test")
        kernels = hardware.kernels.model_copy(update={"side_streams_s": figure})
        return predict(row, hardware.model_copy(update={"kernels": kernels, "pairs": pairs}))["predicted_tpot_s"]

    # A compute-bound step shows all of it, less what scoring no longer takes from attention meanwhile.
    assert tpot_s(4e-6, ()) - tpot_s(0.0, ()) == pytest.approx(layers * 4e-6, rel=1e-6, abs=1e-12)
    more_s = tpot_s(4e-6, hardware.pairs) - tpot_s(0.0, hardware.pairs)
    assert (more_s > 0) == (layers > 0)
    assert more_s <= layers * 4e-6 + 1e-12


def test_a_moved_block_that_differs_is_counted():
    row = row_of("prefetch-previous", 1, 4096)
    point = Point(**row["point"])
    expected = expected_moves(point.flow(), point.step_trace(), point.num_steps)
    assert mismatches(row, expected) == 0
    row["fetched_hash"][3][5] = "0" * 16
    row["evicted"][7][0] += 1
    assert mismatches(row, expected) == 2


def test_points_become_the_policies_of_their_systems():
    assert policy_of(Point("dense", 1, 4096)).selector == "all"
    assert policy_of(Point("quest", 1, 4096)).residency == "everything"
    assert policy_of(Point("retrieval", 1, 4096)).predictor == "current"
    draft = policy_of(Point("oasiskv", 1, 16384, fetch_cap=0.05, lookahead_k=2))
    assert (draft.predictor, draft.residency, draft.slack_blocks, draft.lookahead_k) == ("draft", "slack", 13, 2)
    assert steady_steps(Point("oasiskv", 1, 16384, lookahead_k=2, num_steps=16)) == slice(4, 14)
    assert steady_steps(Point("dense", 1, 16384, num_steps=16)) == slice(4, 15)
