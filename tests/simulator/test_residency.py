"""The compiled replay agrees exactly with the plain-Python statement of the rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from simulator.demand import REMOTE_FIELDS
from simulator.mapping import Mapping
from simulator.predictors import predicted_ranking, random_ranking, selector_ranking
from simulator.replay import integer_mass, miss_arrays, replayed_heads, run_kernel
from simulator.replay_settings import blocks_per_step, resolve_settings
from simulator.residency_reference import Rules, replay_reference
from simulator.specs.policy import PolicySpec
from traces.memory import MemoryGroup, memory_group

BLOCK_SIZE = 2
POLICIES = [
    {"predictor": "current"},
    {"predictor": "current", "miss_rule": "stall", "fetch_cap": 1.0},
    {"predictor": "previous"},
    {"predictor": "draft"},
    {"predictor": "oracle"},
    {"predictor": "random"},
    {"predictor": "previous-layer"},
    {"predictor": "draft", "lookahead_mode": "union"},
    {"predictor": "draft", "lookahead_mode": "refine"},
]
CAPS = [0.0, 0.01, 0.1, 1 / 3, 0.5, 1.0]


def random_group(
    seed: int,
    num_steps: int,
    num_layers: int,
    num_heads: int,
    first_kv_len: int,
    width: int = 99,
    open_too: bool = False,
) -> MemoryGroup:
    """Rankings that change slowly, drafts that are partly wrong, masked draft rows, unrecorded masses.

    width: most ranked blocks. open_too: rankings contain the open block, as a foreign trace's may.
    """
    rng = np.random.default_rng(seed)
    kv_len = first_kv_len + np.cumsum(np.concatenate([[0], rng.integers(0, 4, num_steps - 1)]))
    num_blocks = -(-kv_len // BLOCK_SIZE)
    shape = (num_steps, num_layers, num_heads, int(num_blocks.max()))
    ranked = num_blocks + open_too
    score = rng.normal(size=shape[1:]) + 0.4 * np.cumsum(rng.normal(size=shape), axis=0)
    rankings = {"true": rank(score, ranked)[..., :width]}
    for distance in range(1, 5):
        known = ranked[np.maximum(np.arange(num_steps) - distance, 0)]
        draft = rank(score + rng.normal(size=shape) * 0.7, known)[..., :width]
        draft[:distance] = -1
        draft[rng.random(num_steps) < 0.1] = -1
        rankings[f"draft{distance}"] = draft
    rankings["prev_layer"] = rank(score + rng.normal(size=shape) * 0.5, ranked)[..., :width]
    rankings["prev_layer"][:, 0] = -1
    mass = np.exp(score) * (rng.random(shape) < 0.8)
    cosines = np.round(rng.uniform(-1, 1, shape[:3]), 1)
    return memory_group(kv_len, {BLOCK_SIZE: rankings}, {BLOCK_SIZE: mass}, query_cos={BLOCK_SIZE: cosines})


def rank(score: np.ndarray, num_blocks: np.ndarray) -> np.ndarray:
    excluded = np.arange(score.shape[-1]) >= (num_blocks - 1)[:, None, None, None]
    order = np.argsort(-np.where(excluded, -np.inf, score), axis=-1, kind="stable")
    return np.where(np.take_along_axis(np.broadcast_to(excluded, score.shape), order, -1), -1, order).astype(np.int32)


def expected_rows(
    group: MemoryGroup, policy: PolicySpec, mapping: Mapping, seed: int, host_keeps_new: bool = False
) -> list[tuple[int, list[list[dict[str, int]]]]]:
    """(first replayed head, reference counts) of every cap scope, from rankings read without the predictors module."""
    assert policy.kv_budget_tokens is not None
    num_blocks = [-(-int(length) // BLOCK_SIZE) for length in group.kv_len]
    num_kept = policy.kv_budget_tokens // BLOCK_SIZE
    drops = policy.residency == "drop"
    k = 1 if drops else 0 if policy.predictor in ("current", "previous-layer") else policy.lookahead_k
    slack = policy.slack_blocks or 0
    heads = replayed_heads(mapping, policy.fetch_cap_scope if policy.fetch_cap < 1 else "head")
    true = group.ranking("true", BLOCK_SIZE)
    drafts = {j: group.ranking(f"draft{j}", BLOCK_SIZE) for j in range(1, 5)}
    draws = random_ranking(
        group.layers(BLOCK_SIZE), group.num_kv_heads, np.array(num_blocks), num_kept, policy.lookahead_k, seed
    )
    early = group.ranking("prev_layer", BLOCK_SIZE)
    cosines = group.query_cos(BLOCK_SIZE)
    weights = integer_mass()[group.mass(BLOCK_SIZE).levels]
    rules = Rules(
        num_kept,
        num_kept + slack,
        k,
        predicts=policy.predictor == "previous-layer",
        caches=policy.residency == "cache",
        refine=policy.lookahead_mode == "refine",
        stall=policy.miss_rule in ("stall", "correct"),
        by_score=drops or policy.eviction == "lowest-score",
        fetch_cap=Fraction(0 if drops else str(policy.fetch_cap)),
        host_blocks=0 if drops else (policy.host_cache_tokens or 0) // BLOCK_SIZE,
        host_keeps_new=host_keeps_new,
    )
    scopes = []
    for first, end in zip(heads.scope_start, heads.scope_start[1:], strict=False):
        where = [(heads.layer[g], heads.head[g]) for g in range(first, end)]

        def predicted(target: int, h: int, where: list = where) -> Sequence[int]:
            layer, head = where[h]
            if policy.predictor == "previous" or drops:
                return true[target - k, layer, head].tolist()
            if policy.predictor == "previous-layer":
                return (early if layer else true)[target, layer, head].tolist()
            if policy.predictor == "random":
                return draws[target, layer, head].tolist()
            if policy.predictor != "draft":
                return true[target, layer, head].tolist()
            if policy.lookahead_mode != "union":
                return drafts[k][target, layer, head].tolist()
            rows = [drafts[j][target - k + j, layer, head].tolist() for j in range(1, k + 1)]
            merged = [row[rank] for rank in range(len(rows[0])) for row in rows if row[rank] >= 0]
            return list(dict.fromkeys(merged))

        def corrected(t: int, h: int, where: list = where) -> bool:
            threshold = policy.correction_cosine
            return policy.miss_rule == "stall" or threshold == 1 or cosines[t, *where[h]] < threshold

        def enough(t: int, h: int, where: list = where) -> int:
            if policy.miss_rule != "dense":
                return 0
            return math.ceil(policy.dense_below_recall * float(weights[t, *where[h]].sum()))

        scopes.append(
            (
                int(first),
                replay_reference(
                    rules,
                    num_blocks,
                    lambda t, h, w=where: true[t, w[h][0], w[h][1]].tolist(),
                    predicted,
                    lambda t, h, w=where: drafts[1][t, w[h][0], w[h][1]].tolist(),
                    lambda t, h, w=where: weights[t, w[h][0], w[h][1]].tolist(),
                    len(where),
                    corrected,
                    enough,
                ),
            )
        )
    return scopes


def assert_kernel_is_reference(
    group: MemoryGroup, policy: PolicySpec, mapping: Mapping, seed: int, host_keeps_new: bool = False
) -> None:
    from simulator.replay_kernel import COUNTS

    resolved = replace(resolve_settings(group, policy), host_keeps_new=host_keeps_new)
    num_blocks = blocks_per_step(group, BLOCK_SIZE)
    heads = replayed_heads(mapping, resolved.fetch_cap_scope)
    true_ids = selector_ranking(group, resolved, num_blocks)
    ranking = predicted_ranking(group, resolved, num_blocks, true_ids, seed)
    levels = group.mass(BLOCK_SIZE).levels
    out = run_kernel(resolved, num_blocks, true_ids, ranking, levels, heads, miss_arrays(group, resolved))
    for first, rows in expected_rows(group, policy, mapping, seed, host_keeps_new):
        for step, counts in enumerate(rows):
            for h, expected in enumerate(counts):
                got = {name: int(out.counts[i, first + h, step]) for i, name in enumerate(COUNTS)}
                got |= {name: int(out.remote[i, first + h, step]) for i, name in enumerate(REMOTE_FIELDS)}
                got |= {"mass": int(out.mass[first + h, step]), "coverage": int(out.coverage[first + h, step])}
                assert got == expected, f"step {step}, head {first + h}"


@settings(max_examples=150, deadline=None)
@given(
    choice=st.sampled_from(POLICIES),
    cap=st.sampled_from(CAPS),
    scope=st.sampled_from(["head", "layer", "request"]),
    eviction=st.sampled_from(["least-recently-selected", "lowest-score"]),
    miss_rule=st.sampled_from(["stall", "attend"]),
    k=st.integers(1, 4),
    slack=st.integers(0, 12),
    num_kept=st.integers(1, 14),
    num_steps=st.integers(10, 14),
    first_kv_len=st.integers(1, 40),
    extra_width=st.integers(0, 6),
    open_too=st.booleans(),
    host_blocks=st.integers(0, 20),
    seed=st.integers(0, 2**20),
)
@example(  # slots that were never filled, beside one whose block leaves as two fill
    {"predictor": "random"}, 0.0, "head", "least-recently-selected", "stall", 1, 0, 7, 10, 11, 0, False, 0, 1
)
def test_kernel_agrees_with_reference(
    choice: dict, cap: float, scope: str, eviction: str, miss_rule: str, k: int, slack: int, num_kept: int,
    num_steps: int, first_kv_len: int, extra_width: int, open_too: bool, host_blocks: int, seed: int,
) -> None:  # fmt: skip
    group = random_group(seed, num_steps, 2, 2, first_kv_len, num_kept + extra_width, open_too)
    num_kept = min(num_kept, group.max_ranked_blocks(BLOCK_SIZE))
    if "lookahead_mode" in choice:
        k = max(k, 2)
    base = {"fetch_cap": cap, "miss_rule": miss_rule} | choice
    if base["predictor"] == "current" and base["miss_rule"] == "stall":
        base["fetch_cap"] = 1.0
    policy = PolicySpec(
        **base,
        fetch_cap_scope=scope,
        eviction=eviction,
        lookahead_k=k,
        kv_budget_tokens=num_kept * BLOCK_SIZE,
        block_size_tokens=BLOCK_SIZE,
        residency="slack" if slack else "exact",
        slack_blocks=slack or None,
        host_residency="fetched" if host_blocks else "none",
        host_cache_tokens=host_blocks * BLOCK_SIZE or None,
    )
    mapping = Mapping("test", np.array([0, 1, 1], np.int32), np.array([0, 1, 0], np.int32), "")
    assert_kernel_is_reference(group, policy, mapping, seed, host_keeps_new=seed % 2 == 1)


@settings(max_examples=100, deadline=None)
@given(
    choice=st.sampled_from(
        [
            {"predictor": "current", "residency": "cache"},
            {"predictor": "current", "residency": "cache", "fetch_cap": 0.2},
            {"predictor": "previous", "miss_rule": "correct"},
            {"predictor": "previous", "miss_rule": "correct", "fetch_cap": 0.3},
            {"predictor": "draft", "miss_rule": "dense", "lookahead_k": 2},
            {"predictor": "current", "miss_rule": "dense", "fetch_cap": 0.2},
            {"predictor": "previous-layer", "miss_rule": "dense", "fetch_cap": 0.5},
        ]
    ),
    eviction=st.sampled_from(["least-recently-selected", "lowest-score"]),
    threshold=st.sampled_from([-1.0, 0.0, 0.3, 0.7, 1.0]),
    extra_slots=st.integers(1, 12),
    num_kept=st.integers(1, 14),
    first_kv_len=st.integers(1, 40),
    seed=st.integers(0, 2**20),
)
def test_kernel_agrees_on_caches_corrections_and_fallbacks(
    choice: dict, eviction: str, threshold: float, extra_slots: int, num_kept: int, first_kv_len: int, seed: int
) -> None:
    group = random_group(seed, 12, 2, 2, first_kv_len, num_kept + 5)
    num_kept = min(num_kept, group.max_ranked_blocks(BLOCK_SIZE))
    caches = choice.get("residency") == "cache"
    policy = PolicySpec(
        **choice,
        eviction=eviction,
        correction_cosine=threshold,
        dense_below_recall=abs(threshold),
        kv_budget_tokens=num_kept * BLOCK_SIZE,
        block_size_tokens=BLOCK_SIZE,
        slack_blocks=extra_slots if caches else None,
    )
    mapping = Mapping("test", np.array([0, 1, 1], np.int32), np.array([0, 1, 0], np.int32), "")
    assert_kernel_is_reference(group, policy, mapping, seed)


@settings(max_examples=40, deadline=None)
@given(
    num_kept=st.integers(1, 14), num_steps=st.integers(10, 14), first_kv_len=st.integers(1, 40),
    extra_width=st.integers(0, 40), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_kernel_agrees_where_blocks_are_dropped(
    num_kept: int, num_steps: int, first_kv_len: int, extra_width: int, seed: int
) -> None:
    group = random_group(seed, num_steps, 2, 2, first_kv_len, num_kept + extra_width)
    num_kept = min(num_kept, group.max_ranked_blocks(BLOCK_SIZE))
    policy = PolicySpec(
        residency="drop", predictor="current", kv_budget_tokens=num_kept * BLOCK_SIZE, block_size_tokens=BLOCK_SIZE
    )
    mapping = Mapping("test", np.array([0, 1, 1], np.int32), np.array([0, 1, 0], np.int32), "")
    assert_kernel_is_reference(group, policy, mapping, seed)


@pytest.mark.parametrize("choice", POLICIES)
def test_kernel_agrees_on_a_longer_trace(choice: dict) -> None:
    group = random_group(7, num_steps=60, num_layers=1, num_heads=2, first_kv_len=60)
    policy = PolicySpec(
        **{"fetch_cap": 0.4, **choice},
        lookahead_k=3,
        kv_budget_tokens=24,
        block_size_tokens=BLOCK_SIZE,
        residency="slack",
        slack_blocks=5,
    )
    mapping = Mapping("test", np.array([0], np.int32), np.array([0, 1], np.int32), "")
    assert_kernel_is_reference(group, policy, mapping, seed=3)
