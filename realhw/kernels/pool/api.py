"""Key min/max pooling: the compressed keys that block scoring reads."""

from __future__ import annotations

import torch

from realhw.kernels.checks import FLOATS, require_contiguous, require_dtype, require_range, require_shape
from realhw.kernels.pool.kernel import append_token_kernel, pool_blocks_kernel
from traces.errors import InputError


def pool_blocks(kv: torch.Tensor, num_tokens: torch.Tensor, out: torch.Tensor) -> None:
    """Per-channel min and max of each block's keys.

    kv [N, 2, P, d] ([K | V]); num_tokens int32 [N], 1 … P valid tokens; out [N, 2, d] of kv's dtype.
    Raises `InputError`.
    """
    n, _, block_size, head_dim = kv.shape
    require_dtype("kv", kv, *FLOATS)
    require_dtype("num_tokens", num_tokens, torch.int32)
    require_shape("num_tokens", num_tokens, (n,))
    require_shape("out", out, (n, 2, head_dim))
    require_contiguous(kv=kv, num_tokens=num_tokens, out=out)
    require_head_dim(head_dim)
    padded = 1 << (block_size - 1).bit_length()
    pool_blocks_kernel[(n,)](kv, num_tokens, out, n, P=block_size, D=head_dim, PP=padded, num_warps=2)


def append_token(
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    metadata: torch.Tensor,
    kv_len: torch.Tensor,
    slots_per_head: int,
    fill_slot: torch.Tensor | None,
) -> None:
    """Write each request's newest token into its open block and fold its key into that block's min and max.

    key, value [B, H, d] (rows may be strided); pool [B*H*slots_per_head, 2, P, d]; metadata [B, H, n_max, 2, d];
    kv_len int32 [B], counts the new token. With `fill_slot` int32 [B, H] the open block is a head's last slot and, when
    the token opens a new block, the full one is first copied to slot fill_slot (−1: dropped). Without it the pool
    holds the whole KV, block i of a head in its slot i. A block's first token sets min = max = key.
    Raises `InputError`.
    """
    batch, heads, n_max, _, head_dim = metadata.shape
    block_size = pool.shape[2]
    require_shape("key", key, (batch, heads, head_dim))
    require_shape("value", value, (batch, heads, head_dim))
    require_shape("pool", pool, (batch * heads * slots_per_head, 2, block_size, head_dim))
    require_shape("kv_len", kv_len, (batch,))
    require_dtype("kv_len", kv_len, torch.int32)
    require_dtype("pool", pool, key.dtype)
    require_contiguous(pool=pool, metadata=metadata, kv_len=kv_len)
    require_head_dim(head_dim)
    if key.stride()[1:] != (head_dim, 1) or value.stride()[1:] != (head_dim, 1):
        raise InputError("key, value: the heads of a row must be contiguous")
    if fill_slot is not None:
        require_dtype("fill_slot", fill_slot, torch.int32)
        require_shape("fill_slot", fill_slot, (batch, heads))
    append_token_kernel[(batch * heads,)](
        key,
        value,
        pool,
        metadata,
        kv_len,
        kv_len if fill_slot is None else fill_slot,
        key.stride(0),
        value.stride(0),
        heads,
        n_max,
        slots_per_head,
        WHOLE=fill_slot is None,
        P=block_size,
        D=head_dim,
        PP=1 << (block_size - 1).bit_length(),
        num_warps=1,
    )


def require_head_dim(head_dim: int) -> None:
    """`InputError` unless the head dimension is a power of two that the kernels tile (16 to 256)."""
    require_range("head_dim", head_dim, 16, 256)
    if head_dim & (head_dim - 1):
        raise InputError(f"head_dim: {head_dim}, need a power of two")
