"""Triton kernel of top-K per KV head: a partial bitonic sort of keys that hold score and id.

A key holds the leading bits of the score and below them the id's complement: keys are distinct, ties go to the lower
id, and everything fits 31 bits of a register.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _keys(scores, start, n, WIDTH: tl.constexpr, ID_BITS: tl.constexpr):
    """Keys of scores[start : start + WIDTH]; −1 from n on."""
    i = start + tl.arange(0, WIDTH)
    score = tl.load(scores + i, mask=i < n, other=0.0) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    level = (ordered >> (ID_BITS + 1)) + (1 << (30 - ID_BITS))
    return tl.where(i < n, (level << ID_BITS) | ((1 << ID_BITS) - 1 - i), -1)


@triton.jit
def topk_kernel(
    scores, num_blocks, ids, H, stride, counts, blocks_per_head,
    TABLE: tl.constexpr, K: tl.constexpr, NP: tl.constexpr, TP: tl.constexpr, KP: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """One program per (request, KV head). KP: K rounded up to a power of two.

    NP + TP >= the blocks of a row: a power of two >= KP, and KP or more for what lies beyond it, or 0. TABLE: ids
    become entries of a block table over a pool of whole heads, the open block last.
    """
    bh = tl.program_id(0).to(tl.int64)
    n = tl.load(num_blocks + bh // H)
    row = scores + bh * stride
    best = tl.topk(_keys(row, 0, n, NP, ID_BITS), KP)
    if TP > 0:
        # The larger of the best, descending, and of the others, ascending, are the best of both.
        others = tl.flip(tl.topk(_keys(row, NP, n, TP, ID_BITS), KP), 0)
        best = tl.bitonic_merge(tl.maximum(best, others), descending=True)
    block = (1 << ID_BITS) - 1 - (best & ((1 << ID_BITS) - 1))
    want = tl.minimum(n, K)
    j = tl.arange(0, KP)
    if TABLE:
        first = (bh * blocks_per_head).to(tl.int32)
        tl.store(ids + bh * (K + 1) + j, first + block, mask=j < want)
        tl.store(ids + bh * (K + 1) + want, first + n)
        tl.store(counts + bh, want + 1)
    else:
        tl.store(ids + bh * K + j, tl.where(j < want, block, -1), mask=j < K)
