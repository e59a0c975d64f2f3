"""Triton kernel of the zero-copy gather: SMs read pinned host memory through its device address."""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["layer", "capacity"])
def gather_blocks_kernel(
    host,
    pool,
    entries,
    count,
    layer,
    L,
    host_blocks,
    slots_per_head,
    capacity,
    REQUESTS: tl.constexpr,
    H: tl.constexpr,
    WORDS: tl.constexpr,
    WP: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Persistent grid: each program takes every n-th group of UNROLL entries. WORDS: int32 words of a block.

    All loads of a group are issued before its first store: UNROLL * block bytes in flight per program. Entries of the
    next group are on their way before this group's blocks, the first ones (of `capacity` that may be read) before the
    count: what a plan wrote a step ago is no longer in the L2. REQUESTS (that the host memory holds) and H are
    constants because every thread divides by them, for every entry of its group.
    """
    w = tl.arange(0, WP)
    e = tl.program_id(0) * UNROLL + tl.arange(0, UNROLL)
    bh = tl.load(entries + e * 3, mask=e < capacity, other=0)
    block = tl.load(entries + e * 3 + 1, mask=e < capacity, other=0)
    slot = tl.load(entries + e * 3 + 2, mask=e < capacity, other=0)
    total = tl.load(count)
    for _ in tl.range(tl.program_id(0), tl.cdiv(total, UNROLL), tl.num_programs(0), num_stages=1):
        copied = (e < total)[:, None] & (w < WORDS)[None, :]
        e += tl.num_programs(0) * UNROLL
        next_bh = tl.load(entries + e * 3, mask=e < total, other=0)
        next_block = tl.load(entries + e * 3 + 1, mask=e < total, other=0)
        next_slot = tl.load(entries + e * 3 + 2, mask=e < total, other=0)
        head = (((bh // H) % REQUESTS) * L + layer) * H + bh % H
        source = head.to(tl.int64) * host_blocks + block
        target = bh.to(tl.int64) * slots_per_head + slot
        words = tl.load(host + source[:, None] * WORDS + w[None, :], mask=copied, other=0)
        tl.store(pool + target[:, None] * WORDS + w[None, :], words, mask=copied)
        bh, block, slot = next_bh, next_block, next_slot
