"""Inputs for timing the harness kernels at a geometry: random, larger than the L2, one launch per buffer set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from realhw.geometry import ModelGeometry
from realhw.graph_timer import Launch
from realhw.kernels.attention.api import AttentionConfig, attention_scratch, choose_splits, decode_attention
from realhw.kernels.gather.api import gather_blocks
from realhw.kernels.gather.config import GatherConfig
from realhw.kernels.plan.api import PlanShape, admit, make_moves, make_slots, plan_scratch, plan_step
from realhw.kernels.pool.api import pool_blocks
from realhw.kernels.score.api import ScoreConfig, make_scores, score_blocks
from realhw.kernels.topk.api import topk_blocks
from realhw.kernels.writeback.api import write_back

ROTATION_BYTES = 8 << 30
"""Bytes that a launch sequence walks through before it repeats: many times the L2, and as scattered as a model."""

WALK_BYTES = 1 << 29
"""Host memory that gathers walk through before they repeat: more than a server CPU caches."""

BENCH_HEADS = 16
"""Heads of two requests that benchmarked gathers read from: a kernel that finds one of each skips its arithmetic."""

SMALL_SETS = 96
"""Sets of inputs that are about a megabyte each: together more than the L2."""


@dataclass(frozen=True, slots=True)
class Work:
    """Launches over distinct buffers and the bytes that one of them must move."""

    launches: list[Launch]
    num_bytes: int


def num_sets(num_bytes: int, hbm_bytes: int | None = None) -> int:
    """Buffer sets that exceed `ROTATION_BYTES` together, or a sixteenth of a small GPU's memory: 1 to 256.

    Two at least, so that none is found in the cache, unless two would not leave room for anything else.
    """
    have = hbm_bytes or torch.cuda.get_device_properties(0).total_memory
    rotation = min(ROTATION_BYTES, have // 16)
    return max(2 if 2 * num_bytes < have // 2 else 1, min(256, -(-rotation // num_bytes)))


@dataclass(frozen=True, slots=True)
class WeightSets:
    """Weights of one product, several copies, stored [n, k] as a linear layer's are."""

    weights: list[torch.Tensor]

    def product(self, m: int) -> Work:
        """[m, k] x [k, n] in bf16."""
        n, k = self.weights[0].shape
        x = torch.randn(m, k, device="cuda").bfloat16()
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

        def launch(weight: torch.Tensor) -> Launch:
            return lambda: _discard(torch.mm(x, weight.t(), out=out))

        return Work([launch(weight) for weight in self.weights], 2 * (n * k + m * (n + k)))


def weight_sets(n: int, k: int) -> WeightSets:
    """Random weights, enough copies to walk through `ROTATION_BYTES`."""
    copies = num_sets(2 * n * k)
    return WeightSets([torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)])


def _discard(_: torch.Tensor) -> None:
    return None


