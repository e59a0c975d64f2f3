"""Triton kernel of the zero-copy gather: SMs read pinned host memory through its device address."""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["layer", "num_requests"])
def gather_blocks_kernel(
    host,
    pool,
    entries,
    count,
    layer,
    num_requests,
    L,
    H,
    host_blocks,
    slots_per_head,
    WORDS: tl.constexpr,
    WP: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Persistent grid: each program takes every n-th group of UNROLL entries. WORDS: int32 words of a block.

    All loads of a group are issued before its first store: UNROLL * block bytes in flight per program.
    """
    total = tl.load(count)
    w = tl.arange(0, WP)
    for group in tl.range(tl.program_id(0), tl.cdiv(total, UNROLL), tl.num_programs(0), num_stages=1):
        e = group * UNROLL + tl.arange(0, UNROLL)
        ok = e < total
        bh = tl.load(entries + e * 3, mask=ok, other=0).to(tl.int64)
        block = tl.load(entries + e * 3 + 1, mask=ok, other=0).to(tl.int64)
        slot = tl.load(entries + e * 3 + 2, mask=ok, other=0).to(tl.int64)
        source = (((bh // H % num_requests) * L + layer) * H + bh % H) * host_blocks + block
        target = bh * slots_per_head + slot
        copied = ok[:, None] & (w < WORDS)[None, :]
        words = tl.load(host + source[:, None] * WORDS + w[None, :], mask=copied, other=0)
        tl.store(pool + target[:, None] * WORDS + w[None, :], words, mask=copied)
