"""Triton kernel of top-K per KV head: search for the K-th best score, place what beats it, sort those K.

A key holds the leading bits of the score and below them the id's complement: keys are distinct, ties go to the lower
id, and everything fits 31 bits of a register.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _levels(scores, start, n, WIDTH: tl.constexpr, ID_BITS: tl.constexpr):
    """Leading bits of scores[start : start + WIDTH] as numbers >= 0 of the same order; −1 from n on."""
    i = start + tl.arange(0, WIDTH)
    score = tl.load(scores + i, mask=i < n, other=0.0) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(i < n, (ordered >> (ID_BITS + 1)) + (1 << (30 - ID_BITS)), -1)


@triton.jit
def _place(level, threshold, before, num_better, want, start, keys, WIDTH: tl.constexpr, ID_BITS: tl.constexpr):
    """Keys of what is taken of one tile, by ascending id; returns its packed counts (better | equal << 16)."""
    better = level > threshold
    equal = (level == threshold) & (level >= 0)
    packed = better.to(tl.int32) + (equal.to(tl.int32) << 16)
    seen = tl.cumsum(packed, axis=0) + before
    num_equal = seen >> 16
    wanted_equal = want - num_better
    taken = better | (equal & (num_equal <= wanted_equal))
    at = (seen & 0xFFFF) + tl.minimum(num_equal, wanted_equal) - 1
    i = start + tl.arange(0, WIDTH)
    tl.store(keys + at, (level << ID_BITS) | ((1 << ID_BITS) - 1 - i), mask=taken)
    return tl.sum(packed, axis=0)


@triton.jit
def topk_kernel(
    scores, num_blocks, ids, H, stride, counts, blocks_per_head,
    TABLE: tl.constexpr, K: tl.constexpr, NP: tl.constexpr, TP: tl.constexpr, KP: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """One program per (request, KV head). NP + TP >= the blocks of a row; KP: K rounded up to a power of two.

    TABLE: ids become entries of a block table over a pool of whole heads, the open block last. The row of ids holds the
    keys until they are sorted.
    """
    bh = tl.program_id(0).to(tl.int64)
    n = tl.load(num_blocks + bh // H)
    row = scores + bh * stride
    out = ids + bh * (K + 1 if TABLE else K)
    main = _levels(row, 0, n, NP, ID_BITS)
    if TP > 0:
        tail = _levels(row, NP, n, TP, ID_BITS)
    want = tl.minimum(n, K)
    threshold = tl.zeros((), dtype=tl.int32)
    for step in range(31 - ID_BITS):
        least = threshold + (tl.full((), 1, tl.int32) << (30 - ID_BITS - step))
        # (x - y) >> 31 is −1 where x < y: fewer instructions than a comparison and a sum.
        count = NP + TP + tl.sum((main - least) >> 31, axis=0)
        if TP > 0:
            count += tl.sum((tail - least) >> 31, axis=0)
        threshold = tl.where(count >= want, least, threshold)
    num_better = tl.sum((main > threshold).to(tl.int32), axis=0)
    if TP > 0:
        num_better += tl.sum((tail > threshold).to(tl.int32), axis=0)
    placed = _place(main, threshold, 0, num_better, want, 0, out, NP, ID_BITS)
    if TP > 0:
        _place(tail, threshold, placed, num_better, want, NP, out, TP, ID_BITS)
    tl.debug_barrier()
    j = tl.arange(0, KP)
    keys = tl.load(out + j, mask=j < want, other=-1)
    tl.debug_barrier()  # ids overwrite keys that another thread may still have to load
    best = tl.sort(keys, descending=True)
    block = (1 << ID_BITS) - 1 - (best & ((1 << ID_BITS) - 1))
    if TABLE:
        first = (bh * blocks_per_head).to(tl.int32)
        tl.store(out + j, first + block, mask=j < want)
        tl.store(out + want, first + n)
        tl.store(counts + bh, want + 1)
    else:
        tl.store(out + j, tl.where(j < want, block, -1), mask=j < K)
