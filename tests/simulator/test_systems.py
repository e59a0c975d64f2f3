"""The systems table: every row resolves, ignored keys cannot matter, contradictions are refused in one line."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import pytest

from simulator import systems
from simulator.experiment import experiment_keys
from simulator.ignored_parameters import ignored_parameters
from simulator.policy_composition import compose_policy, resolve_policy
from simulator.specs.experiment import PlacementSpec
from simulator.specs.policy import MissRule, PolicySpec, Predictor, Residency, Selector
from simulator.specs.serving import ServingSpec
from simulator.systems import SYSTEMS, System
from traces.errors import InputError

CONTEXT_TOKENS = 6144
ALTERNATIVES: dict[str, Any] = {
    "slack_blocks": 7, "eviction": "lowest-score", "transport": "ce-batched", "gather_ctas": 8, "miss_rule": "stall",
    "kv_budget_tokens": 512, "block_size_tokens": 32, "fetch_cap": 0.5, "fetch_cap_scope": "layer", "lookahead_k": 3,
    "lookahead_mode": "union", "write_back": "token", "metadata_vectors_per_block": 1,
    "metadata_bytes_per_element": 1.0, "draft_head": "ngram", "recent_share": 0.25, "sink_tokens": 64,
    "history_steps": 50, "mass_history": "prompt", "correction_cosine": 0.5, "dense_below_recall": 0.5, "key_rank": 64,
}  # fmt: skip
OTHERWISE = {
    "eviction": "least-recently-selected", "write_back": "block", "metadata_vectors_per_block": 3, "transport": "gather"
}  # fmt: skip
"""Where a system's own choice is the alternative."""
REFUSED = {"freekv": ("lookahead_k",)}


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_row_resolves(name: str) -> None:
    system = SYSTEMS[name]
    assert system.description
    assert system.citation
    assert set(system.policy) <= set(PolicySpec.model_fields)
    assert set(system.serving) <= set(ServingSpec.model_fields)
    policy = resolve_policy(name, {}, CONTEXT_TOKENS)
    for key, value in system.policy.items():
        assert getattr(policy, key) == value
    assert ignored_parameters(policy) <= set(experiment_keys())
    assert resolve_policy(name.upper(), {}, CONTEXT_TOKENS) == policy


def test_what_the_named_systems_are() -> None:
    dense, quest, retrieval, previous, oasis, oracle = (
        resolve_policy(name, {}, CONTEXT_TOKENS)
        for name in ("dense", "quest", "retrieval", "prefetch-previous", "oasiskv", "oasiskv-oracle")
    )
    assert (dense.selector, dense.residency, dense.kv_budget_tokens) == ("all", "everything", None)
    assert (quest.selector, quest.residency, quest.predictor) == ("minmax", "everything", "current")
    assert (retrieval.residency, retrieval.predictor, retrieval.fetch_cap) == ("exact", "current", 1.0)
    assert (previous.residency, previous.predictor, previous.lookahead_k) == ("exact", "previous", 1)
    assert (oasis.residency, oasis.predictor, oasis.fetch_cap, oasis.miss_rule) == ("slack", "draft", 0.05, "attend")
    assert oracle == oasis.model_copy(update={"predictor": "oracle"})


def test_budget_and_slack_become_numbers() -> None:
    assert resolve_policy("quest", {}, 6144).kv_budget_tokens == 768
    assert resolve_policy("quest", {}, 6150 + 64).kv_budget_tokens == 768
    assert resolve_policy("quest", {"block_size_tokens": 64}, 5000).kv_budget_tokens == 576
    assert resolve_policy("oasiskv", {}, 16_384).slack_blocks == 7  # ceil(1 x 0.05 x 128)
    assert resolve_policy("oasiskv", {"lookahead_k": 4, "fetch_cap": 0.25}, 16_384).slack_blocks == 128
    assert resolve_policy("oasiskv", {"fetch_cap": 0.0}, 16_384).slack_blocks == 1
    assert resolve_policy("oasiskv", {"slack_blocks": 3}, 16_384).slack_blocks == 3
    assert resolve_policy("retrieval", {}, 16_384).slack_blocks is None


