"""Demand of whole policies: closed forms, conservation, golden counts, caching and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simulator.demand import COUNT_FIELDS, SHARE_FIELDS, Demand
from simulator.mapping import Mapping
from simulator.replay import replay
from simulator.residency import Residency
from simulator.specs.policy import PolicySpec
from traces.errors import InputError, TraceError
from traces.memory import MemoryGroup, memory_group

BLOCK_SIZE = 4
NUM_STEPS = 40
FIRST_KV_LEN = 150
NUM_BLOCKS = -(-(FIRST_KV_LEN + np.arange(NUM_STEPS)) // BLOCK_SIZE)
IDENTITY = Mapping("identity", np.array([0, 1], np.int32), np.array([0, 1, 2], np.int32), "")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OASIS_SIM_CACHE", str(tmp_path / "cache"))


def walk(seed: int, size: int = 400) -> np.ndarray:
    """Integer scores of every block that drift slowly, [S, 2, 3, n_max]: the same on every machine."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(-60, 61, size=(NUM_STEPS, 2, 3, int(NUM_BLOCKS.max())))
    return rng.integers(0, size, size=steps.shape[1:]) + np.cumsum(steps, axis=0)


def rank(score: np.ndarray, known_at: int = 0, width: int = 24) -> np.ndarray:
    """Best block first among those selectable `known_at` steps earlier; −1 in the first rows of a draft."""
    num_blocks = NUM_BLOCKS[np.maximum(np.arange(NUM_STEPS) - known_at, 0)]
    excluded = np.arange(score.shape[-1]) >= (num_blocks - 1)[:, None, None, None]
    ids = np.argsort(np.where(excluded, 10**6, -score), axis=-1, kind="stable")[..., :width].astype(np.int32)
    ids[:known_at] = -1
    return ids


def make_group(**changes: Any) -> MemoryGroup:
    score, noise = walk(1), np.random.default_rng(2).integers(-80, 81, size=(4, NUM_STEPS, 2, 3, int(NUM_BLOCKS.max())))
    rankings = {"true": rank(score)} | {f"draft{j}": rank(score + noise[j - 1], j) for j in range(1, 5)} | changes
    return memory_group(
        FIRST_KV_LEN + np.arange(NUM_STEPS), {BLOCK_SIZE: rankings}, {BLOCK_SIZE: np.exp2(score / 100.0)}
    )


@pytest.fixture(scope="module")
def group() -> MemoryGroup:
    return make_group()


def policy(**changes: Any) -> PolicySpec:
    return PolicySpec(**{"kv_budget_tokens": 64, "block_size_tokens": BLOCK_SIZE, "predictor": "oracle"} | changes)


def steady(demand: Demand) -> slice:
    return slice(demand.steady_start, demand.steady_stop)


def test_on_demand_uncapped_fetches_exactly_what_it_misses(group: MemoryGroup) -> None:
    demand = replay(group, policy(predictor="current", miss_rule="stall"), IDENTITY)
    assert np.array_equal(demand.fetched, demand.missed)
    assert 0 < demand.hit_rate() < 1
    assert demand.churn() == pytest.approx(1 - demand.hit_rate(), abs=1e-12)
    assert demand.mean_overlap() == 1
    assert demand.admission_blocks == 2 * 3 * 16
    assert not demand.repaired.any()


def test_on_demand_reads_what_a_resident_cache_would_read(group: MemoryGroup) -> None:
    demand = replay(group, policy(predictor="current"), IDENTITY)
    resident = replay(group, policy(residency="everything"), IDENTITY)
    assert np.array_equal(demand.recall, resident.recall)
    assert resident.hit_rate() == 1
    assert not resident.fetched.any()
    assert not resident.evicted.any()
    assert resident.admission_blocks == 0


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_uncapped_oracle_hits_everything_but_blocks_that_filled_after_the_plan(group: MemoryGroup, k: int) -> None:
    demand = replay(group, policy(lookahead_k=k, residency="slack", slack_blocks=16 * k), IDENTITY, per_head=True)
    assert demand.mean_overlap() == 1
    assert demand.per_head is not None
    filled = np.array([NUM_BLOCKS[t] - NUM_BLOCKS[max(t - k, 0)] for t in range(NUM_STEPS)])
    missed = demand.per_head["missed"][k:]
    assert (missed <= filled[k:, None, None]).all()
    assert not missed[filled[k:] == 0].any()


