"""Grouped-query decode attention of one or more rows per request over a per-head block table."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from realhw.kernels.attention.kernel import decode_attention_kernel
from realhw.kernels.attention.limits import NUM_ROWS
from realhw.kernels.checks import FLOATS, require_contiguous, require_dtype, require_range, require_shape
from realhw.kernels.pool.api import require_head_dim
from traces.errors import InputError


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Tokens per tile, splits of a head's KV (0: chosen from the grid), warps, software-pipeline depth."""

    block_n: int = 64
    splits: int = 0
    num_warps: int = 4
    num_stages: int = 4


DEFAULT = AttentionConfig()


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Partial results of the splits; `arrivals` must be zero before a launch and is zero after it."""

    acc: torch.Tensor
    ml: torch.Tensor
    arrivals: torch.Tensor


def attention_scratch(
    batch_size: int, num_kv_heads: int, head_dim: int, splits: int, device: torch.device | str
) -> AttentionScratch:
    """Work space for `splits` splits of every (request, KV head)."""
    heads = batch_size * num_kv_heads
    return AttentionScratch(
        torch.empty(heads * splits * NUM_ROWS, head_dim, dtype=torch.float32, device=device),
        torch.empty(heads * splits * NUM_ROWS, 2, dtype=torch.float32, device=device),
        torch.zeros(heads, dtype=torch.int32, device=device),
    )


def choose_splits(num_heads: int, kv_tokens: int, block_n: int, num_sms: int, rows: int = 2) -> int:
    """Splits so that the grid has at most four programs per multiprocessor and each reads at least two tiles.

    The last program of a head merges the splits one after the other: more than 16 cost more than they bring. Two splits
    of a single row ran at three quarters of the rate of four (H200, Triton 3.6).
    """
    wanted = 4 * num_sms // num_heads
    if rows == 1 and wanted == 2:
        wanted = 4
    most = max(1, kv_tokens // (2 * block_n))
    return max(1, min(wanted, most, 16))


def decode_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    counts: torch.Tensor,
    last_tokens: torch.Tensor,
    out: torch.Tensor,
    scratch: AttentionScratch,
    splits: int,
    config: AttentionConfig = DEFAULT,
) -> None:
    """out = softmax(q K^T / sqrt(d)) V over the blocks of each KV head's table.

    query [B, R, Hq, d] (R rows per request, heads contiguous, rows at one stride); pool [num_blocks, 2, P, d]
    ([K | V], query's dtype); table int32 [B, H, T] of pool block indices in any order; counts int32 [B, H];
    last_tokens int32 [B], valid tokens of the last counted entry, the others being full; out [B, R, Hq, d].
    Softmax in float32. Raises `InputError`.
    """
    batch, rows, q_heads, head_dim = query.shape
    heads = table.shape[1]
    require_dtype("pool", pool, *FLOATS)
    require_dtype("query", query, pool.dtype)
    for name, tensor in (("table", table), ("counts", counts), ("last_tokens", last_tokens)):
        require_dtype(name, tensor, torch.int32)
    require_shape("pool", pool, (pool.shape[0], 2, pool.shape[2], head_dim))
    require_shape("table", table, (batch, heads, table.shape[2]))
    require_shape("counts", counts, (batch, heads))
    require_shape("last_tokens", last_tokens, (batch,))
    require_shape("out", out, tuple(query.shape))
    require_contiguous(pool=pool, table=table, counts=counts, last_tokens=last_tokens, out=out)
    require_head_dim(head_dim)
    row_stride = query.stride(0) if rows == 1 else query.stride(1)
    if q_heads % heads or query.stride()[2:] != (head_dim, 1) or query.stride(0) != rows * row_stride:
        raise InputError(f"query: {q_heads} heads with strides {query.stride()} for {heads} KV heads")
    require_range("rows x query heads per KV head", rows * q_heads // heads, 1, NUM_ROWS)
    if scratch.acc.shape[0] < batch * heads * splits * NUM_ROWS:
        raise InputError(f"scratch: room for {scratch.acc.shape[0]} rows, need {batch * heads * splits * NUM_ROWS}")
    decode_attention_kernel[(batch * heads, splits)](
        query,
        pool,
        table,
        counts,
        last_tokens,
        out,
        scratch.acc,
        scratch.ml,
        scratch.arrivals,
        math.log2(math.e) / math.sqrt(head_dim),
        row_stride,
        heads,
        table.shape[2],
        R=rows,
        G=q_heads // heads,
        P=pool.shape[2],
        D=head_dim,
        ROWS=NUM_ROWS,
        BLOCK_N=config.block_n,
        SPLITS=splits,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