def attention_work(
    geometry: ModelGeometry, batch_size: int, kv_tokens: int, rows: int, block_size: int = 16,
    config: AttentionConfig | None = None,
) -> Work:  # fmt: skip
    """Decode attention of one layer over `kv_tokens` tokens per KV head, blocks in random order."""
    heads, head_dim = geometry.num_kv_heads, geometry.head_dim
    blocks = -(-kv_tokens // block_size)
    config = config or AttentionConfig()
    num_bytes = batch_size * heads * kv_tokens * 4 * head_dim
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    splits = config.splits or choose_splits(batch_size * heads, kv_tokens, config.block_n, sms, rows)
    query = torch.randn(batch_size, rows, geometry.num_q_heads, head_dim, device="cuda").bfloat16()
    out = torch.empty_like(query)
    counts = torch.full((batch_size, heads), blocks, dtype=torch.int32, device="cuda")
    last = torch.full((batch_size,), kv_tokens - (blocks - 1) * block_size, dtype=torch.int32, device="cuda")
    scratch = attention_scratch(batch_size, heads, head_dim, splits, "cuda")

    def launch() -> Launch:
        pool = torch.randn(batch_size * heads * blocks, 2, block_size, head_dim, device="cuda", dtype=torch.bfloat16)
        order = torch.rand(batch_size, heads, blocks, device="cuda").argsort(-1)
        base = torch.arange(batch_size * heads, device="cuda").view(batch_size, heads, 1) * blocks
        table = (order + base).int()
        return lambda: decode_attention(query, pool, table, counts, last, out, scratch, splits, config)

    return Work([launch() for _ in range(num_sets(num_bytes))], num_bytes)


def score_work(geometry: ModelGeometry, batch_size: int, num_blocks: int, config: ScoreConfig | None = None) -> Work:
    """Min/max scores of one layer's compressed keys."""
    heads, head_dim = geometry.num_kv_heads, geometry.head_dim
    config = config or ScoreConfig()
    query = torch.randn(batch_size, geometry.num_q_heads, head_dim, device="cuda").bfloat16()
    counts = torch.full((batch_size,), num_blocks, dtype=torch.int32, device="cuda")
    scores = make_scores(batch_size, heads, num_blocks, "cuda")
    num_bytes = batch_size * heads * num_blocks * 4 * head_dim

    def launch() -> Launch:
        shape = (batch_size, heads, num_blocks, 2, head_dim)
        metadata = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        low, high = metadata.amin(3), metadata.amax(3)
        metadata[:, :, :, 0], metadata[:, :, :, 1] = low, high
        return lambda: score_blocks(query, metadata, counts, scores, config)

    return Work([launch() for _ in range(num_sets(num_bytes))], num_bytes)


def topk_work(geometry: ModelGeometry, batch_size: int, num_blocks: int, k: int, num_warps: int = 0) -> Work:
    """Top-K of one layer's scores."""
    heads = geometry.num_kv_heads
    counts = torch.full((batch_size,), num_blocks, dtype=torch.int32, device="cuda")
    ids = torch.empty(batch_size, heads, k, dtype=torch.int32, device="cuda")

    def launch() -> Launch:
        scores = make_scores(batch_size, heads, num_blocks, "cuda").normal_()
        return lambda: topk_blocks(scores, counts, ids, num_warps)

    return Work([launch() for _ in range(SMALL_SETS)], batch_size * heads * (4 * num_blocks + 4 * k))


def plan_work(
    geometry: ModelGeometry, batch_size: int, num_blocks: int, k: int, cap: int, num_slots: int = 0, num_warps: int = 0
) -> Work:
    """Lookahead plans of one layer, each against slots that miss about `cap` of K blocks."""
    heads = geometry.num_kv_heads
    num_slots = num_slots or k
    shape = PlanShape(k, num_slots, 16, num_blocks, 256)
    scratch = plan_scratch(batch_size, heads, shape, "cuda")
    table = torch.empty(batch_size, heads, num_slots + 1, dtype=torch.int32, device="cuda")
    counts, fill_slot = torch.empty(2, batch_size, heads, dtype=torch.int32, device="cuda")
    allowed = torch.full((256,), cap, dtype=torch.int32, device="cuda")
    clock = torch.ones(1, dtype=torch.int32, device="cuda")
    rows = torch.arange(batch_size, dtype=torch.int32, device="cuda") - 2
    kv_start = torch.full((batch_size,), num_blocks * 16 - 8, dtype=torch.int32, device="cuda")

    def launch() -> Launch:
        slots = make_slots(batch_size, heads, shape, "cuda")
        order = torch.rand(batch_size, heads, num_blocks - 1, device="cuda").argsort(-1).int()
        admit(slots, order[:, :, :k])
        rankings = order[:, :, cap : k + cap].contiguous().view(batch_size, 1, heads, k)
        moves = make_moves(batch_size * heads, shape, "cuda")
        saved = slots.clone()

        def run() -> None:
            slots.copy_(saved)
            moves.counts.zero_()
            plan_step(
                shape, slots, rankings, rows, allowed, clock, kv_start, table, counts, fill_slot, moves, scratch,
                offset=0, layer=0, lookahead_k=1, num_steps=256, num_warps=num_warps,
            )  # fmt: skip

        return run

    return Work([launch() for _ in range(SMALL_SETS)], batch_size * heads * (4 * 4 * k + 4 * k))


def plan_reset_work(geometry: ModelGeometry, batch_size: int, k: int) -> Work:
    """What `plan_work` does beside the plan: restoring the slots and the counters."""
    slots = torch.zeros(batch_size, geometry.num_kv_heads, 4, k, dtype=torch.int32, device="cuda")
    saved = slots.clone()
    counts = torch.zeros(2, dtype=torch.int32, device="cuda")

    def run() -> None:
        slots.copy_(saved)
        counts.zero_()

    return Work([run], slots.numel() * 8)


def pool_work(geometry: ModelGeometry, num_blocks: int) -> Work:
    """Min and max of the keys of whole blocks, as after a prefill."""
    full = torch.full((num_blocks,), 16, dtype=torch.int32, device="cuda")
    out = torch.empty(num_blocks, 2, geometry.head_dim, device="cuda", dtype=torch.bfloat16)
    num_bytes = num_blocks * (16 + 2) * geometry.head_dim * 2

    def launch() -> Launch:
        kv = torch.randn(num_blocks, 2, 16, geometry.head_dim, device="cuda", dtype=torch.bfloat16)
        return lambda: pool_blocks(kv, full, out)

    return Work([launch() for _ in range(num_sets(2 * num_bytes))], num_bytes)


class GatherBench:
    """Pinned host blocks and an HBM pool that a gather or a copy engine moves between."""

    def __init__(self, host_bytes: int, block_size: int = 16, head_dim: int = 128) -> None:
        self.block_bytes = 4 * block_size * head_dim
        self.num_host_blocks = host_bytes // self.block_bytes
        self.host = torch.empty(
            1, 1, 1, self.num_host_blocks, 2, block_size, head_dim, dtype=torch.bfloat16, pin_memory=True
        )
        self.host.view(torch.int32).random_(0, 1 << 30)
        self.pool = torch.empty(1 << 16, 2, block_size, head_dim, dtype=torch.bfloat16, device="cuda")

    def gather(self, num_blocks: int, config: GatherConfig) -> Work:
        """Gather of `num_blocks` random blocks per launch; launches take other blocks until `WALK_BYTES` are read."""
        count = torch.tensor([num_blocks], dtype=torch.int32, device="cuda")
        walked = min(self.num_host_blocks, WALK_BYTES // self.block_bytes)
        num_lists = max(1, min(256, walked // max(1, num_blocks)))

        per_head, slots = self.num_host_blocks // BENCH_HEADS, self.pool.shape[0] // BENCH_HEADS
        host = self.host.view(-1)[: BENCH_HEADS * per_head * self.host[0, 0, 0, 0].numel()]
        host = host.view(2, 1, BENCH_HEADS // 2, per_head, *self.host.shape[4:])
        order = torch.randperm(BENCH_HEADS * per_head, device="cuda", dtype=torch.int32)

        def launch(i: int) -> Launch:
            entries = torch.zeros(num_blocks, 3, dtype=torch.int32, device="cuda")
            blocks = order[i * num_blocks : (i + 1) * num_blocks]
            entries[:, 0], entries[:, 1] = blocks // per_head, blocks % per_head
            entries[:, 2] = torch.randperm(slots, device="cuda")[torch.arange(num_blocks, device="cuda") % slots].int()
            return lambda: gather_blocks(host, self.pool, entries, count, 0, slots, config)

        return Work([launch(i) for i in range(num_lists)], num_blocks * self.block_bytes)

    def copy_h2d(self, num_bytes: int) -> Work:
        """One contiguous copy per launch, walking through the host buffer."""
        return self._copies(num_bytes, lambda host, pool: pool.copy_(host, non_blocking=True))

    def copy_d2h(self, num_bytes: int) -> Work:
        """The same towards the host."""
        return self._copies(num_bytes, lambda host, pool: host.copy_(pool, non_blocking=True))

    def _copies(self, num_bytes: int, copy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Work:
        host = self.host.view(-1).view(torch.uint8)
        pool = self.pool.view(-1).view(torch.uint8)
        lanes = max(1, min(512, host.numel() // num_bytes))

        def launch(i: int) -> Launch:
            source = host[i * num_bytes : (i + 1) * num_bytes]
            at = (i * num_bytes) % max(1, pool.numel() - num_bytes + 1) // 256 * 256
            target = pool[at : at + num_bytes]
            return lambda: _discard(copy(source, target))

        return Work([launch(i) for i in range(lanes)], num_bytes)


def write_back_work(link: GatherBench, geometry: ModelGeometry, batch_size: int, per_token: bool) -> Work:
    """Every request's newest token to the host, or the block that it fills; each launch elsewhere in host memory."""
    heads, block_size = geometry.num_kv_heads, link.host.shape[5]
    per_head = link.num_host_blocks // (batch_size * heads)
    host = link.host[0, 0, 0, : batch_size * heads * per_head]
    host = host.view(batch_size, 1, heads, per_head, 2, block_size, geometry.head_dim)

    def launch(block: int) -> Launch:
        kv_len = torch.full((batch_size,), (block + 1) * block_size, dtype=torch.int32, device="cuda")
        return lambda: write_back(link.pool, host, kv_len, 0, link.pool.shape[0] // (batch_size * heads), per_token)

    moved = batch_size * heads * link.block_bytes // (block_size if per_token else 1)
    return Work([launch(i * per_head // 32) for i in range(min(32, per_head))], moved)