@pytest.mark.parametrize("name", SYSTEMS)
def test_ignored_keys_change_nothing(name: str) -> None:
    base = resolve_policy(name, {}, CONTEXT_TOKENS)
    ignored = {key.removeprefix("policy.") for key in ignored_parameters(base) if key.startswith("policy.")}
    for key in ignored & set(ALTERNATIVES):
        if key == "slack_blocks" and base.residency != "everything":
            continue  # refused, not ignored
        if key in {"fetch_cap_scope", "miss_rule"}:
            continue  # ignored only together with an uncapped fetch, tested below
        assert resolve_policy(name, {key: ALTERNATIVES[key]}, CONTEXT_TOKENS) == base, key
    heeded = set(ALTERNATIVES) - ignored - {"lookahead_mode"}
    for key in heeded:
        value = OTHERWISE.get(key) if ALTERNATIVES[key] == getattr(base, key) else ALTERNATIVES[key]
        try:
            assert resolve_policy(name, {key: value}, CONTEXT_TOKENS) != base, key
        except InputError:
            assert key in REFUSED.get(name, ()), key


def test_what_each_tier_makes_meaningless() -> None:
    def ignored(policy: dict[str, Any], **placement: str) -> set[str]:
        where = PlacementSpec(**placement)
        base = ignored_parameters(compose_policy("oasiskv", {}), where.model_copy(update={"kv_tier": "host"}))
        return ignored_parameters(compose_policy("oasiskv", policy, where), where) ^ base

    paths, host = {"placement.remote_path", "placement.nic_numa"}, {"policy.host_residency"}
    assert ignored({}, kv_tier="remote") == paths | host
    assert ignored({}, kv_tier="nvme") == {"placement.remote_path", *host}
    cached = {"host_residency": "fetched"}
    assert ignored(cached, kv_tier="remote") == paths | host | {"policy.host_cache_tokens"}
    assert ignored({"host_residency": "full"}, kv_tier="remote", nic_numa="far") == host
    through_host = {"policy.transport", "policy.gather_ctas", "placement.host_numa"}
    assert ignored({}, kv_tier="remote", remote_path="direct") == paths | host | through_host
    assert ignored_parameters(compose_policy("dense", cached), PlacementSpec(kv_tier="remote")) >= paths | host
    with pytest.raises(InputError, match="fetched keeps what passes through host memory"):
        compose_policy("oasiskv", cached, PlacementSpec(kv_tier="remote", remote_path="direct"))


def test_the_host_cache_defaults_to_half_of_the_context_in_whole_blocks() -> None:
    where, cached = PlacementSpec(kv_tier="remote"), {"host_residency": "fetched"}
    assert resolve_policy("oasiskv", cached, 4100, where).host_cache_tokens == 2048
    assert resolve_policy("oasiskv", cached, 4100).host_cache_tokens is None
    with pytest.raises(InputError, match="host_cache_tokens: 100 is no multiple of the block size 16; nearest: 96 and"):
        resolve_policy("oasiskv", {**cached, "host_cache_tokens": 100}, 4096, where)


