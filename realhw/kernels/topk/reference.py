"""Top-K block ids in plain Python order: score descending, id ascending."""

from __future__ import annotations

import torch


def topk_blocks(scores: torch.Tensor, num_blocks: torch.Tensor, k: int) -> torch.Tensor:
    """The first k ids by (score descending, id ascending) among the first num_blocks[b]: int32 [B, H, k], -1 padded."""
    batch, heads, _ = scores.shape
    out = torch.full((batch, heads, k), -1, dtype=torch.int32, device=scores.device)
    for b, n in enumerate(num_blocks.tolist()):
        ids = torch.sort(scores[b, :, :n], dim=-1, descending=True, stable=True).indices[:, :k]
        out[b, :, : ids.shape[1]] = ids.int()
    return out