def test_sink_outlives_the_blocks_that_fill() -> None:
    """Block 0, ranked best at every step, is attended at every step, though all K blocks tie as last selected."""
    score = walk(1)
    score[..., 0] = 10**5
    sink = make_group(true=rank(score))
    mass = np.zeros(score.shape)
    mass[..., 0] = 1.0
    only_sink = memory_group(sink.kv_len, {BLOCK_SIZE: {"true": rank(score)}}, {BLOCK_SIZE: mass})
    for k in (1, 3):
        demand = replay(only_sink, policy(lookahead_k=k, residency="slack", slack_blocks=16 * k), IDENTITY)
        assert (demand.recall == 3).all(), k


def test_previous_step_overlap_is_the_overlap_of_neighbouring_rankings(group: MemoryGroup) -> None:
    demand = replay(group, policy(predictor="previous", lookahead_k=2), IDENTITY, per_head=True)
    true = group.ranking("true", BLOCK_SIZE)
    assert demand.per_head is not None
    for t in (2, 17, 39):
        shared = len(set(true[t, 1, 2, :16].tolist()) & set(true[t - 2, 1, 2, :16].tolist()))
        assert demand.per_head["overlap"][t, 1, 2] == shared / 16


def test_no_cap_moves_more_than_it_allows(group: MemoryGroup) -> None:
    for cap, most in ((0.0, [0, 0, 0, 0, 0]), (0.05, [0, 1, 1, 1, 1]), (0.25, [4, 4, 4, 4, 4])):
        demand = replay(group, policy(fetch_cap=cap), IDENTITY, per_head=True)
        assert demand.per_head is not None
        busiest = demand.per_head["fetched"].max(axis=(1, 2))[:-1]
        assert (busiest <= np.resize(most, len(busiest))).all()
        assert busiest.max() == max(most)
        assert demand.churn() <= cap


def test_nothing_fetched_leaves_only_filled_blocks_to_enter(group: MemoryGroup) -> None:
    demand = replay(group, policy(fetch_cap=0.0), IDENTITY)
    assert not demand.fetched.any()
    assert demand.evicted[:, 0].tolist() == [*(3 * np.diff(NUM_BLOCKS)).tolist(), 0]


@pytest.mark.parametrize("budget", [16, 64, 92])
@pytest.mark.parametrize("miss_rule", ["stall", "attend"])
def test_what_enters_leaves_or_stays(group: MemoryGroup, budget: int, miss_rule: str) -> None:
    demand = replay(
        group, policy(predictor="draft", kv_budget_tokens=budget, miss_rule=miss_rule, fetch_cap=0.3), IDENTITY
    )
    filled_next = np.diff(NUM_BLOCKS, append=NUM_BLOCKS[-1])
    entered = demand.fetched + demand.repaired + 3 * filled_next[:, None]
    assert np.array_equal(demand.evicted, entered), "K blocks from step 0 on, room for the next one left a step before"


def test_budget_beyond_the_context_keeps_everything() -> None:
    kv_len = 10 + np.arange(12)
    ids = np.broadcast_to(np.arange(8, dtype=np.int32), (12, 1, 1, 8))
    mass = np.ones((12, 1, 1, 6))
    small = memory_group(kv_len, {BLOCK_SIZE: {"true": ids, "draft1": ids}}, {BLOCK_SIZE: mass})
    mapping = Mapping("identity", np.zeros(1, np.int32), np.zeros(1, np.int32), "")
    demand = replay(small, policy(kv_budget_tokens=32, predictor="draft"), mapping)
    assert demand.hit.ravel().tolist() == [3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6]
    assert not demand.fetched.any()
    assert not demand.evicted.any()
    assert demand.hit_rate() == demand.mean_recall() == demand.mean_recall_upper() == 1