def test_what_each_choice_makes_meaningless() -> None:
    dense = ignored_parameters(compose_policy("dense", {}))
    assert {"policy.kv_budget_tokens", "policy.block_size_tokens", "policy.fetch_cap", "policy.lookahead_k"} <= dense
    assert {"placement.host_numa", "policy.transport", "policy.write_back", "mapping.rule"} <= dense
    quest = ignored_parameters(compose_policy("quest", {}))
    assert dense - quest == {
        "policy.kv_budget_tokens", "policy.block_size_tokens", "policy.metadata_vectors_per_block",
        "policy.metadata_bytes_per_element", "mapping.rule", "mapping.layers",
    }  # fmt: skip
    retrieval = ignored_parameters(compose_policy("retrieval", {}))
    assert {"policy.lookahead_k", "policy.lookahead_mode", "policy.miss_rule", "policy.draft_head"} <= retrieval
    assert not {"policy.fetch_cap", "policy.transport", "placement.host_numa"} & retrieval
    assert "policy.miss_rule" not in ignored_parameters(compose_policy("retrieval", {"fetch_cap": 0.5}))
    single = {"policy.recent_share", "policy.history_steps", "policy.sink_tokens", "policy.mass_history"}
    remote = {
        "placement.remote_path", "placement.nic_numa", "policy.host_residency", "policy.host_cache_tokens",
    }  # fmt: skip
    rules = {"policy.correction_cosine", "policy.dense_below_recall"}
    assert ignored_parameters(compose_policy("oasiskv", {})) == single | rules | remote
    assert rules - ignored_parameters(compose_policy("freekv", {})) == {"policy.correction_cosine"}
    h2o = ignored_parameters(compose_policy("h2o", {}))
    assert (dense - quest) - h2o == {
        "policy.kv_budget_tokens", "policy.block_size_tokens", "mapping.rule", "mapping.layers",
    }  # fmt: skip
    assert h2o >= dense & quest - {"policy.recent_share", "policy.mass_history"}
    assert single - h2o == {"policy.recent_share", "policy.mass_history"}
    assert single - ignored_parameters(compose_policy("scissorhands", {})) == {
        "policy.recent_share", "policy.history_steps",
    }  # fmt: skip
    assert single - ignored_parameters(compose_policy("streamingllm", {})) == {"policy.sink_tokens"}
    assert "policy.fetch_cap_scope" in ignored_parameters(compose_policy("oasiskv", {"fetch_cap": 1.0}))
    assert "policy.gather_ctas" in ignored_parameters(compose_policy("oasiskv", {"transport": "ce-batched"}))


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("nonesuch", {}, "unknown system 'nonesuch': one of dense, vllm-offload"),
        ("oasis-kv", {}, "unknown system 'oasis-kv': did you mean oasiskv"),
        ("oasiskv", {"fetch_kap": 0.1}, r"unknown key 'policy\.fetch_kap': did you mean policy\.fetch_cap"),
        ("oasiskv", {"fetch_cap": -0.1}, r"policy\.fetch_cap: input should be greater than or equal to 0, got -0\.1"),
        ("oasiskv", {"fetch_cap": float("nan")}, r"policy\.fetch_cap: input should be a finite number"),
        ("oasiskv", {"block_size_tokens": 0}, r"policy\.block_size_tokens: input should be greater than 0, got 0"),
        ("oasiskv", {"lookahead_k": 1.5}, r"policy\.lookahead_k: input should be a valid integer, got 1\.5"),
        ("oasiskv", {"selector": "means"}, r"policy\.selector: input should be 'minmax', 'exact', 'mean'"),
        ("oasiskv", {"kv_budget_tokens": 8}, "8 is smaller than one block of 16 tokens"),
        ("oasiskv", {"kv_budget_tokens": 1000}, "1000 is no multiple of the block size 16; nearest are 992 and 1008"),
        ("oasiskv", {"block_size_tokens": 1024}, "6144 context tokens / 8, is smaller than one block of 1024"),
        ("oasiskv", {"selector": "all"}, r"policy\.residency: selector all reads every block"),
        ("vllm-offload", {"selector": "minmax"}, r"policy\.residency: streamed brings every block"),
        ("vllm-offload", {"predictor": "draft"}, r"policy\.predictor: residency streamed predicts nothing"),
        ("h2o", {"residency": "exact"}, r"policy\.residency: selector accumulated-mass ranks without"),
        ("h2o", {"predictor": "draft"}, r"policy\.predictor: residency drop predicts nothing"),
        ("h2o", {"recent_share": 1.5}, r"policy\.recent_share: input should be less than or equal to 1"),
        ("oasiskv", {"residency": "cache"}, r"policy\.residency: a cache is filled on demand"),
        ("arkvale", {"predictor": "draft"}, r"policy\.residency: a cache is filled on demand"),
        ("oasiskv", {"miss_rule": "correct"}, r"policy\.miss_rule: correct compares with the query of the step before"),
        ("freekv", {"lookahead_k": 2}, "predictor must be previous and lookahead_k 1, got previous and 2"),
        ("quest", {"predictor": "draft"}, r"policy\.predictor: residency everything predicts nothing"),
        ("retrieval", {"residency": "slack"}, r"policy\.residency: slack holds arrivals"),
        ("retrieval", {"slack_blocks": 3}, r"policy\.slack_blocks: needs residency slack or cache, not exact"),
        ("retrieval", {"miss_rule": "stall", "fetch_cap": 0.5}, r"policy\.fetch_cap: on demand"),
        ("oasiskv", {"lookahead_mode": "union"}, "union needs predictor draft and lookahead_k of at least 2"),
        ("prefetch-previous", {"lookahead_mode": "refine", "lookahead_k": 2}, "got previous and 2"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(name: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        resolve_policy(name, overrides, CONTEXT_TOKENS)
    assert "\n" not in str(caught.value)


def test_a_new_system_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = System("prefetch two steps ahead from both drafts", "a test", {
        "residency": "slack", "lookahead_k": 2, "lookahead_mode": "union", "fetch_cap": 0.1,
    })  # fmt: skip
    monkeypatch.setattr(systems, "SYSTEMS", MappingProxyType({**SYSTEMS, "mine": row}))
    policy = resolve_policy("mine", {"block_size_tokens": 32}, 8192)
    assert (policy.lookahead_mode, policy.kv_budget_tokens, policy.slack_blocks) == ("union", 1024, 7)


def test_the_page_on_systems_knows_every_system_and_choice() -> None:
    page = (Path(__file__).parents[2] / "docs" / "systems.md").read_text()
    choices = {*get_args(Selector), *get_args(Predictor), *get_args(Residency), *get_args(MissRule)}
    missing = [name for name in (*SYSTEMS, *choices) if f"`{name}`" not in page]
    assert not missing
