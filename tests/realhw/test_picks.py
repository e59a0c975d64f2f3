"""Which points of a sweep run on a GPU, and that they are the simulator's own policies."""

from __future__ import annotations

from typing import Any

import pytest

from realhw.decode_point import SYSTEMS, Point
from realhw.picks import pick, point_of, runnable
from realhw.point_policy import policy_of
from simulator.policy_composition import resolve_policy
from traces.errors import InputError


def row(**changes: Any) -> dict[str, Any]:
    return {
        "system": "oasiskv", "status": "ok", "model": "Qwen3-8B", "trace": "t", "trace_group": "g",
        "workload.batch_size": 8, "workload.context_tokens": 4096, "policy.kv_budget_tokens": 512,
        "policy.block_size_tokens": 16, "policy.fetch_cap": 0.1, "policy.lookahead_k": 1.0,
        "placement.host_numa": "local", "placement.num_gpus": 1, "placement.tensor_parallel": 1,
        "placement.kv_tier": "host", "mapping": "depth-cyclic", "tpot_mean_s": 0.01, "exposed_transfer_s": 0.0,
        "throughput_tokens_per_s": 800.0, **changes,
    }  # fmt: skip


def test_a_row_becomes_the_decode_run_of_its_policy():
    point = point_of(row(**{"policy.lookahead_k": 2.0, "policy.fetch_cap": float("nan")}))
    assert (point.num_kept, point.lookahead_k, point.trace_group) == (32, 2, "g")
    assert point.fetch_cap == 0.05, "an open key takes the default of the system"
    assert policy_of(point).slack_blocks == point.flow().slack_blocks


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_flow_has_the_slots_of_the_system_s_policy(system):
    point = Point(system, 4, 4096, 32, fetch_cap=0.1, lookahead_k=2 if system == "oasiskv" else 1)
    policy, flow = policy_of(point), point.flow()
    assert policy == resolve_policy(
        system, {"kv_budget_tokens": 512, "fetch_cap": 0.1, "lookahead_k": point.lookahead_k, "gather_ctas": 4}, 4096
    )
    assert policy.offloads == flow.moves
    if flow.moves:
        assert policy.kv_budget_tokens == flow.num_kept * 16
        assert (policy.slack_blocks or 0) == flow.slack_blocks


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"system": "h2o"}, "system h2o"),
        ({"model": "DeepSeek-V3"}, "model DeepSeek-V3"),
        ({"placement.host_numa": "far"}, "placement.host_numa far"),
        ({"engine.software_overhead_s": 0.001}, "engine.software_overhead_s 0.001"),
        ({"policy.transport": "ce-per-block"}, "policy.transport ce-per-block"),
        ({"policy.miss_rule": "stall"}, "policy.miss_rule stall"),
        ({"policy.slack_blocks": 9}, "policy.slack_blocks 9"),
        ({"policy.lookahead_k": 4.0}, "20 query rows per KV head"),
        ({"serving.num_requests": 2}, "serving runs"),
    ],
)
def test_what_the_harness_does_not_have_is_named(changes, reason):
    with pytest.raises(InputError, match=reason):
        point_of(row(**changes))


@pytest.fixture
def found(monkeypatch):
    monkeypatch.setattr(Point, "step_trace", lambda self, folder=None: None)
    rows = [
        row(**{"workload.batch_size": 1 + i, "system": "dense" if i < 3 else "oasiskv"}, tpot_mean_s=0.01 * (i + 1),
            throughput_tokens_per_s=100.0 * (i != 5), exposed_transfer_s=0.01 * (i == 4))
        for i in range(12)
    ]  # fmt: skip
    rows += [row(status="does_not_fit"), row(system="h2o"), row(system="h2o")]
    kept, left_out = runnable(rows)
    assert left_out == {"does not fit": 1, "system h2o": 2}
    return kept


def test_extremes_and_each_system_s_best_come_first_then_a_seeded_draw(found):
    picks = pick(found, 8, "throughput_tokens_per_s", seed=3)
    assert [(p.point.batch_size, p.reason) for p in picks[:4]] == [
        (1, "best throughput_tokens_per_s"), (12, "most TPOT"), (5, "most exposed transfer"), (4, "best of oasiskv"),
    ]  # fmt: skip
    assert [p.reason for p in picks[4:]] == ["random, seed 3"] * 4
    assert picks == pick(found, 8, "throughput_tokens_per_s", seed=3)
    assert picks != pick(found, 8, "throughput_tokens_per_s", seed=4)
    assert len(pick(found, 99, "throughput_tokens_per_s", seed=3)) == len(found)
