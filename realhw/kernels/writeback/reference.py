"""Write-back of new KV in plain torch."""

from __future__ import annotations

import torch


def write_back(
    pool: torch.Tensor, host: torch.Tensor, kv_len: torch.Tensor, layer: int, slots_per_head: int, per_token: bool
) -> None:
    """Copy the newest token, or the open block if that token fills it, to its place in host memory, in place."""
    heads, block_size = host.shape[2], pool.shape[2]
    for b, n in enumerate(kv_len.tolist()):
        block, offset = divmod(n - 1, block_size)
        for h in range(heads):
            source = pool[(b * heads + h) * slots_per_head + slots_per_head - 1]
            if per_token:
                host[b % host.shape[0], layer, h, block, :, offset] = source[:, offset].to(host.device)
            elif offset == block_size - 1:
                host[b % host.shape[0], layer, h, block] = source.to(host.device)
