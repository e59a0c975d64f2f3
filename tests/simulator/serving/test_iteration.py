"""The compiled iteration plays the same seconds as the plain one, whatever is in the batch."""

from __future__ import annotations

import numpy as np
import pytest

from simulator import catalog
from simulator.engine_rates import RatesByBatch
from simulator.fetch_path import fetch_path
from simulator.mapping import resolve_mapping
from simulator.parallel import rank_mappings, shard
from simulator.policy_composition import resolve_policy
from simulator.replay import replay_by_gpu
from simulator.serving.decode_batch import DecodeBatch
from simulator.serving.demand_table import DemandTable, Group
from simulator.serving.iteration import Iteration
from simulator.serving.iteration_reference import Decoding, ReferenceRun
from simulator.serving.kernel_times import Setting
from simulator.serving.left_behind import LeftBehind, keeps_all_fetched, pull_path
from simulator.serving.pools import request_pools
from simulator.serving.request_state import RequestState
from simulator.serving.window import WINDOW_ROWS
from simulator.serving.work import Batch, Chunk
from simulator.specs.experiment import IN_HOST_MEMORY, EngineSpec, MappingSpec, PlacementSpec, WorkloadSpec
from simulator.step_kernel import run_step
from simulator.step_layout import NUM_STEP_COLUMNS, new_state
from simulator.step_work import build_run_work
from simulator.topology import Share
from tests.simulator.synthetic_trace import synthetic_trace

H100 = catalog.load_hardware("h100-sxm")
BUDGET = {"kv_budget_tokens": 512}
SYSTEMS = {
    "dense": ("dense", {}),
    "quest": ("quest", BUDGET),
    "streamingllm": ("streamingllm", BUDGET),
    "retrieval": ("retrieval", BUDGET),
    "retrieval-per-block": ("retrieval", {**BUDGET, "transport": "ce-per-block"}),
    "oasiskv": ("oasiskv", BUDGET),
    "oasiskv-batched-tokens": ("oasiskv", {**BUDGET, "transport": "ce-batched", "write_back": "token"}),
    "oasiskv-refine": (
        "oasiskv",
        {**BUDGET, "transport": "ce-contiguous", "lookahead_k": 3, "lookahead_mode": "refine", "fetch_cap": 0.3},
    ),
    "prefetch-stall": ("prefetch-previous", {**BUDGET, "miss_rule": "stall", "transport": "ce-contiguous"}),
    "vllm-offload": ("vllm-offload", {}),
    "flexgen": ("flexgen", {}),
    "infinigen": ("infinigen", BUDGET),
    "shadowkv": ("shadowkv", {**BUDGET, "transport": "ce-batched", "write_back": "token"}),
    "freekv": ("freekv", {**BUDGET, "correction_cosine": 0.8}),
    "dense-fallback": ("retrieval", {**BUDGET, "miss_rule": "dense", "fetch_cap": 0.5, "dense_below_recall": 0.97}),
    "much-slack": ("oasiskv", {**BUDGET, "slack_blocks": 300}),
}
BEYOND = {
    "remote": {"kv_tier": "remote"},
    "remote-direct-far": {"kv_tier": "remote", "remote_path": "direct", "nic_numa": "far"},
    "nvme": {"kv_tier": "nvme"},
    "nvme-direct": {"kv_tier": "nvme", "remote_path": "direct"},
    "nvme-of": {"kv_tier": "nvme-of"},
}


def setting(
    system: str, model: str = "Qwen3-8B", tensor_parallel: int = 1, placement: PlacementSpec = IN_HOST_MEMORY,
    **overrides: object,
) -> Setting:  # fmt: skip
    name, choices = SYSTEMS[system]
    policy = resolve_policy(name, {**choices, **overrides}, 4096, placement)
    part = shard(catalog.load_model(model), tensor_parallel)
    return Setting(part, H100, policy, placement, EngineSpec(software_overhead_s=1e-4))


def demand_table(where: Setting, names: tuple[str, ...] = ("short", "long")) -> DemandTable:
    if where.policy.selector == "all":
        return DemandTable((), where.model.num_full_attention_layers, 0)
    groups = []
    for name in names:
        group = synthetic_trace().group(name)
        mapping = resolve_mapping(catalog.load_model(where.model.name), group, 16, MappingSpec())
        demands = replay_by_gpu(group, where.policy, rank_mappings(mapping, where.model.tensor_parallel))
        groups.append(Group(name, int(group.kv_len[0]), demands))
    return DemandTable(groups, where.model.num_full_attention_layers, 7)


