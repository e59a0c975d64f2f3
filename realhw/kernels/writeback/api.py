"""Write-back of newly generated KV to the host copy."""

from __future__ import annotations

import torch

from realhw.kernels.checks import require_contiguous, require_dtype, require_range, require_shape
from realhw.kernels.writeback.kernel import write_back_kernel
from traces.errors import InputError


def write_back(
    pool: torch.Tensor,
    host: torch.Tensor,
    kv_len: torch.Tensor,
    layer: int,
    slots_per_head: int,
    per_token: bool = False,
) -> None:
    """Copy to host[b % A, layer] the open block of each request whose newest token fills it, or every newest token.

    pool, host as in `gather_blocks`; kv_len int32 [B] counts the newest token. Raises `InputError`.
    """
    requests, layers, heads, host_blocks = host.shape[:4]
    require_dtype("host", host, pool.dtype)
    require_dtype("kv_len", kv_len, torch.int32)
    require_shape("host", host, (requests, layers, heads, host_blocks, *pool.shape[1:]))
    require_contiguous(host=host, pool=pool, kv_len=kv_len)
    require_range("layer", layer, 0, layers - 1)
    if pool.is_cuda and not host.is_cuda and not host.is_pinned():
        raise InputError("host: pageable memory, need pinned (the GPU writes it in place)")
    block_size, head_dim = pool.shape[2:]
    if head_dim * pool.element_size() % 4:
        raise InputError(f"a token's row of {head_dim * pool.element_size()} bytes, need a multiple of 4")
    words = pool[0].numel() * pool.element_size() // 4
    write_back_kernel[(kv_len.shape[0] * heads,)](
        pool.view(torch.int32),
        host.view(torch.int32),
        kv_len,
        layer,
        requests,
        layers,
        heads,
        host_blocks,
        slots_per_head,
        WORDS=words,
        WP=1 << (words - 1).bit_length(),
        P=block_size,
        PER_TOKEN=per_token,
        num_warps=4,
    )
