"""Block scoring of one query per request against every block's compressed keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from realhw.kernels.checks import (
    FLOATS,
    require_contiguous,
    require_dtype,
    require_range,
    require_rows,
    require_shape,
)
from realhw.kernels.pool.api import require_head_dim
from realhw.kernels.score.kernel import score_blocks_kernel
from traces.errors import InputError


@dataclass(frozen=True, slots=True)
class ScoreConfig:
    """Tile of `score_blocks`: blocks per tile, tiles per program, warps, software-pipeline depth."""

    block_n: int = 64
    tiles: int = 1
    num_warps: int = 4
    num_stages: int = 2


DEFAULT = ScoreConfig()


def make_scores(batch_size: int, num_kv_heads: int, max_blocks: int, device: torch.device | str) -> torch.Tensor:
    """Room for the scores of `max_blocks` blocks a head, float32 [B, H, max_blocks]: rows start at 64 bytes, so that
    they are read four scores at a time."""
    rows = torch.empty(batch_size, num_kv_heads, -(-max_blocks // 16) * 16, device=device)
    return rows[:, :, :max_blocks]


def score_blocks(
    query: torch.Tensor,
    metadata: torch.Tensor,
    num_blocks: torch.Tensor,
    scores: torch.Tensor,
    config: ScoreConfig = DEFAULT,
) -> None:
    """Min/max bound of each block, max over the query heads of a KV head's group.

    query [B, Hq, d] (rows may be strided); metadata [B, H, n_max, 2, d] ([min | max], query's dtype);
    num_blocks int32 [B]; scores from `make_scores` (or contiguous), -inf from num_blocks on. Raises `InputError`.
    """
    batch, heads, n_max, _, head_dim = metadata.shape
    require_dtype("metadata", metadata, *FLOATS)
    require_dtype("query", query, metadata.dtype)
    require_dtype("num_blocks", num_blocks, torch.int32)
    require_dtype("scores", scores, torch.float32)
    require_shape("query", query, (batch, query.shape[1], head_dim))
    require_shape("num_blocks", num_blocks, (batch,))
    require_shape("scores", scores, (batch, heads, n_max))
    require_contiguous(metadata=metadata, num_blocks=num_blocks)
    require_rows("scores", scores)
    require_head_dim(head_dim)
    if query.shape[1] % heads or query.stride()[1:] != (head_dim, 1):
        raise InputError(f"query: {query.shape[1]} heads with strides {query.stride()} for {heads} KV heads")
    group = query.shape[1] // heads
    require_range("query heads per KV head", group, 1, 16)
    grid = (batch * heads, triton.cdiv(n_max, config.block_n * config.tiles))
    score_blocks_kernel[grid](
        query,
        metadata,
        num_blocks,
        scores,
        query.stride(0),
        heads,
        n_max,
        scores.stride(1),
        G=group,
        D=head_dim,
        ROWS=16,
        BLOCK_N=config.block_n,
        TILES=config.tiles,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
