"""Micro-benchmarks of single kernels and memory, each in a graph of its own kind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from realhw.geometry import GEOMETRIES, ModelGeometry
from realhw.graph_timer import Timing, summarise, time_launches
from realhw.kernels.activation.api import silu_multiply
from realhw.kernels.gather.api import gather_blocks
from realhw.kernels.gather.config import GatherConfig
from realhw.kernels.pool.api import append_token
from realhw.measurement import Recorder
from realhw.workbench import (
    Work,
    attention_work,
    plan_reset_work,
    plan_work,
    score_work,
    topk_work,
    weight_sets,
)

QWEN = GEOMETRIES["Qwen3-8B"]
SWITCHES = (
    ("gemm", "attention"),
    ("gemm", "activation"),
    ("gemm", "append"),
    ("score", "topk"),
    ("attention", "append"),
)
SWITCHED, SWITCH_ROUNDS = 96, 7
"""Launches of each kind in a graph, and how often the graphs take turns."""
GEMM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
ATTENTION_BATCHES = (1, 4, 8, 16, 32, 64)
WORKING_SETS = (256, 528, 1040, 2064, 4112, 8208)
"""Tokens of working sets with draft rows: K blocks and the open one."""
CONTEXTS = (528, 2064, 4112, 8208, 16400, 33024)
"""Tokens read by one row: working sets and whole contexts."""
SCORED_BLOCKS = (96, 250, 260, 1020, 1030, 2040, 2060)
"""On both sides of the powers of two, where top-K pads: a context of 2^n tokens and what it generates lies above."""
SMALL_BATCHES = (1, 8, 32, 64)
"""Of the smaller head dimension, up to the positions of its model."""
PLANNED_SLOTS = ((16, 16), (32, 32), (32, 36), (128, 128), (128, 135), (256, 256), (256, 270))
"""(K, slots): exact and with slack, whose padding costs."""
TARGET_S = 1e-3
"""Work captured in one graph: long against the clock's tick, short for the calibration."""


def measure(work: Work, target_s: float = TARGET_S, repetitions: int = 9) -> Timing:
    """Time a work in a graph of at least `target_s` and at least one turn over its buffers."""
    estimate = time_launches(work.launches, len(work.launches), 2).median_s
    calls = max(len(work.launches), min(400, int(target_s / max(estimate, 1e-7))))
    return time_launches(work.launches, calls, repetitions)


def add(recorder: Recorder, kind: str, work: Work, timing: Timing, **params: Any) -> float:
    """Record a timing; returns its median."""
    recorder.add(kind, timing.median_s, timing.spread_s, timing.repetitions, work.num_bytes, **params)
    return timing.median_s