def test_recall_by_hand() -> None:
    """Masses 2^-1, 2^-2, 2^-3, 2^-3 are exact levels; K = 1 reads one block and the open one."""
    ids = np.array([[0, 1, 2]] * 4, np.int32).reshape(4, 1, 1, 3)
    mass = np.broadcast_to([0.5, 0.25, 0.125, 0.125], (4, 1, 1, 4))
    small = memory_group(np.full(4, 16), {BLOCK_SIZE: {"true": ids}}, {BLOCK_SIZE: mass})
    mapping = Mapping("identity", np.zeros(1, np.int32), np.zeros(1, np.int32), "")
    demand = replay(small, policy(kv_budget_tokens=4), mapping)
    assert demand.mean_recall() == demand.mean_recall_upper() == pytest.approx(0.625, abs=1e-12)


def test_unrecorded_mass_widens_the_bounds(group: MemoryGroup) -> None:
    mass = group.mass(BLOCK_SIZE)
    levels = mass.levels.copy()
    levels[..., :20] = 0
    outside = np.full(mass.outside.shape, 0.2, np.float32)
    partial = make_group()
    partial._masses[BLOCK_SIZE] = type(mass)(levels, mass.scale, outside)
    demand = replay(partial, policy(), IDENTITY)
    assert demand.mean_recall() <= 0.8
    assert demand.mean_recall_upper() == pytest.approx(demand.mean_recall() + 0.2, abs=1e-6)


def test_distinct_heads_are_replayed_once_and_counted_for_each_that_they_serve(group: MemoryGroup) -> None:
    wide = Mapping("depth-cyclic", np.array([0, 0, 1], np.int32), np.array([0, 1, 2, 0, 1, 2], np.int32), "")
    one, many = replay(group, policy(predictor="draft"), IDENTITY), replay(group, policy(predictor="draft"), wide)
    for name in (*COUNT_FIELDS, *SHARE_FIELDS):
        narrow = getattr(one, name)
        assert np.allclose(getattr(many, name), 2 * narrow[:, [0, 0, 1]], rtol=1e-15), name


