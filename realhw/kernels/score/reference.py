"""Min/max block scores in plain torch."""

from __future__ import annotations

import torch


def score_blocks(
    query: torch.Tensor, metadata: torch.Tensor, num_blocks: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Quest's bound sum_d max(q_d * min_d, q_d * max_d), max over the query heads of a group: [B, H, n_max].

    Computed in `dtype`; -inf from `num_blocks[b]` on. Source: Quest (arXiv 2406.10774), section 3.3.
    """
    batch, heads, n_max, _, head_dim = metadata.shape
    q = query.to(dtype).view(batch, heads, -1, 1, head_dim)
    low, high = metadata[:, :, None, :, 0].to(dtype), metadata[:, :, None, :, 1].to(dtype)
    scores = torch.maximum(q * low, q * high).sum(-1).amax(2)
    beyond = torch.arange(n_max, device=scores.device)[None, None, :] >= num_blocks[:, None, None]
    return scores.masked_fill(beyond, float("-inf"))
