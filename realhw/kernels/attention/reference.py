"""Decode attention over a per-head block table in plain torch."""

from __future__ import annotations

import torch


def decode_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    counts: torch.Tensor,
    last_tokens: torch.Tensor,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """softmax(q K^T / sqrt(d)) V in `dtype` over the blocks that the table names: [B, R, Hq, d]."""
    batch, _, q_heads, head_dim = query.shape
    heads = table.shape[1]
    group = q_heads // heads
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    for b in range(batch):
        for h in range(heads):
            blocks = pool[table[b, h, : int(counts[b, h])].long()].to(dtype)
            keys = blocks[:, 0].reshape(-1, head_dim)
            values = blocks[:, 1].reshape(-1, head_dim)
            n = keys.shape[0] - pool.shape[2] + int(last_tokens[b])
            q = query[b, :, h * group : (h + 1) * group].to(dtype)
            weights = torch.softmax(q @ keys[:n].T / head_dim**0.5, dim=-1)
            out[b, :, h * group : (h + 1) * group] = weights @ values[:n]
    return out
