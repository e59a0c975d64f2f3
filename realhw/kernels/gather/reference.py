"""Block gather in plain torch."""

from __future__ import annotations

import torch


def gather_blocks(
    host: torch.Tensor, pool: torch.Tensor, entries: torch.Tensor, count: torch.Tensor, layer: int, slots_per_head: int
) -> None:
    """Copy each entry's block into its slot, in place; entries (request x head, block, slot)."""
    requests, _, heads = host.shape[:3]
    for bh, block, slot in entries[: int(count[0])].tolist():
        request, head = divmod(bh, heads)
        target = bh * slots_per_head + slot
        pool[target] = host[request % requests, layer, head, block].to(pool.device)
