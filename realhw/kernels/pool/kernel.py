"""Triton kernels of key min/max pooling."""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pool_blocks_kernel(kv, num_tokens, out, num_blocks, P: tl.constexpr, D: tl.constexpr, PP: tl.constexpr):
    """One program per block. PP: P rounded up to a power of two."""
    i = tl.program_id(0).to(tl.int64)
    n = tl.load(num_tokens + i)
    p = tl.arange(0, PP)
    d = tl.arange(0, D)
    ok = ((p < n) & (p < P))[:, None]
    keys = tl.load(kv + i * (2 * P * D) + p[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
    low = tl.min(tl.where(ok, keys, float("inf")), axis=0)
    high = tl.max(tl.where(ok, keys, float("-inf")), axis=0)
    tl.store(out + i * (2 * D) + d, low.to(out.dtype.element_ty))
    tl.store(out + i * (2 * D) + D + d, high.to(out.dtype.element_ty))


@triton.jit
def append_token_kernel(
    key,
    value,
    pool,
    metadata,
    kv_len,
    fill_slot,
    key_stride,
    value_stride,
    H,
    n_max,
    slots_per_head,
    WHOLE: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    PP: tl.constexpr,
):
    """One program per (request, KV head). WHOLE: the pool holds every block at its id, else the open block last."""
    bh = tl.program_id(0).to(tl.int64)
    b = bh // H
    h = bh % H
    d = tl.arange(0, D)
    last = tl.load(kv_len + b) - 1
    block = last // P
    offset = last % P
    first_slot = bh * slots_per_head
    if WHOLE:
        slot = first_slot + block
    else:
        slot = first_slot + slots_per_head - 1
        target = tl.load(fill_slot + bh)
        if (offset == 0) & (target >= 0):
            p = tl.arange(0, PP)
            cell = p[:, None] * D + d[None, :]
            inside = (p < P)[:, None] & (d >= 0)[None, :]
            full = pool + slot * (2 * P * D) + cell
            copy = pool + (first_slot + target) * (2 * P * D) + cell
            keys = tl.load(full, mask=inside, other=0.0)
            values = tl.load(full + P * D, mask=inside, other=0.0)
            tl.store(copy, keys, mask=inside)
            tl.store(copy + P * D, values, mask=inside)
            tl.debug_barrier()
    k = tl.load(key + b * key_stride + h * D + d)
    v = tl.load(value + b * value_stride + h * D + d)
    opened = pool + slot * (2 * P * D) + offset * D + d
    tl.store(opened, k)
    tl.store(opened + P * D, v)
    low_ptr = metadata + (bh * n_max + block) * (2 * D) + d
    old = (offset + tl.zeros((D,), tl.int32)) > 0
    low = tl.load(low_ptr, mask=old, other=float("inf"))
    high = tl.load(low_ptr + D, mask=old, other=float("-inf"))
    tl.store(low_ptr, tl.minimum(low.to(tl.float32), k.to(tl.float32)).to(metadata.dtype.element_ty))
    tl.store(low_ptr + D, tl.maximum(high.to(tl.float32), k.to(tl.float32)).to(metadata.dtype.element_ty))