def bench_memory(recorder: Recorder) -> None:
    """Streaming read, and copy by a kernel (bytes read + written)."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    total = torch.empty((), device="cuda")

    def copy() -> None:
        torch.mul(source, 1.5, out=target)

    def read() -> None:
        torch.sum(source, dim=0, out=total)

    size = source.numel() * 4
    for kind, launch, num_bytes in (("hbm_copy", copy, 2 * size), ("hbm_read", read, size)):
        work = Work([launch], num_bytes)
        add(recorder, kind, work, time_launches([launch], 4, 9))


def bench_gemm(recorder: Recorder, geometries: tuple[ModelGeometry, ...]) -> None:
    """Every matrix product of the geometries over decode batch sizes, and one large one."""
    shapes = {
        (n, k)
        for g in geometries
        for k, n in (*g.layer_weight_shapes().values(), (g.hidden_size, g.vocab_size), *draft_head_shapes(g))
    }
    for n, k in sorted(shapes):
        weights = weight_sets(n, k)
        for m in GEMM_ROWS:
            work = weights.product(m)
            add(recorder, "gemm", work, measure(work, repetitions=5), m=m, n=n, k=k)
    large = weight_sets(8192, 8192)
    work = large.product(8192)
    add(recorder, "gemm", work, time_launches(work.launches[:2], 8, 7), m=8192, n=8192, k=8192)


def draft_head_shapes(g: ModelGeometry) -> list[tuple[int, int]]:
    """(input, output) features of an EAGLE-3 head's products beside those that a layer has too.

    Source: EAGLE-3 (arXiv 2503.01840): three hidden states are fused, attention takes embedding and hidden state; its
    released heads have a draft vocabulary of 32,000.
    """
    return [
        (3 * g.hidden_size, g.hidden_size),
        (2 * g.hidden_size, g.qkv_size),
        (g.hidden_size, min(g.vocab_size, 32000)),
    ]


def bench_attention(recorder: Recorder, geometry: ModelGeometry) -> None:
    """Working sets with two rows, and long dense KV with one."""
    _bench_attention(recorder, geometry, ATTENTION_BATCHES, WORKING_SETS, CONTEXTS)


def _bench_attention(
    recorder: Recorder, g: ModelGeometry, batches: Sequence[int], sets: Sequence[int], contexts: Sequence[int]
) -> None:
    for batch, rows in itertools.product(batches, (2, 1)):
        for tokens in sets if rows == 2 else contexts:
            work = attention_work(g, batch, tokens, rows)
            timing = measure(work, repetitions=9 if rows == 2 else 5)
            add(recorder, "attention", work, timing, batch=batch, tokens=tokens, rows=rows, **_heads(g))


def _heads(g: ModelGeometry) -> dict[str, int]:
    return {"kv_heads": g.num_kv_heads, "head_dim": g.head_dim}


def bench_small_heads(recorder: Recorder, geometry: ModelGeometry) -> None:
    """Attention and scoring of a model with a smaller head dimension."""
    _bench_attention(recorder, geometry, SMALL_BATCHES, WORKING_SETS[:3], CONTEXTS[:4])
    for batch, blocks in itertools.product(SMALL_BATCHES, SCORED_BLOCKS[:4]):
        work = score_work(geometry, batch, blocks)
        add(recorder, "score", work, measure(work), batch=batch, blocks=blocks, **_heads(geometry))


def bench_selection(recorder: Recorder, geometry: ModelGeometry) -> None:
    """Scoring, top-K and plan over batch and context."""
    for batch in (1, 8, 16, 32, 64):
        for blocks in SCORED_BLOCKS:
            work = score_work(geometry, batch, blocks)
            add(recorder, "score", work, measure(work), batch=batch, blocks=blocks, **_heads(geometry))
            k = 1 << ((blocks // 8).bit_length() - 1)
            work = topk_work(geometry, batch, blocks, k)
            timing = measure(work)
            scores = batch * geometry.num_kv_heads * blocks
            add(recorder, "topk", work, timing, batch=batch, blocks=blocks, k=k, scores=scores)
        for k, slots in PLANNED_SLOTS:
            reset = plan_reset_work(geometry, batch, slots)
            reset_s = measure(reset).median_s
            work = plan_work(geometry, batch, 8 * k, k, max(1, k // 20), slots)
            timing = measure(work)
            net = Timing(timing.median_s - reset_s, timing.spread_s, timing.repetitions)
            add(recorder, "plan", work, net, batch=batch, k=k, slots=slots)


def bench_switches(recorder: Recorder, geometry: ModelGeometry, batch: int = 32) -> None:
    """What a launch costs more after another kernel than after itself: graphs of two kinds in turn, against each alone.

    The difference is halved, since in such a graph both kinds follow the other.
    """
    k, n = geometry.layer_weight_shapes()["o"]
    works = {
        "gemm": weight_sets(n, k).product(2 * batch),
        "attention": attention_work(geometry, batch, 2048, 2),
        "score": score_work(geometry, batch, 1024),
        "topk": topk_work(geometry, batch, 1024, 128),
        "append": append_work(geometry, batch),
        "activation": activation_work(geometry, 2 * batch),
    }
    for first, second in SWITCHES:
        pair = zip(itertools.cycle(works[first].launches), itertools.cycle(works[second].launches), strict=False)
        turns = list(itertools.chain.from_iterable(itertools.islice(pair, SWITCHED)))
        alone = [list(itertools.islice(itertools.cycle(works[name].launches), SWITCHED)) for name in (first, second)]
        extra_s = []
        for _ in range(SWITCH_ROUNDS):  # clocks move by more than a switch costs: each round has all three
            one_s, both_s, other_s = (
                time_launches(launches, len(launches), 3).median_s for launches in (alone[0], turns, alone[1])
            )
            extra_s.append(both_s - (one_s + other_s) / 2)
        timing = summarise(extra_s)
        recorder.add("switch", timing.median_s, timing.spread_s, timing.repetitions, first=first, second=second)


def bench_small(recorder: Recorder, geometry: ModelGeometry) -> None:
    """Kernels that are mostly their launch: an empty one, activation, append, sampling; and the scatter of blocks."""
    nothing = torch.zeros(1, device="cuda")

    def empty() -> None:
        nothing.fill_(0.0)

    add(recorder, "launch", Work([empty], 4), time_launches([empty], 400, 9))
    for rows in (2, 32, 64, 128):
        work = activation_work(geometry, rows)
        add(recorder, "activation", work, time_launches(work.launches, 200, 9), rows=rows)
    for batch in (1, 16, 64):
        work = append_work(geometry, batch)
        add(recorder, "append", work, time_launches(work.launches, 200, 9), batch=batch)
        logits = [torch.randn(batch, geometry.vocab_size, device="cuda").bfloat16() for _ in range(4)]
        token = torch.empty(batch, dtype=torch.int64, device="cuda")
        launches = [_argmax(x, token) for x in logits]
        work = Work(launches, 2 * batch * geometry.vocab_size)
        add(recorder, "sampling", work, measure(work), batch=batch, logits=batch * geometry.vocab_size)
    _bench_scatter(recorder)


def _argmax(logits: torch.Tensor, token: torch.Tensor) -> Callable[[], None]:
    def launch() -> None:
        torch.argmax(logits, dim=-1, out=token)

    return launch


def activation_work(g: ModelGeometry, rows: int) -> Work:
    """Gated activation of `rows` rows."""
    gate_up = torch.randn(rows, 2 * g.ffn_size, device="cuda").bfloat16()
    out = torch.empty(rows, g.ffn_size, device="cuda", dtype=torch.bfloat16)
    return Work([lambda: silu_multiply(gate_up, out)], 6 * rows * g.ffn_size)


def append_work(g: ModelGeometry, batch: int) -> Work:
    """One new token of each request into its open block and compressed keys."""
    qkv = torch.randn(batch, g.qkv_size, device="cuda").bfloat16()
    keys = qkv[:, g.num_q_heads * g.head_dim :].reshape(batch, 2, g.num_kv_heads, g.head_dim)
    pool = torch.zeros(batch * g.num_kv_heads * 2, 2, 16, g.head_dim, device="cuda", dtype=torch.bfloat16)
    fill_slot = torch.full((batch, g.num_kv_heads), -1, dtype=torch.int32, device="cuda")
    metadata = torch.zeros(batch, g.num_kv_heads, 64, 2, g.head_dim, device="cuda", dtype=torch.bfloat16)
    kv_len = torch.full((batch,), 100, dtype=torch.int32, device="cuda")

    def append() -> None:
        append_token(keys[:, 0], keys[:, 1], pool, metadata, kv_len, 2, fill_slot)

    return Work([append], batch * g.num_kv_heads * g.head_dim * 12)


def _bench_scatter(recorder: Recorder) -> None:
    """Packed blocks in HBM to random slots: bytes written."""
    blocks = 1 << 14
    staging = torch.randn(1, 1, 1, blocks, 2, 16, 128, device="cuda", dtype=torch.bfloat16)
    pool = torch.empty(1 << 16, 2, 16, 128, device="cuda", dtype=torch.bfloat16)
    entries = torch.zeros(blocks, 3, dtype=torch.int32, device="cuda")
    entries[:, 1] = torch.randperm(blocks, device="cuda")
    entries[:, 2] = torch.randperm(pool.shape[0] - 1, device="cuda")[:blocks]
    count = torch.tensor([blocks], dtype=torch.int32, device="cuda")

    def scatter() -> None:
        gather_blocks(staging, pool, entries, count, 0, pool.shape[0], GatherConfig(528, 0, 4))

    work = Work([scatter], blocks * 8192)
    add(recorder, "scatter", work, time_launches([scatter], 16, 9))
