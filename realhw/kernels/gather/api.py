"""Zero-copy gather of scattered blocks from pinned host memory into HBM slots."""

from __future__ import annotations

import torch

from realhw.kernels.checks import require_contiguous, require_dtype, require_range, require_shape
from realhw.kernels.gather.config import DEFAULT, GatherConfig
from realhw.kernels.gather.kernel import gather_blocks_kernel
from traces.errors import InputError


def gather_blocks(
    host: torch.Tensor,
    pool: torch.Tensor,
    entries: torch.Tensor,
    count: torch.Tensor,
    layer: int,
    slots_per_head: int,
    config: GatherConfig = DEFAULT,
) -> None:
    """Copy `count` blocks into their slots, bit for bit.

    host [A, L, H, n, 2, P, d] in pinned memory: request b's KV is host[b % A]; pool [B*H*slots_per_head, 2, P, d] in
    HBM, head bh's slots at bh*slots_per_head; entries int32 [max, 3] of (request*H + head, block, slot); count int32
    [1]. Raises `InputError`.
    """
    requests, layers, heads, host_blocks = host.shape[:4]
    require_dtype("host", host, pool.dtype)
    require_dtype("entries", entries, torch.int32)
    require_dtype("count", count, torch.int32)
    require_shape("host", host, (requests, layers, heads, host_blocks, *pool.shape[1:]))
    require_shape("entries", entries, (entries.shape[0], 3))
    require_contiguous(host=host, pool=pool, entries=entries)
    require_range("layer", layer, 0, layers - 1)
    if pool.is_cuda and not host.is_cuda and not host.is_pinned():
        raise InputError("host: pageable memory, need pinned (the GPU reads it in place)")
    block_bytes = pool[0].numel() * pool.element_size()
    if block_bytes % 16:
        raise InputError(f"block: {block_bytes} bytes, need a multiple of 16")
    words = block_bytes // 4
    gather_blocks_kernel[(config.num_ctas,)](
        host.view(torch.int32),
        pool.view(torch.int32),
        entries,
        count,
        layer,
        layers,
        host_blocks,
        slots_per_head,
        entries.shape[0],
        REQUESTS=requests,
        H=heads,
        WORDS=words,
        WP=1 << (words - 1).bit_length(),
        UNROLL=1 << (max(1, config.in_flight_bytes // block_bytes).bit_length() - 1),
        num_warps=config.num_warps,
    )
