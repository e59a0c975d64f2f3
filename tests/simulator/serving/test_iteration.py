"""The compiled iteration plays the same seconds as the plain one, whatever is in the batch."""

from __future__ import annotations

import numpy as np
import pytest

from simulator import catalog
from simulator.engine_rates import RatesByBatch
from simulator.mapping import resolve_mapping
from simulator.parallel import rank_mappings, shard
from simulator.replay import replay_by_gpu
from simulator.serving import iteration as iterations
from simulator.serving.decode_batch import DecodeBatch
from simulator.serving.demand_table import DemandTable, Group
from simulator.serving.iteration import Iteration
from simulator.serving.iteration_reference import Decoding, ReferenceRun
from simulator.serving.kernel_times import Setting
from simulator.serving.request_state import RequestState
from simulator.serving.work import Batch, Chunk
from simulator.specs.experiment import EngineSpec, MappingSpec, PlacementSpec
from simulator.step_kernel import run_steps
from simulator.step_layout import NUM_STEP_COLUMNS, new_state
from simulator.step_work import rules_of
from simulator.systems import resolve_policy
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
}


def setting(system: str, model: str = "Qwen3-8B", tensor_parallel: int = 1) -> Setting:
    name, overrides = SYSTEMS[system]
    policy = resolve_policy(name, overrides, 4096)
    part = shard(catalog.load_model(model), tensor_parallel)
    return Setting(part, H100, policy, PlacementSpec(), EngineSpec(software_overhead_s=1e-4))


def demand_table(where: Setting) -> DemandTable:
    if where.policy.selector == "all":
        return DemandTable((), where.model.num_full_attention_layers, 0)
    groups = []
    for name in ("short", "long"):
        group = synthetic_trace().group(name)
        mapping = resolve_mapping(catalog.load_model(where.model.name), group, 16, MappingSpec())
        demands = replay_by_gpu(group, where.policy, rank_mappings(mapping, where.model.tensor_parallel))
        groups.append(Group(name, int(group.kv_len[0]), demands))
    return DemandTable(groups, where.model.num_full_attention_layers, 7)


def play_both(where: Setting, num_iterations: int, share: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each iteration: requests of many lengths join, decode and leave; prompts come in chunks."""
    demand, rng = demand_table(where), np.random.default_rng(3)
    batch = DecodeBatch(64, 16, demand)
    rates = RatesByBatch(H100, where.policy.transport, where.policy.gather_ctas)
    fast, plain = Iteration(where, batch, rates), ReferenceRun(where)
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
        fast_s.append(fast.run(Batch(len(batch), chunks), Share(share, 1.0)))
        batch.advance()
        for chunk in chunks:
            done += chunk.tokens
            if chunk.is_last:
                prompt.generated_tokens = 1
                rows[prompt.index] = demand.first_row(prompt)
                batch.join(prompt, 0)
                joined[prompt.index] = t + 1
                prompt = None
    work, rules = plain.work(), rules_of(where.model, where.policy)
    state, steps_s = new_state(rules.num_layers, rules.lookahead_k + 3), np.zeros((num_iterations, NUM_STEP_COLUMNS))
    run_steps(
        num_iterations, *rules.flags, share, 1.0, work.durations_s, work.attention_s, work.scatter_s, work.selects,
        work.first_s, work.prefetch_s, work.write_s, work.waits_for_slots, work.remote_first_s,
        work.remote_prefetch_s, state.counts, state.clock, state.planned_at_s, rates.at(1), steps_s,
    )  # fmt: skip
    return np.array(fast_s), steps_s[:, 13]


@pytest.mark.parametrize("system", SYSTEMS)
def test_compiled_iterations_equal_the_plain_ones(system):
    # More than twice the window, so that it moves with transfers on their way.
    fast_s, plain_s = play_both(setting(system), 2 * iterations.WINDOW_ROWS + 40, share=0.7)
    np.testing.assert_allclose(fast_s, plain_s, rtol=1e-9, atol=1e-12)
    assert len(set(np.round(plain_s, 9))) > 50


@pytest.mark.parametrize("system", ["dense", "oasiskv", "prefetch-stall"])
def test_the_slowest_gpu_of_a_replica_counts(system):
    where = setting(system, tensor_parallel=4)
    assert len(demand_table(where).gpus_alike) == (1 if system == "dense" else 3)
    fast_s, plain_s = play_both(where, 120)
    np.testing.assert_allclose(fast_s, plain_s, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("system", ["dense", "oasiskv"])
def test_sliding_window_layers_are_priced_apart(system):
    fast_s, plain_s = play_both(setting(system, "gpt-oss-20b"), 60)
    np.testing.assert_allclose(fast_s, plain_s, rtol=1e-9, atol=1e-12)
