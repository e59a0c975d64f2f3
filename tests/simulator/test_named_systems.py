"""What the named systems must do, whatever the trace: bounds, limits and equalities between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simulator.demand import COUNT_FIELDS, SHARE_FIELDS, Demand
from simulator.experiment import expand
from simulator.mapping import Mapping
from simulator.points import run_point
from simulator.policy_composition import resolve_policy
from simulator.replay import replay
from simulator.systems import SYSTEMS
from tests.simulator.synthetic_trace import open_as_any, synthetic_point, synthetic_trace
from traces.errors import InputError
from traces.memory import MemoryGroup, memory_group

SIZE, CONTEXT, NUM_STEPS = 4, 90, 24
IDENTITY = Mapping("identity", np.array([0, 1], np.int32), np.array([0, 1], np.int32), "")
SELECTING = tuple(name for name in SYSTEMS if resolve_policy(name, {}, 2048).selector != "all")
DROPPING = tuple(name for name in SYSTEMS if resolve_policy(name, {}, 2048).residency == "drop")


@pytest.fixture(scope="module")
def group() -> MemoryGroup:
    """Every array that a system may ask for, and every selectable block ranked."""
    rng = np.random.default_rng(3)
    kv_len = CONTEXT + np.arange(NUM_STEPS)
    num_blocks = -(-kv_len // SIZE)
    shape = (NUM_STEPS, 2, 2, int(num_blocks.max()))
    score = rng.normal(size=shape[1:]) * 2 + 0.5 * np.cumsum(rng.normal(size=shape), axis=0)

    def rank(noise: float, known_at: int = 0) -> np.ndarray:
        noisy = score + noise * rng.normal(size=shape)
        known = num_blocks[np.maximum(np.arange(NUM_STEPS) - known_at, 0)]
        excluded = np.arange(shape[-1]) >= (known - 1)[:, None, None, None]
        order = np.argsort(np.where(excluded, np.inf, -noisy), axis=-1, kind="stable")
        ids = np.where(np.take_along_axis(np.broadcast_to(excluded, shape), order, -1), -1, order).astype(np.int32)
        ids[:known_at] = -1
        return ids

    early = rank(0.5)
    early[:, 0] = -1
    rankings = {"true": rank(0), "mean": rank(0.2), "prev_layer": early, "draft1": rank(0.4, 1), "draft2": rank(0.6, 2)}
    mass = np.exp(score) * (np.arange(shape[-1]) < num_blocks[:, None, None, None])
    prompt = np.exp(score[0, ..., : -(-CONTEXT // SIZE)])
    return memory_group(
        kv_len, {SIZE: rankings}, {SIZE: mass}, query_cos={SIZE: rng.uniform(-0.5, 1, shape[:3])},
        prefill_mass={SIZE: prompt}, prompt_window_mass={SIZE: prompt},
    )  # fmt: skip


def demand_of(group: MemoryGroup, system: str, budget: int | None = 40, **overrides: Any) -> Demand:
    choices = {"block_size_tokens": SIZE, **overrides}
    if budget is not None:
        choices["kv_budget_tokens"] = budget
    return replay(group, resolve_policy(system, choices, CONTEXT), IDENTITY, use_cache=False)


def assert_equal(one: Demand, other: Demand, but: tuple[str, ...] = ()) -> None:
    for name in (*COUNT_FIELDS, *SHARE_FIELDS):
        if name not in but:
            assert np.array_equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("system", SELECTING)
def test_a_budget_beyond_the_context_reads_everything(group: MemoryGroup, system: str) -> None:
    demand = demand_of(group, system, 116)
    assert demand.mean_recall() == demand.mean_recall_upper() == 1
    assert demand.hit_rate() == 1
    assert not demand.fetched.any()


@pytest.mark.parametrize("system", SELECTING)
def test_a_small_budget_reads_less(group: MemoryGroup, system: str) -> None:
    assert 0.1 < demand_of(group, system, 20).mean_recall() < demand_of(group, system, 60).mean_recall() < 1


@pytest.mark.parametrize("predictor", ["previous", "draft", "previous-layer", "random"])
def test_no_predictor_overlaps_more_than_the_oracle(group: MemoryGroup, predictor: str) -> None:
    others = {"predictor": predictor, "residency": "exact"}
    oracle = demand_of(group, "oasiskv-oracle").overlap
    steady = slice(1, NUM_STEPS - 1)
    found = demand_of(group, "oasiskv", **others).overlap
    assert (found[steady] <= oracle[steady]).all()
    assert found[steady].sum() < oracle[steady].sum()


def test_the_layer_before_predicts_all_layers_but_the_first(group: MemoryGroup) -> None:
    demand = demand_of(group, "infinigen")
    assert (demand.overlap[:, 0] == 2).all()
    assert 0.2 < demand.overlap[1:, 1].mean() / 2 < 1
    assert (demand.hit[1:, 0] == 20).all(), "fetched before attention is ready: a hit"
    assert np.array_equal(demand.fetched[1:, 0], demand_of(group, "retrieval").fetched[1:, 0])


def test_freekv_never_correcting_is_prefetch_previous_and_always_is_a_stall(group: MemoryGroup) -> None:
    previous = demand_of(group, "prefetch-previous")
    assert_equal(demand_of(group, "freekv", correction_cosine=-1.0), previous)
    stall = demand_of(group, "prefetch-previous", miss_rule="stall")
    assert_equal(demand_of(group, "freekv", correction_cosine=1.0), stall)
    between = demand_of(group, "freekv", correction_cosine=0.5)
    assert 0 == previous.repaired.sum() < between.repaired.sum() < stall.repaired.sum()
    assert previous.mean_recall() < between.mean_recall() < stall.mean_recall()
    assert 0.0 == previous.corrected_share < between.corrected_share < stall.corrected_share == 1.0


@pytest.mark.parametrize("eviction", ["least-recently-selected", "lowest-score"])
def test_a_cache_reads_what_retrieval_reads_and_fetches_less(group: MemoryGroup, eviction: str) -> None:
    small, large = (demand_of(group, "sparseserve", slack_blocks=n, eviction=eviction) for n in (2, 6))
    exact = demand_of(group, "retrieval", eviction=eviction)
    for demand in (small, large):
        assert np.array_equal(demand.recall[1:], exact.recall[1:])
        assert np.array_equal(demand.fetched, demand.missed)
    assert large.fetched.sum() < small.fetched.sum() < exact.fetched.sum()


def test_a_cache_of_the_whole_context_is_quest(group: MemoryGroup) -> None:
    whole, quest = demand_of(group, "hisparse", slack_blocks=40), demand_of(group, "quest")
    assert_equal(whole, quest)


def test_dense_fallback_lies_between_attend_and_everything(group: MemoryGroup) -> None:
    never, sometimes, always = (
        demand_of(group, "prefetch-previous", miss_rule="dense", dense_below_recall=share) for share in (0.0, 0.95, 1.0)
    )
    assert_equal(never, demand_of(group, "prefetch-previous"))
    assert (always.recall[1:] == 2).all()
    assert 0 < sometimes.repaired.sum() < always.repaired.sum()
    assert (sometimes.recall[1:] / 2 >= 0.95).sum() > (never.recall[1:] / 2 >= 0.95).sum()


def test_shadowkv_ranks_by_mean_keys(group: MemoryGroup) -> None:
    assert_equal(demand_of(group, "shadowkv", selector="minmax"), demand_of(group, "retrieval"))
    assert demand_of(group, "shadowkv").mean_recall() < demand_of(group, "retrieval").mean_recall()


@pytest.mark.parametrize(
    ("system", "array"),
    [
        ("infinigen", "prev_layer"),
        ("shadowkv", "mean"),
        ("freekv", "query_cos"),
        ("snapkv", "prompt_window_mass"),
        ("h2o", "prefill_mass"),
    ],
)
def test_what_a_trace_lacks_is_named_with_the_flag_that_records_it(
    monkeypatch: pytest.MonkeyPatch, system: str, array: str
) -> None:
    full = synthetic_trace().group("short")
    bare = memory_group(
        full.kv_len, {16: {"true": full.ranking("true", 16)}}, {16: full.mass(16).dense()}, name="bare",
        layers={16: full.layers(16)}, model=full.model,
    )  # fmt: skip
    trace = type(synthetic_trace())("bare", synthetic_trace().attrs, {"bare": bare})
    open_as_any(monkeypatch, trace)
    history = {"policy.mass_history": "prompt"} if system == "h2o" else {}
    (point,) = expand({"trace": "bare", "system": system, "workload.output_tokens": 16, **history}, {})
    with pytest.raises(InputError, match=rf"{array}|selector mean") as caught:
        run_point(point, use_cache=False)
    assert f"--with {array}" in str(caught.value)
    assert "\n" not in str(caught.value)


def row(system: str, **settings: Any) -> dict[str, Any]:
    return run_point(synthetic_point(system=system, **settings), use_cache=False)


@pytest.mark.usefixtures("synthetic")
@pytest.mark.parametrize("system", DROPPING)
def test_dropping_systems_move_no_bytes_and_hold_no_host_memory(system: str) -> None:
    result = row(system, workload__output_tokens=64)
    assert result["h2d_bytes_per_token"] == result["d2h_bytes_per_token"] == result["host_bytes_peak"] == 0
    assert result["exposed_transfer_s"] == 0
    assert result["hbm_bytes_peak"] < row("quest", workload__output_tokens=64)["hbm_bytes_peak"]


@pytest.mark.usefixtures("synthetic")
@pytest.mark.parametrize("system", ["vllm-offload", "flexgen"])
def test_streaming_moves_the_whole_kv_every_step_and_is_bound_by_it(system: str) -> None:
    steps, batch = 32, 8
    result = row(system, workload__output_tokens=steps, workload__batch_size=batch, policy__block_size_tokens=32)
    full_blocks = np.array([(4096 + t - 1) // 32 for t in range(1, steps)])  # of the steps after the first
    assert result["h2d_bytes_per_token"] == pytest.approx(full_blocks.mean() * 32 * 147_456, rel=1e-12)
    assert result["recall"] == 1
    assert result["bound"] == "h2d"
    assert result["tpot_mean_s"] >= result["h2d_bytes_per_token"] * batch / 55.1e9 * 0.99
    dense = row("dense", workload__output_tokens=steps, workload__batch_size=batch)
    assert result["hbm_bytes_peak"] < dense["hbm_bytes_peak"]
    assert result["t_attention_s"] == pytest.approx(dense["t_attention_s"], rel=0.05), (
        "the same reads, slowed by copies"
    )
    assert result["host_bytes_peak"] > 0
    assert dense["tpot_mean_s"] < result["tpot_mean_s"]


@pytest.mark.usefixtures("synthetic")
def test_one_copy_a_layer_is_never_slower_than_one_a_block() -> None:
    assert row("flexgen", workload__batch_size=8)["tpot_mean_s"] < row("vllm-offload")["tpot_mean_s"]


@pytest.mark.usefixtures("synthetic")
def test_a_layer_ahead_hides_part_of_what_on_demand_exposes() -> None:
    ahead = row("infinigen", policy__transport="gather", workload__batch_size=8)
    retrieval = row("retrieval", workload__batch_size=8)
    assert ahead["t_exposed_wait_s"] < retrieval["t_exposed_wait_s"]
    assert ahead["t_score_s"] == 0 < retrieval["t_score_s"]
    assert ahead["recall"] < retrieval["recall"]


@pytest.mark.usefixtures("synthetic")
def test_reading_attention_costs_and_positions_do_not() -> None:
    h2o, streaming = (row(name, workload__batch_size=64) for name in ("h2o", "streamingllm"))
    assert h2o["t_score_s"] > 0
    assert h2o["t_plan_s"] > 0
    assert streaming["t_score_s"] == streaming["t_plan_s"] == 0
    assert h2o["t_attention_s"] == streaming["t_attention_s"]


@pytest.mark.usefixtures("synthetic")
def test_freekv_that_never_corrects_takes_as_long_as_prefetch_previous() -> None:
    never = row("freekv", policy__correction_cosine=-1.0, policy__transport="gather")
    assert never["tpot_mean_s"] == row("prefetch-previous")["tpot_mean_s"]
    some = row("freekv", policy__correction_cosine=0.8, policy__transport="gather")
    stall = row("prefetch-previous", policy__miss_rule="stall")
    assert never["t_score_s"] == 0 < some["t_score_s"] < stall["t_score_s"]
    assert never["tpot_mean_s"] < some["tpot_mean_s"] <= stall["tpot_mean_s"]


@pytest.mark.usefixtures("synthetic")
def test_values_alone_are_half_the_bytes_and_keys_cost_hbm() -> None:
    values, both = row("shadowkv"), row("shadowkv", policy__key_rank=None)
    for name in ("h2d_bytes_per_token", "d2h_bytes_per_token", "host_bytes_peak"):
        assert values[name] == both[name] / 2, name
    assert values["hbm_bytes_peak"] > both["hbm_bytes_peak"]
    assert values["t_gather_s"] > both["t_gather_s"] == 0


@pytest.mark.usefixtures("synthetic")
def test_a_cache_costs_hbm_and_saves_the_link() -> None:
    cached, exact = row("sparseserve"), row("retrieval")
    assert cached["hbm_bytes_peak"] > exact["hbm_bytes_peak"]
    assert cached["h2d_bytes_per_token"] < exact["h2d_bytes_per_token"]
    assert cached["t_attention_s"] == exact["t_attention_s"]


@pytest.mark.usefixtures("synthetic")
def test_dense_fallback_pays_for_link_and_attention() -> None:
    attend, dense = (row("prefetch-previous", policy__miss_rule=rule) for rule in ("attend", "dense"))
    for name in ("h2d_bytes_per_token", "t_attention_s", "t_exposed_wait_s", "recall"):
        assert dense[name] > attend[name], name
