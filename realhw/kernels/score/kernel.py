"""Triton kernel of min/max block scoring.

With max >= min per channel, max(q*min, q*max) is q*max for q >= 0 and q*min otherwise, so that the bound is one dot
product of [min(q, 0) | max(q, 0)] with the stored row [min | max]: tensor cores do it at the speed of memory.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def score_blocks_kernel(
    query,
    metadata,
    num_blocks,
    scores,
    query_stride,
    H,
    n_max,
    score_stride,
    G: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
):
    """Grid (B*H, ceil(n_max / (BLOCK_N*TILES))); each program scores TILES tiles of BLOCK_N blocks."""
    bh = tl.program_id(0).to(tl.int64)
    b = bh // H
    h = bh % H
    n = tl.load(num_blocks + b)
    rows = tl.arange(0, ROWS)
    c = tl.arange(0, 2 * D)
    q_ptr = query + b * query_stride + (h * G + rows[:, None]) * D + (c % D)[None, :]
    q = tl.load(q_ptr, mask=(rows < G)[:, None], other=0.0).to(tl.float32)
    q = tl.where((c < D)[None, :], tl.minimum(q, 0.0), tl.maximum(q, 0.0)).to(metadata.dtype.element_ty)
    first = tl.program_id(1) * (BLOCK_N * TILES)
    for tile in range(TILES):
        block = first + tile * BLOCK_N + tl.arange(0, BLOCK_N)
        m = tl.load(
            metadata + (bh * n_max + block[:, None]) * (2 * D) + c[None, :], mask=(block < n)[:, None], other=0.0
        )
        s = tl.dot(q, tl.trans(m), input_precision="ieee")
        s = tl.max(tl.where((rows < G)[:, None], s, float("-inf")), axis=0)
        s = tl.where(block < n, s, float("-inf"))
        tl.store(scores + bh * score_stride + block, s, mask=block < n_max)
