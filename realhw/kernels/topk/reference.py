"""Top-K block ids in plain torch: score descending at the kernel's resolution, id ascending."""

from __future__ import annotations

import torch

KEY_BITS = 31
"""Bits of a sort key: the score's leading bits, then the id's complement."""


def id_bits(n_max: int) -> int:
    """Bits of a block id in the key."""
    return max(6, (n_max - 1).bit_length())


def score_levels(scores: torch.Tensor, bits: int) -> torch.Tensor:
    """Leading `bits` of each float32 as an unsigned number of the same order, int64."""
    raw = (scores + 0.0).view(torch.int32)
    ordered = (raw ^ ((raw >> 31) & 0x7FFFFFFF)).long() + (1 << 31)
    return ordered >> (32 - bits)


def topk_blocks(scores: torch.Tensor, num_blocks: torch.Tensor, k: int) -> torch.Tensor:
    """The first k ids by (level descending, id ascending) among the first num_blocks[b]: int32 [B, H, k], −1 padded."""
    batch, heads, n_max = scores.shape
    levels = score_levels(scores, KEY_BITS - id_bits(n_max))
    out = torch.full((batch, heads, k), -1, dtype=torch.int32, device=scores.device)
    for b, n in enumerate(num_blocks.tolist()):
        ids = torch.sort(levels[b, :, :n], dim=-1, descending=True, stable=True).indices[:, :k]
        out[b, :, : ids.shape[1]] = ids.int()
    return out