def play_both(
    where: Setting, num_iterations: int, share: float = 1.0, remote_share: float = 1.0
) -> tuple[np.ndarray, np.ndarray, Iteration]:
    """Seconds of each iteration, compiled and plain: requests of many lengths join, decode and leave beside prompts."""
    demand, rng = demand_table(where), np.random.default_rng(3)
    batch = DecodeBatch(64, 16, demand)
    rates = RatesByBatch(H100, where.policy.transport, where.policy.gather_ctas)
    fast, plain = Iteration(where, batch, rates), ReferenceRun(where, demand.corrected_share)
    fast_s, rows, joined, prompt, done = [], {}, {}, None, 0
    for t in range(num_iterations):
        if prompt is None and rng.random() < 0.3:
            prompt = RequestState(t, 0.0, int(rng.integers(100, 6000)), int(rng.integers(2, 40)))
            done = 0
        chunks = ()
        if prompt is not None:
            chunks = (Chunk(prompt, min(1000, prompt.prompt_tokens - done), done),)
        decoding = []
        for request in batch.requests:
            at, start, stop = rows[request.index]
            group = int(np.searchsorted(demand.starts, start, side="right")) - 1
            used = demand.groups[group].demands if demand.groups else ()
            step = t - joined[request.index]
            row = used[0].steady_start + (at - start + step) % (stop - start) if used else 0
            decoding.append(Decoding(request.prompt_tokens + 1 + step, used, row))
        plain.add(decoding, [(c.tokens, c.before) for c in chunks], sum(c.is_last for c in chunks))
        fast_s.append(fast.run(Batch(len(batch), chunks), Share(share, remote_share)))
        batch.advance()
        for chunk in chunks:
            done += chunk.tokens
            if chunk.is_last:
                prompt.generated_tokens = 1
                rows[prompt.index] = demand.first_row(prompt)
                batch.join(prompt, 0)
                joined[prompt.index] = t + 1
                prompt = None
    return np.array(fast_s), play_plain(plain, rates, num_iterations, share, remote_share), fast


def play_plain(
    plain: ReferenceRun, rates: RatesByBatch, num_iterations: int, share: float = 1.0, remote_share: float = 1.0
) -> np.ndarray:
    """Seconds of each iteration."""
    work, rules = plain.work(), plain.path.rules
    state, steps_s = new_state(rules.num_layers, rules.lookahead_k + 3), np.zeros((num_iterations, NUM_STEP_COLUMNS))
    for t in range(num_iterations):
        run_step(
            t, *rules.flags, share, remote_share, work.durations_s, work.attention_s, work.scatter_s, work.selects,
            work.first_s, work.prefetch_s[: t + 1], work.write_s, work.waits_for_slots, work.remote_first_s,
            work.remote_prefetch_s, state.counts, state.clock, state.planned_at_s, rates.at(1), steps_s,
        )  # fmt: skip
    return steps_s[:, 13]


@pytest.mark.parametrize("system", SYSTEMS)
def test_compiled_iterations_equal_the_plain_ones(system):
    # More than twice the window, so that it moves with transfers on their way.
    fast_s, plain_s, _ = play_both(setting(system), 2 * WINDOW_ROWS + 40, share=0.7)
    np.testing.assert_allclose(fast_s, plain_s, rtol=1e-9, atol=1e-12)
    assert len(set(np.round(plain_s, 9))) > 50


@pytest.mark.parametrize("tier", BEYOND)
@pytest.mark.parametrize(
    "system", ["oasiskv", "oasiskv-refine", "prefetch-stall", "retrieval", "infinigen", "shadowkv"]
)
def test_compiled_iterations_equal_the_plain_ones_beyond_the_host(system, tier):
    where = setting(system, placement=PlacementSpec(**BEYOND[tier]))
    fast_s, plain_s, fast = play_both(where, WINDOW_ROWS + 30, share=0.7, remote_share=0.6)
    np.testing.assert_allclose(fast_s, plain_s, rtol=1e-9, atol=1e-12)
    assert fast.remote_read_bytes > 0 < fast.remote_write_bytes
    assert (fast.h2d_bytes == 0) == (where.placement.remote_path == "direct")


@pytest.mark.parametrize("system", ["oasiskv", "oasiskv-refine", "prefetch-stall"])
def test_what_the_host_keeps_of_a_remote_kv_does_not_cross_the_network(system):
    seconds, read_bytes = {}, {}
    for kept in ("none", "fetched", "full"):
        where = setting(system, placement=PlacementSpec(kv_tier="remote"), host_residency=kept)
        fast_s, plain_s, fast = play_both(where, WINDOW_ROWS + 30, remote_share=0.1)
        np.testing.assert_allclose(fast_s, plain_s, rtol=1e-9, atol=1e-12)
        seconds[kept] = fast_s.sum()
        read_bytes[kept] = fast.remote_read_bytes
    assert read_bytes["none"] > read_bytes["fetched"] > read_bytes["full"] == 0
    assert seconds["none"] > 1.02 * seconds["fetched"] > 1.02 * seconds["full"]


