"""Triton kernel of top-K per KV head: bitwise search for the K-th largest key, compaction, rank by counting."""
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
    K: tl.constexpr,
    NP: tl.constexpr,
    KP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program per (request, KV head). NP, KP: n_max and K rounded up to powers of two; scratch int64 [B*H, KP].

    Scores become unsigned keys of the same order; the search fixes the threshold's bits from the top, each with one
    count. Ties at the threshold go to the lowest ids, by a prefix sum.
    """
    bh = tl.program_id(0).to(tl.int64)
    n = tl.load(num_blocks + bh // H)
    i = tl.arange(0, NP)
    score = tl.load(scores + bh * n_max + i, mask=i < n, other=0.0) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000001
    key = tl.where(i < n, key, 0)
    want = tl.minimum(n, K)
    threshold = tl.zeros((), dtype=tl.int64)
    for step in range(33):
        trial = threshold | (tl.full((), 1, tl.int64) << (32 - step))
        count = tl.sum((key >= trial).to(tl.int32), axis=0)
        threshold = tl.where(count >= want, trial, threshold)
    above = key > threshold
    equal = (key == threshold) & (i < n)
    spare = want - tl.sum(above.to(tl.int32), axis=0)
    taken = above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= spare))
    position = tl.cumsum(taken.to(tl.int32), axis=0) - 1
    tl.store(scratch + bh * KP + position, (key << 20) | (0xFFFFF - i), mask=taken)
    tl.debug_barrier()
    j = tl.arange(0, KP)
    mine = tl.load(scratch + bh * KP + j, mask=j < want, other=0)
    rank = tl.zeros((KP,), dtype=tl.int32)
    for start in range(0, KP, CHUNK):
        o = start + tl.arange(0, CHUNK)
        other = tl.load(scratch + bh * KP + o, mask=o < want, other=0)
        rank += tl.sum((other[None, :] > mine[:, None]).to(tl.int32), axis=1)
    block = (0xFFFFF - (mine & 0xFFFFF)).to(tl.int32)
    tl.store(ids + bh * K + rank, block, mask=j < want)
    tl.store(ids + bh * K + j, tl.full((KP,), -1, tl.int32), mask=(j >= want) & (j < K))