@pytest.mark.parametrize(("scope", "heads"), [("head", 1), ("layer", 3), ("request", 6)])
def test_scope_pools_the_credit(group: MemoryGroup, scope: str, heads: int) -> None:
    demand = replay(group, policy(fetch_cap=0.03, fetch_cap_scope=scope), IDENTITY)
    per_scope = {"head": demand.fetched.sum(1), "layer": demand.fetched.max(1), "request": demand.fetched.sum(1)}[scope]
    allowed = np.diff([step * 3 * 16 * heads // 100 for step in range(NUM_STEPS + 1)])
    most = allowed * 6 if scope == "head" else allowed
    assert (per_scope[:-1] <= most[:-1]).all()
    assert demand.fetched.sum() > 0.85 * allowed.sum() * 6 / heads


def test_per_head_arrays_sum_to_the_demand(group: MemoryGroup) -> None:
    demand = replay(group, policy(predictor="draft", fetch_cap=0.2), IDENTITY, per_head=True)
    assert demand.per_head is not None
    for name in (*COUNT_FIELDS, *SHARE_FIELDS):
        assert np.array_equal(demand.per_head[name].sum(axis=2), getattr(demand, name)), name


@pytest.mark.parametrize("k", [0, 1, 3])
def test_step_by_step_is_the_batch_replay(group: MemoryGroup, k: int) -> None:
    choices = {"predictor": "current"} if k == 0 else {"predictor": "draft", "lookahead_k": k}
    demand = replay(
        group, policy(**choices, residency="slack", slack_blocks=5, fetch_cap=0.25), IDENTITY, per_head=True
    )
    assert demand.per_head is not None
    true = group.ranking("true", BLOCK_SIZE)
    predicted = true if k == 0 else group.ranking(f"draft{k}", BLOCK_SIZE)
    heads = [(layer, head) for layer in range(2) for head in range(3)]
    states = {at: Residency(1, 16, 21, int(NUM_BLOCKS.max())) for at in heads}
    for at in heads:
        states[at].admit(true[0][at][None], int(NUM_BLOCKS[0]))
    for t, n in enumerate(NUM_BLOCKS.tolist()):
        for at in heads:
            residency = states[at]
            evicted = sum(len(ids) for ids in residency.begin(n)) if t else 0
            counts = {"hit": len(set(true[t][at][:16].tolist()) & set(residency.attended()[0].tolist()))}
            if t + k < NUM_STEPS:
                (plan,), _ = residency.plan(predicted[t + k][at][None], t + k, 4, int(NUM_BLOCKS[t + k]) - n)
                counts |= {"fetched": len(plan.fetch_ids), "runs": plan.num_runs, "in_slack": plan.num_in_slack}
                counts["evicted"] = evicted + len(plan.victim_ids)
            assert counts == {name: demand.per_head[name][t][at] for name in counts}, (t, at)


GOLDEN = {
    "on demand": {"predictor": "current", "miss_rule": "stall"},
    "previous": {"predictor": "previous"},
    "draft": {"predictor": "draft"},
    "draft, k 2, slack": {"predictor": "draft", "lookahead_k": 2, "residency": "slack"},
    "draft, k 2, union": {"predictor": "draft", "lookahead_k": 2, "lookahead_mode": "union"},
    "draft, k 2, refine": {"predictor": "draft", "lookahead_k": 2, "lookahead_mode": "refine", "fetch_cap": 0.3},
    "draft, capped": {"predictor": "draft", "fetch_cap": 0.1},
    "draft, capped by layer": {"predictor": "draft", "fetch_cap": 0.1, "fetch_cap_scope": "layer"},
    "draft, lowest score": {"predictor": "draft", "fetch_cap": 0.1, "eviction": "lowest-score"},
    "draft, stall": {"predictor": "draft", "fetch_cap": 0.1, "miss_rule": "stall"},
    "oracle": {"predictor": "oracle"},
    "random": {"predictor": "random"},
    "exact mass": {"selector": "exact", "predictor": "oracle"},
    "resident": {"residency": "everything"},
}
EXPECTED = {
    "on demand": [3489, 351, 351, 411, 349, 0, 0, 0, 0, 0],
    "previous": [3518, 322, 284, 344, 279, 0, 0, 0, 0, 0],
    "draft": [3427, 413, 589, 649, 580, 0, 0, 0, 0, 0],
    "draft, k 2, slack": [3432, 408, 559, 619, 548, 559, 0, 0, 0, 0],
    "draft, k 2, union": [3237, 603, 453, 513, 448, 0, 0, 0, 0, 0],
    "draft, k 2, refine": [3164, 676, 937, 997, 930, 0, 365, 364, 0, 0],
    "draft, capped": [3417, 423, 345, 405, 345, 0, 0, 0, 0, 0],
    "draft, capped by layer": [3425, 415, 364, 424, 363, 0, 0, 0, 0, 0],
    "draft, lowest score": [3455, 385, 337, 397, 337, 0, 0, 0, 0, 0],
    "draft, stall": [3473, 367, 313, 740, 313, 0, 0, 0, 367, 364],
    "oracle": [3809, 31, 298, 358, 295, 0, 0, 0, 0, 0],
    "random": [1541, 2299, 2264, 2324, 1945, 0, 0, 0, 0, 0],
    "exact mass": [3808, 32, 300, 360, 295, 0, 0, 0, 0, 0],
    "resident": [3840, 0, 0, 0, 0, 0, 0, 0, 0, 0],
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_counts(group: MemoryGroup, name: str) -> None:
    demand = replay(group, policy(**GOLDEN[name]), IDENTITY, seed=5)
    assert [int(getattr(demand, field).sum()) for field in COUNT_FIELDS] == EXPECTED[name]


def test_first_previous_step_plan_is_one_step_late_retrieval(group: MemoryGroup) -> None:
    """Uncapped, both hold the last step's true set, save where a block fills: only the plan has left room for it."""
    previous, on_demand = (
        replay(group, policy(predictor="previous"), IDENTITY),
        replay(group, policy(predictor="current"), IDENTITY),
    )
    steady_blocks = np.flatnonzero(np.diff(NUM_BLOCKS) == 0) + 1
    assert np.array_equal(previous.hit[steady_blocks], on_demand.hit[steady_blocks])
    assert (previous.hit >= on_demand.hit).all()


def test_replay_is_deterministic_and_seeds_only_the_random_predictor(group: MemoryGroup) -> None:
    for predictor, moves in (("draft", False), ("random", True)):
        one, same, other = (
            replay(group, policy(predictor=predictor), IDENTITY, seed=seed, use_cache=False) for seed in (1, 1, 2)
        )
        assert np.array_equal(one.hit, same.hit)
        assert np.array_equal(one.hit, other.hit) != moves


def test_second_replay_comes_from_the_cache(group: MemoryGroup, monkeypatch) -> None:
    first = replay(group, policy(predictor="draft"), IDENTITY)
    monkeypatch.setattr("simulator.replay.run_kernel", lambda *_: pytest.fail("replayed again"))
    other_hardware = policy(predictor="draft", transport="ce-batched", gather_ctas=32, kv_dtype="fp8")
    second = replay(group, other_hardware, IDENTITY, seed=9)
    for name in (*COUNT_FIELDS, *SHARE_FIELDS, "num_blocks"):
        assert np.array_equal(getattr(first, name), getattr(second, name)), name
    assert (second.admission_blocks, second.steady_stop) == (first.admission_blocks, first.steady_stop)


@pytest.mark.parametrize(
    "changes",
    [
        {"fetch_cap": 0.5},
        {"kv_budget_tokens": 60},
        {"lookahead_k": 2},
        {"eviction": "lowest-score"},
        {"miss_rule": "stall"},
        {"residency": "slack", "slack_blocks": 3},
        {"selector": "exact"},
        {"predictor": "previous"},
    ],
)
def test_what_changes_demand_changes_the_cache_key(group: MemoryGroup, changes: dict) -> None:
    base = replay(group, policy(predictor="draft", fetch_cap=0.1), IDENTITY)
    changed = replay(group, policy(**{"predictor": "draft", "fetch_cap": 0.1} | changes), IDENTITY)
    fresh = replay(group, policy(**{"predictor": "draft", "fetch_cap": 0.1} | changes), IDENTITY, use_cache=False)
    names = (*COUNT_FIELDS, *SHARE_FIELDS)
    assert all(np.array_equal(getattr(changed, name), getattr(fresh, name)) for name in names)
    assert not all(np.array_equal(getattr(changed, name), getattr(base, name)) for name in names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size_tokens": 16}, "16 is not recorded .* recorded: 4$"),
        ({"kv_budget_tokens": 100}, "ranks 24, so the budget is at most 96 tokens"),
        ({"kv_budget_tokens": 3}, "smaller than one block of 4 tokens"),
        ({"kv_budget_tokens": None}, "must be resolved"),
        ({"predictor": "draft", "lookahead_k": 5}, "records distances 1, 2, 3, 4 at 4 tokens"),
        ({"lookahead_k": 20}, "needs a trace of at least 41 steps, got 40"),
        ({"lookahead_mode": "union", "lookahead_k": 2}, "needs predictor 'draft'"),
        ({"lookahead_mode": "refine", "predictor": "draft"}, "lookahead_k of at least 2"),
        ({"predictor": "current", "miss_rule": "stall", "fetch_cap": 0.5}, "would fetch what the cap refuses"),
        ({"slack_blocks": 3}, "needs residency 'slack'"),
        ({"selector": "all"}, "residency must be everything"),
    ],
)
def test_policies_that_the_trace_cannot_serve_are_refused(group: MemoryGroup, changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        replay(group, policy(**changes), IDENTITY)


def test_faulty_traces_are_refused_with_array_and_index(group: MemoryGroup) -> None:
    short = group.ranking("true", BLOCK_SIZE).copy()
    short[7, 1, 2, 10:] = -1
    with pytest.raises(TraceError, match=r"true at 4 tokens\[7, 1, 2\]: ranks 10 selectable blocks, 16 are needed"):
        replay(make_group(true=short), policy(), IDENTITY)
    shrinking = make_group()
    shrinking.kv_len = shrinking.kv_len.copy()
    shrinking.kv_len[9] = 3
    with pytest.raises(TraceError, match=r"kv_len\[9\]: must be positive and never shrink, is 3"):
        replay(shrinking, policy(), IDENTITY)


def test_dense_attention_needs_no_ranking(group: MemoryGroup) -> None:
    demand = replay(group, policy(selector="all", residency="everything", kv_budget_tokens=None), IDENTITY)
    assert demand.hit[:, 0].tolist() == (3 * NUM_BLOCKS).tolist()
    assert demand.hit_rate() == demand.mean_recall() == demand.mean_overlap() == 1
    assert (demand.churn(), demand.admission_blocks) == (0, 0)
