"""Triton kernel of top-K per KV head: search for the K-th largest key two bits at a time, compaction, rank by counting.

A key holds the leading bits of the score and below them the id's complement: keys are distinct, ties go to the lower id
without a pass of their own, and everything fits 32-bit registers.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def topk_blocks_kernel(
    scores,
    num_blocks,
    scratch,
    ids,
    H,
    n_max,
    blocks_per_head,
    counts,
    TABLE: tl.constexpr,
    K: tl.constexpr,
    NP: tl.constexpr,
    KP: tl.constexpr,
    CHUNK: tl.constexpr,
    ID_BITS: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    """One program per (request, KV head). NP, KP: n_max and K rounded up to powers of two; scratch int32 [B*H, KP]."""
    bh = tl.program_id(0).to(tl.int64)
    n = tl.load(num_blocks + bh // H)
    i = tl.arange(0, NP)
    score = tl.load(scores + bh * n_max + i, mask=i < n_max, other=0.0) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    level = (ordered >> (32 - KEY_BITS + ID_BITS)) + (1 << (KEY_BITS - ID_BITS - 1))
    key = tl.where(i < n, (level << ID_BITS) | ((1 << ID_BITS) - 1 - i), -1)
    want = tl.minimum(n, K)
    threshold = tl.zeros((), dtype=tl.int32)
    for step in range(KEY_BITS // 2):
        unit = tl.full((), 1, tl.int32) << (KEY_BITS - 2 - 2 * step)
        low = tl.sum((key >= threshold + unit).to(tl.int32), axis=0)
        mid = tl.sum((key >= threshold + 2 * unit).to(tl.int32), axis=0)
        high = tl.sum((key >= threshold + 3 * unit).to(tl.int32), axis=0)
        reached = (low >= want).to(tl.int32) + (mid >= want).to(tl.int32) + (high >= want).to(tl.int32)
        threshold += reached * unit
    taken = (key >= threshold) & (i < n)
    position = tl.cumsum(taken.to(tl.int32), axis=0) - 1
    tl.store(scratch + bh * KP + position, key, mask=taken)
    tl.debug_barrier()
    j = tl.arange(0, KP)
    mine = tl.load(scratch + bh * KP + j, mask=j < want, other=-1)
    rank = tl.zeros((KP,), dtype=tl.int32)
    for start in range(0, KP, CHUNK):
        o = start + tl.arange(0, CHUNK)
        other = tl.load(scratch + bh * KP + o, mask=o < want, other=-1)
        rank += tl.sum((other[:, None] > mine[None, :]).to(tl.int32), axis=0)
    block = (1 << ID_BITS) - 1 - (mine & ((1 << ID_BITS) - 1))
    if TABLE:
        first = (bh * blocks_per_head).to(tl.int32)
        tl.store(ids + bh * (K + 1) + rank, first + block, mask=j < want)
        tl.store(ids + bh * (K + 1) + want, first + n)
        tl.store(counts + bh, want + 1)
    else:
        tl.store(ids + bh * K + rank, block, mask=j < want)
        tl.store(ids + bh * K + j, tl.full((KP,), -1, tl.int32), mask=(j >= want) & (j < K))