@pytest.mark.parametrize(
    ("system", "tensor_parallel"),
    # Several GPUs with drafts due at once tie, and the last digit of a sum decides whose prefetches count.
    [("oasiskv", 1), ("oasiskv", 4), ("oasiskv-refine", 1), ("prefetch-stall", 4), ("retrieval", 1), ("retrieval", 4)],
)
def test_first_fetches_come_from_the_prefill_side(system, tensor_parallel):
    """Compiled against plain iterations of one request that pulls; on demand it waits for what it has not yet."""
    where = setting(system, tensor_parallel=tensor_parallel)
    seconds = {}
    for pulls in (True, False):
        group = synthetic_trace().group("long")
        mapping = resolve_mapping(catalog.load_model(where.model.name), group, 16, MappingSpec())
        policy = keeps_all_fetched(where.policy, int(group.kv_len[-1]))
        mappings = rank_mappings(mapping, tensor_parallel)
        demands = replay_by_gpu(group, policy, mappings, host_keeps_new=True)
        demand = DemandTable([Group("long", int(group.kv_len[0]), demands)], 36, 7, pulls=True)
        own = fetch_path(where.model, H100, where.policy, where.placement, demand.corrected_share)
        path = pull_path(own, H100, tensor_parallel)
        left = LeftBehind(np.zeros(200, np.int64), np.full(200, 10**9), np.zeros((1, 1), np.int64))
        batch = DecodeBatch(4, 16, demand, left)
        left_blocks = 10**9 if pulls else 0
        request = RequestState(0, 0.0, 2500, 99, generated_tokens=1, prefilled_tokens=2500, left_blocks=left_blocks)
        batch.join(request, 0)
        rates = RatesByBatch(H100, where.policy.transport, where.policy.gather_ctas)
        fast = Iteration(where, batch, rates, path)
        plain = ReferenceRun(where, demand.corrected_share, path)
        fast_s, steps = [], demands[0].steady_stop - demands[0].steady_start
        for step in range(steps):
            plain.add([Decoding(2501 + step, demands, demands[0].steady_start + step)], [], 0)
            fast_s.append(fast.run(Batch(1, ()), Share()))
            batch.advance()
        seconds[pulls] = np.array(fast_s)
        new = sum((d.remote_fetched + d.remote_repaired)[d.steady_start : d.steady_stop].sum() for d in demands)
        assert fast.remote_read_bytes == (new * path.block_bytes if pulls else 0)
        assert fast.remote_write_bytes == 0
        if pulls:
            assert 0 < new < sum((d.fetched + d.repaired)[d.steady_start : d.steady_stop].sum() for d in demands)
            expected_s = play_plain(plain, rates, steps)
            np.testing.assert_allclose(seconds[True], expected_s, rtol=1e-9, atol=1e-12)
    if system == "retrieval":
        assert seconds[True].sum() > 1.02 * seconds[False].sum()


@pytest.mark.parametrize("system", ["dense", "oasiskv", "prefetch-stall"])
def test_the_slowest_gpu_of_a_replica_counts(system):
    where = setting(system, tensor_parallel=4)
    assert len(demand_table(where).gpus_alike) == (1 if system == "dense" else 3)
    fast_s, plain_s, _ = play_both(where, 120)
    np.testing.assert_allclose(fast_s, plain_s, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("system", ["dense", "oasiskv"])
def test_sliding_window_layers_are_priced_apart(system):
    fast_s, plain_s, _ = play_both(setting(system, "gpt-oss-20b"), 60)
    np.testing.assert_allclose(fast_s, plain_s, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("system", [name for name in SYSTEMS if "refine" not in name])
def test_a_decode_iteration_takes_the_kernels_of_a_closed_step(system):
    """Requests of one length: the same rows, blocks and slots, so the same seconds of every kernel."""
    where, batch_size, context = setting(system), 3, 2048
    demand = demand_table(where, ("short",))
    batch = DecodeBatch(8, 16, demand)
    for index in range(batch_size):
        batch.join(RequestState(index, 0.0, context - 1, 9, generated_tokens=1), 0)
    served = Iteration(where, batch, RatesByBatch(H100, where.policy.transport, where.policy.gather_ctas))
    served.run(Batch(batch_size), Share())
    demands = demand.groups[0].demands if demand.groups else ()
    workload = WorkloadSpec(batch_size=batch_size, output_tokens=4)
    closed = build_run_work(
        where.model, H100, where.policy, workload, where.placement, where.engine, context, demands, np.zeros(3, int)
    )
    np.testing.assert_allclose(served.window.durations_s[0], closed.work.durations_s[0], rtol=1e-12)
    assert served.rules == closed.rules


def test_slots_that_no_context_fills_cost_neither_memory_nor_time():
    """K + slack of a request that is shorter: what is there is planned for and held."""
    some, many = (setting("oasiskv", slack_blocks=slack) for slack in (300, 60_000))
    seconds = [play_both(where, 30)[0] for where in (some, many)]
    np.testing.assert_array_equal(*seconds)
    held = [request_pools(where.model, where.policy, 4096).decode for where in (some, many)]
    np.testing.assert_array_equal(*held)
    assert seconds[0].sum() > play_both(setting("oasiskv", slack_blocks=4), 30)[0].sum()
