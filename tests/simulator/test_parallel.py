"""Tensor parallelism: what splits, what is replicated, closed forms of cost and pools, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import simpy

from simulator import catalog, cost
from simulator import step_layout as at
from simulator.capacity import footprint
from simulator.demand import COUNT_FIELDS
from simulator.engine_rates import engine_rates
from simulator.experiment import resolve
from simulator.parallel import rank_mappings, shard
from simulator.points import demands_by_gpu, run_point, run_works
from simulator.policy_composition import resolve_policy
from simulator.replay import replay
from simulator.specs.experiment import EngineSpec
from simulator.step_reference import StepReference
from simulator.timeline import play
from simulator.topology import HostTopology
from tests.simulator.synthetic_trace import synthetic_point
from traces.errors import InputError

H100 = catalog.load_hardware("h100-sxm")
QWEN = catalog.load_model("Qwen3-8B")
MOE = catalog.load_model("Qwen3-30B-A3B")
MLA = catalog.load_model("DeepSeek-V3")


pytestmark = pytest.mark.usefixtures("synthetic")


def run(**settings):
    return run_point(synthetic_point(**settings), use_cache=False)


# What one GPU has


@pytest.mark.parametrize("tensor_parallel", [2, 4, 8])
def test_a_dense_model_is_divided_but_for_padding(tensor_parallel):
    part = shard(QWEN, tensor_parallel)
    assert part.qkv_bytes * tensor_parallel == QWEN.qkv_bytes
    assert part.o_bytes * tensor_parallel == QWEN.o_bytes
    assert part.ffn_bytes * tensor_parallel == QWEN.ffn_bytes
    assert part.weight_bytes * tensor_parallel == QWEN.weight_bytes
    assert part.kv_bytes_per_token() * tensor_parallel == QWEN.kv_bytes_per_token()
    assert part.metadata_bytes(100) * tensor_parallel == QWEN.metadata_bytes(100)
    assert part.num_logits == QWEN.vocab


def test_fewer_kv_heads_than_gpus_are_replicated():
    part = shard(MOE, 8)  # 4 KV heads
    assert part.num_kv_heads == 1
    assert 8 * part.kv_bytes_per_token() == 2 * MOE.kv_bytes_per_token()


def test_experts_are_divided_and_the_router_is_not():
    part = shard(MOE, 4)
    assert 4 * part.expert_bytes == MOE.expert_bytes
    assert part.router_params == MOE.router_params
    assert part.moe is not None
    assert MOE.moe is not None
    assert part.moe.num_experts == MOE.moe.num_experts


def test_mla_divides_heads_and_replicates_the_latent():
    part, m = shard(MLA, 8), MLA.mla
    assert m is not None
    assert m.q_lora_rank is not None
    assert part.kv_bytes_per_token() == MLA.kv_bytes_per_token()
    replicated = MLA.hidden * (m.q_lora_rank + m.kv_lora_rank + m.qk_rope_head_dim)
    assert 8 * (part.qkv_params - replicated) == MLA.qkv_params - replicated
    assert 8 * part.o_params == MLA.o_params


def test_columns_that_do_not_divide_are_padded():
    whole = QWEN.model_copy(update={"vocab": 10, "intermediate": 7})
    part = shard(whole, 4)
    assert (part.vocab, part.intermediate, part.num_logits) == (3, 2, 12)


def test_a_shard_is_not_split_again():
    with pytest.raises(ValueError, match="shards already"):
        shard(shard(QWEN, 2), 2)


# Cost


def test_allreduce_follows_its_two_closed_forms():
    t0, rate = H100.nvlink.allreduce_t0_s.value, H100.nvlink.bytes_per_s.value
    assert cost.allreduce_s(H100, 1e6, 1) == 0
    assert cost.allreduce_s(H100, 65536, 8) == pytest.approx(t0 + 7 * 65536 / rate)
    assert cost.allreduce_s(H100, 1e8, 8) == pytest.approx(2 * t0 + 2 * 7 / 8 * 1e8 / rate)
    sizes = np.geomspace(1e3, 1e9, 200)
    assert np.all(np.diff([cost.allreduce_s(H100, size, 4) for size in sizes]) > 0)


def plain_roofline():
    """The H100 without start-up times and tables: time is bytes or operations alone."""
    kernels = H100.kernels.model_copy(
        update={"table": None}
        | {
            name: getattr(H100.kernels, name).model_copy(update={"value": 0.0})
            for name in ("gemm_t0_s", "attention_t0_s", "score_t0_s", "topk_t0_s", "plan_t0_s")
        }
    )
    return H100.model_copy(update={"kernels": kernels})


def test_two_gpus_halve_what_splits_and_add_the_allreduces():
    hardware, half = plain_roofline(), shard(QWEN, 2)
    policy = resolve_policy("oasiskv", {}, 32768)
    assert cost.attention_s(hardware, half, 8, 2048, 2, 2) == pytest.approx(
        cost.attention_s(hardware, QWEN, 8, 2048, 2, 2) / 2
    )
    for kernel in (cost.score_s, cost.topk_s):
        assert kernel(hardware, half, policy, 8, 2048) == pytest.approx(kernel(hardware, QWEN, policy, 8, 2048) / 2)
    # A product's weights halve; of its input (qkv) or output (o, down) rows not all do.
    assert cost.qkv_s(hardware, half, 1) == pytest.approx(cost.qkv_s(hardware, QWEN, 1) / 2, rel=1e-3)
    assert cost.o_ffn_s(hardware, half, 1) == pytest.approx(cost.o_ffn_s(hardware, QWEN, 1) / 2, rel=1e-3)
    assert cost.lm_head_s(hardware, half, 1) == pytest.approx(cost.lm_head_s(hardware, QWEN, 1) / 2, rel=1e-3)
    compute_s = cost.prefill_s(hardware, QWEN, 8192) / 2
    allreduces_s = 2 * QWEN.num_layers * cost.allreduce_s(hardware, 2 * 8192 * QWEN.hidden, 2)
    assert cost.prefill_s(hardware, half, 8192) == pytest.approx(compute_s + allreduces_s)


def test_the_step_pays_two_allreduces_a_layer_and_its_own_collectives():
    row = run(system="dense", workload__batch_size=8, placement__tensor_parallel=4)
    rows_bytes, logits_bytes = 2 * 8 * QWEN.hidden, 2 * 8 * QWEN.vocab
    expected = 73 * cost.allreduce_s(H100, rows_bytes, 4) + cost.allgather_s(H100, logits_bytes, 4)
    assert row["t_allreduce_s"] == pytest.approx(expected)
    assert run(system="dense", workload__batch_size=8)["t_allreduce_s"] == 0


# Pools


@pytest.mark.parametrize("system", ["dense", "oasiskv"])
def test_pools_are_one_gpus(system):
    policy = resolve_policy(system, {}, 32768)
    whole = footprint(QWEN, H100, policy, EngineSpec(), 32768, 1)
    part = footprint(shard(QWEN, 4), H100, policy, EngineSpec(), 32768, 4)
    logits = 4 * QWEN.vocab
    assert 4 * (part.hbm_per_request_bytes - logits) == whole.hbm_per_request_bytes - logits
    assert 4 * part.host_per_request_bytes == whole.host_per_request_bytes
    assert 4 * part.host_available_bytes == whole.host_available_bytes
    assert part.max_batch_size > 4 * whole.max_batch_size  # the weights leave more room on each


# Demand


@pytest.mark.parametrize("tensor_parallel", [2, 8])
def test_the_gpus_of_a_replica_ask_for_what_the_model_asks_for(tensor_parallel):
    point = resolve(synthetic_point(policy__fetch_cap=0.1, placement__tensor_parallel=tensor_parallel))
    whole = replay(point.group, point.policy, point.mapping, 0, use_cache=False)
    parts = demands_by_gpu(point)
    assert len(parts) == tensor_parallel
    for name in COUNT_FIELDS:
        assert np.array_equal(sum(getattr(part, name) for part in parts), getattr(whole, name))
    assert sum(part.recall for part in parts) == pytest.approx(whole.recall)
    assert sum(part.admission_blocks for part in parts) == whole.admission_blocks


def test_ranks_hold_heads_in_order_and_share_those_they_cannot_split():
    mapping = resolve(synthetic_point()).mapping  # 8 heads
    assert [list(part.head_of) for part in rank_mappings(mapping, 2)] == [
        list(mapping.head_of[:4]),
        list(mapping.head_of[4:]),
    ]
    shared = rank_mappings(mapping, 16)
    assert [int(part.head_of[0]) for part in shared] == np.repeat(mapping.head_of, 2).tolist()


# Points


def test_bytes_per_token_do_not_depend_on_how_the_heads_are_split():
    one, four = (run(policy__fetch_cap=0.1, placement__tensor_parallel=n) for n in (1, 4))
    for name in ("h2d_bytes_per_token", "d2h_bytes_per_token", "kv_bytes_read_per_token", "admission_bytes"):
        assert four[name] == pytest.approx(one[name], rel=1e-12)
    for name in ("recall", "hit_rate", "churn", "overlap"):
        assert four[name] == pytest.approx(one[name], rel=1e-12)
    assert one["host_bytes_peak"] == four["host_bytes_peak"]


def test_null_gpus_are_one_replica_and_throughput_is_of_all():
    one = run(placement__tensor_parallel=2, policy__fetch_cap=0.02)
    assert one["placement.num_gpus"] == 2
    two = run(placement__tensor_parallel=2, placement__num_gpus=4, policy__fetch_cap=0.02)
    assert two["throughput_tokens_per_s"] == pytest.approx(2 * one["throughput_tokens_per_s"], rel=0.01)
    assert two["throughput_per_gpu_tokens_per_s"] == pytest.approx(two["throughput_tokens_per_s"] / 4)


def test_a_large_model_fits_where_its_shards_do():
    assert run(model="Llama-3.1-70B", system="dense", workload__batch_size=4)["status"] == "does_not_fit"
    row = run(model="Llama-3.1-70B", system="dense", workload__batch_size=4, placement__tensor_parallel=4)
    assert row["status"] == "ok"
    assert row["t_allreduce_s"] > 0


@pytest.mark.parametrize("system", ["dense", "quest", "retrieval", "oasiskv"])
def test_no_point_beats_a_ceiling(system):
    row = run(system=system, placement__tensor_parallel=4, policy__fetch_cap=1.0)
    for name in ("hbm", "compute", "h2d"):
        ceiling = row[f"{name}_ceiling_tokens_per_s"]
        assert ceiling is None or row["throughput_tokens_per_s"] <= ceiling * (1 + 1e-9)


# Lockstep


class Barrier:
    """Fires for everybody when all GPUs of the replica have arrived."""

    def __init__(self, env: simpy.Environment, size: int) -> None:
        self.env, self.size, self.arrived, self.all_here = env, size, 0, env.event()

    def arrive(self) -> simpy.Event:
        self.arrived += 1
        event = self.all_here
        if self.arrived == self.size:
            self.arrived, self.all_here = 0, self.env.event()
            event.succeed()
        return event


class LockstepReference(StepReference):
    """One GPU of a replica, every layer of which ends when all of them are there."""

    barrier: Barrier

    def _phase(self, t, layer, phase, work_s):
        if phase == at.ALLREDUCE:
            yield self.barrier.arrive()
        yield from super()._phase(t, layer, phase, work_s)


@pytest.mark.parametrize(
    ("system", "batch_size", "fetch_cap"),
    [("oasiskv", 32, 0.2), ("oasiskv", 96, 1.0), ("retrieval", 16, 1.0)],
)
def test_one_step_stands_for_gpus_that_wait_for_each_other(system, batch_size, fetch_cap):
    point = resolve(
        synthetic_point(
            system=system,
            policy__fetch_cap=fetch_cap,
            workload__batch_size=batch_size,
            workload__output_tokens=8,
            placement__tensor_parallel=4,
        )
    )
    demands = demands_by_gpu(point)
    rates = engine_rates(point.hardware, point.policy.transport, point.policy.gather_ctas, batch_size)
    env = simpy.Environment()
    barrier = Barrier(env, 4)
    gpus = []
    for demand in demands:
        (alone,) = run_works(point, (demand,) * 4)
        gpus.append(LockstepReference(alone.rules, alone.work, rates, env=env))
        gpus[-1].barrier = barrier
    env.run(until=env.all_of([gpu.start() for gpu in gpus]))
    exact = np.mean([gpu.step_s[2:].mean() for gpu in gpus])
    topology = HostTopology(point.hardware, 4, point.spec.placement)
    ours = play(run_works(point, demands), rates, topology).step_s[0, 2:].mean()
    assert ours == pytest.approx(exact, rel=0.005)


# Refused


@pytest.mark.parametrize(
    ("tensor_parallel", "num_gpus", "hardware", "message"),
    [
        (3, None, "h100-sxm", "does not divide the 32 query and 8 KV heads of Qwen3-8B; nearest are 2 and 4"),
        (2, 3, "h100-sxm", "no multiple of placement.tensor_parallel 2; nearest: 2 and 4"),
        (4, 2, "h100-sxm", "no multiple of placement.tensor_parallel 4; nearest: 4"),
        (16, None, "h100-sxm", "exceeds the 8 GPUs of a h100-sxm NVLink domain"),
        (2, None, "l40s", "exceeds the 1 GPUs of a l40s NVLink domain .no NVLink."),
        (8, 16, "h100-sxm", "num_gpus 16 exceeds the 8 GPUs"),
    ],
)
def test_impossible_splits_are_refused(tensor_parallel, num_gpus, hardware, message):
    placement = {"placement__tensor_parallel": tensor_parallel, "placement__num_gpus": num_gpus}
    with pytest.raises(InputError, match=message):
        resolve(synthetic_point(hardware=hardware, **placement))
