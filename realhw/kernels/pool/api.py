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
    key: torch.Tensor, value: torch.Tensor, open_kv: torch.Tensor, metadata: torch.Tensor, kv_len: torch.Tensor
) -> None:
    """Write the newest token of each request into its open block and fold its key into that block's min and max.

    key, value [B, H, d] (rows may be strided); open_kv [B, H, 2, P, d] view of the pool's open blocks, one per
    (request, head) at a uniform stride; metadata [B, H, n_max, 2, d]; kv_len int32 [B], counts the new token.
    The first token of a block sets min = max = key. Raises `InputError`.
    """
    batch, heads, _, block_size, head_dim = open_kv.shape
    n_max = metadata.shape[2]
    require_shape("key", key, (batch, heads, head_dim))
    require_shape("value", value, (batch, heads, head_dim))
    require_shape("metadata", metadata, (batch, heads, n_max, 2, head_dim))
    require_shape("kv_len", kv_len, (batch,))
    require_dtype("kv_len", kv_len, torch.int32)
    require_dtype("open_kv", open_kv, key.dtype)
    require_contiguous(metadata=metadata, kv_len=kv_len)
    require_head_dim(head_dim)
    if open_kv.stride(0) != heads * open_kv.stride(1) or open_kv[0, 0].is_contiguous() is False:
        raise InputError(f"open_kv: strides {open_kv.stride()}, need one uniform stride over (request, head)")
    if key.stride()[1:] != (head_dim, 1) or value.stride()[1:] != (head_dim, 1):
        raise InputError("key, value: the heads of a row must be contiguous")
    append_token_kernel[(batch * heads,)](
        key,
        value,
        open_kv,
        metadata,
        kv_len,
        key.stride(0),
        value.stride(0),
        open_kv.stride(1),
        heads,
        n_max,
        P=block_size,
        D=head_dim,
        num_warps=1,
    )


def require_head_dim(head_dim: int) -> None:
    """`InputError` unless the head dimension is a power of two that the kernels tile (16 to 256)."""
    require_range("head_dim", head_dim, 16, 256)
    if head_dim & (head_dim - 1):
        raise InputError(f"head_dim: {head_dim}, need a power of two")
