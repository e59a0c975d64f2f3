"""From names to a point: groups and contexts, what a trace or host cannot serve, grids without duplicates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simulator import experiment as experiment_module
from simulator.experiment import expand, experiment_keys, resolve
from simulator.specs.experiment import ExperimentSpec
from traces.errors import InputError
from traces.memory import MemoryGroup, memory_group, memory_trace
from traces.schema import ModelGeometry

CONTEXT_TOKENS, NUM_STEPS, NUM_LAYERS, NUM_HEADS = 256, 12, 3, 2
MODEL = ModelGeometry(
    name="tiny", num_layers=NUM_LAYERS, num_query_heads=NUM_HEADS, num_kv_heads=NUM_HEADS, head_dim=64
)


def request(name: str, context_tokens: int) -> MemoryGroup:
    kv_len = context_tokens + np.arange(NUM_STEPS)
    rng = np.random.default_rng(0)
    rankings = {}
    for size in (8, 16):
        width = min(20, context_tokens // size - 1)
        ids = np.argsort(rng.random((NUM_STEPS, NUM_LAYERS, NUM_HEADS, context_tokens // size - 1)), axis=-1)
        rankings[size] = {"true": ids[..., :width], "draft1": ids[..., :width], "draft2": ids[..., :width]}
    return memory_group(kv_len, rankings, name=name, model=MODEL)


@pytest.fixture(autouse=True)
def _tiny_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = memory_trace([request("short", CONTEXT_TOKENS), request("long", 512)], name="tiny")
    monkeypatch.setattr(experiment_module, "resolve_trace", lambda name: f"{name}.zarr.zip")
    monkeypatch.setattr(experiment_module, "_open", lambda location: trace)


def spec(**changes: Any) -> ExperimentSpec:
    return ExperimentSpec.model_validate({"trace": "tiny", **changes})


def test_resolved_point_has_numbers_and_names() -> None:
    point = resolve(spec(system="OasisKV", model="qwen3-8b", hardware="H100-SXM"))
    assert (point.spec.system, point.spec.model, point.spec.hardware) == ("oasiskv", "Qwen3-8B", "h100-sxm")
    assert point.context_tokens == point.spec.workload.context_tokens == CONTEXT_TOKENS
    assert point.spec.trace_group == point.group.name == "short"
    assert point.policy.kv_budget_tokens == 32
    assert point.policy.slack_blocks == 1
    assert point.mapping.name == "depth-cyclic"
    assert "policy.lookahead_k" not in point.ignored
    again = resolve(point.spec)
    assert (again.spec, again.policy, again.ignored) == (point.spec, point.policy, point.ignored)


def test_the_context_chooses_the_request() -> None:
    assert resolve(spec(workload={"context_tokens": 512})).group.name == "long"
    assert resolve(spec(trace_group="long")).context_tokens == 512
    with pytest.raises(InputError, match=r"context_tokens 1024: .* it has 256 \(short\), 512 \(long\)"):
        resolve(spec(workload={"context_tokens": 1024}))
    with pytest.raises(InputError, match=r"context_tokens 512: .* it has 256 \(short\)"):
        resolve(spec(trace_group="short", workload={"context_tokens": 512}))
    with pytest.raises(InputError, match="no request 'medium': one of short, long"):
        resolve(spec(trace_group="medium"))


def test_dense_needs_nothing_of_the_trace_but_its_context() -> None:
    for model in ("Qwen3-8B", "DeepSeek-V3", "Mistral-7B-v0.1"):
        point = resolve(spec(system="dense", model=model))
        assert point.policy.kv_budget_tokens is None
        assert len(point.mapping.layer_of) == point.model.num_full_attention_layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "Qwen3-9B"}, "unknown model 'Qwen3-9B': did you mean Qwen3-8B"),
        ({"hardware": "h300"}, "unknown hardware 'h300'"),
        ({"system": "nonesuch"}, "unknown system 'nonesuch'"),
        ({"policy": {"block_size_tokens": 32}}, r"block_size_tokens 32 is not recorded .* recorded: 8, 16"),
        ({"policy": {"lookahead_k": 3}}, "lookahead_k 3: .* records draft distances 1, 2"),
        ({"policy": {"lookahead_k": 77}}, "lookahead_k 77: .* records draft distances 1, 2"),
        ({"system": "prefetch-previous", "policy": {"lookahead_k": 6}}, "lookahead_k 6 needs a trace of at least 13"),
        ({"policy": {"kv_budget_tokens": 256}}, "kv_budget_tokens 256 needs 16 ranked blocks"),
        ({"policy": {"selector": "exact"}}, "selector exact: .* has only rankings true, draft1, draft2"),
        ({"workload": {"output_tokens": 131_000}}, "need 131255 positions, Qwen3-8B has 131072"),
        ({"placement": {"num_gpus": 9}}, "num_gpus 9 exceeds the 8 GPUs"),
        ({"hardware": "gh200", "placement": {"host_numa": "far"}}, "host_numa far needs two sockets"),
        ({"mapping": {"rule": "identity"}}, "mapping 'identity' does not fit"),
        ({"model": "DeepSeek-V3"}, "MLA"),
        ({"model": "Mistral-7B-v0.1"}, "no full-attention layer"),
    ],
)
def test_impossible_points_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        resolve(spec(**changes))
    assert "\n" not in str(caught.value)


def test_placement_that_a_system_ignores_is_not_checked() -> None:
    point = resolve(spec(system="dense", hardware="gh200", placement={"host_numa": "far"}))
    assert point.spec.placement.host_numa == "local"


def test_grid_order_and_duplicates() -> None:
    points = expand(
        {"workload.batch_size": 8},
        {
            "system": ["dense", "quest", "oasiskv"],
            "policy.block_size_tokens": [8, 16],
            "policy.fetch_cap": [0.05, 1],
            "placement.host_numa": ["local", "far"],
        },
    )
    assert [point.system for point in points] == ["dense"] + ["quest"] * 2 + ["oasiskv"] * 8
    assert all(point.workload.batch_size == 8 for point in points)
    assert points[0].policy == {}
    assert [point.policy for point in points[1:3]] == [{"block_size_tokens": 8}, {"block_size_tokens": 16}]
    last = [(p.policy["block_size_tokens"], p.policy["fetch_cap"], p.placement.host_numa) for p in points[3:]]
    assert last == [(b, c, numa) for b in (8, 16) for c in (0.05, 1) for numa in ("local", "far")]


def test_a_value_equal_to_the_default_is_a_duplicate() -> None:
    assert len(expand(ExperimentSpec(), {"policy.fetch_cap": [0.05, 0.1], "policy.gather_ctas": [16]})) == 2
    assert len(expand({"policy": {"transport": "ce-batched"}}, {"policy.gather_ctas": [8, 16, 32]})) == 1
    assert len(expand({}, {"system": ["dense", "DENSE"]})) == 1


def test_base_may_be_an_experiment_or_nested_or_dotted_keys() -> None:
    nested = {"system": "quest", "policy": {"block_size_tokens": 8}, "workload": {"batch_size": 4}}
    dotted = {"system": "quest", "policy.block_size_tokens": 8, "workload.batch_size": 4}
    assert expand(nested, {}) == expand(dotted, {}) == expand(ExperimentSpec.model_validate(nested), {})


@pytest.mark.parametrize(
    ("base", "grid", "message"),
    [
        ({}, {"policy.fetch_kap": [1]}, r"unknown key 'policy\.fetch_kap': did you mean policy\.fetch_cap"),
        ({"batch_size": 3}, {}, r"unknown key 'batch_size': did you mean workload\.batch_size"),
        ({"policy": 3}, {}, "unknown key 'policy'"),
        ({}, {"workload.batch_size": [8, -1]}, r"workload\.batch_size: input should be greater than 0, got -1"),
        ({}, {"workload.batch_size": [8.5]}, "valid integer"),
        ({}, {"engine.hbm_utilization": [1.5]}, r"engine\.hbm_utilization: input should be less than or equal to 1"),
        ({}, {"engine.software_overhead_s": [float("inf")]}, r"software_overhead_s: input should be a finite number"),
        ({}, {"policy.fetch_cap": []}, r"policy\.fetch_cap: no value given"),
        ({}, {"policy.lookahead_mode": ["union"]}, "union needs predictor draft"),
    ],
)
def test_bad_grids_are_refused(base: dict[str, Any], grid: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        expand(base, grid)


def test_every_key_of_the_schema_is_listed_once() -> None:
    keys = experiment_keys()
    assert len(keys) == len(set(keys))
    assert {"seed", "policy.fetch_cap", "placement.host_numa", "mapping.rule", "objective.min_recall"} <= set(keys)
