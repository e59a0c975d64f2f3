"""Triton kernel of the write-back: SMs write new KV into pinned host memory."""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["layer", "num_requests"])
def write_back_kernel(
    pool,
    host,
    kv_len,
    layer,
    num_requests,
    L,
    H,
    host_blocks,
    slots_per_head,
    WORDS: tl.constexpr,
    WP: tl.constexpr,
    P: tl.constexpr,
    PER_TOKEN: tl.constexpr,
):
    """One program per (request, KV head). WORDS: int32 words of a block; [K | V], P rows each."""
    bh = tl.program_id(0).to(tl.int64)
    b = bh // H
    last = tl.load(kv_len + b) - 1
    offset = last % P
    source = ((bh + 1) * slots_per_head - 1) * WORDS
    target = ((((b % num_requests) * L + layer) * H + bh % H) * host_blocks + last // P) * WORDS
    w = tl.arange(0, WP)
    if PER_TOKEN:
        row = w // (WORDS // (2 * P)) % P
        words = tl.load(pool + source + w, mask=(w < WORDS) & (row == offset), other=0)
        tl.store(host + target + w, words, mask=(w < WORDS) & (row == offset))
    else:
        num_words = tl.where(offset == P - 1, WORDS, 0)
        words = tl.load(pool + source + w, mask=w < num_words, other=0)
        tl.store(host + target + w, words, mask=w < num_words)
