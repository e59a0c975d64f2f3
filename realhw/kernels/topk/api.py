"""Top-K blocks per KV head."""

from __future__ import annotations

import torch

from realhw.kernels.checks import require_contiguous, require_dtype, require_range, require_shape
from realhw.kernels.topk.kernel import topk_blocks_kernel
from realhw.kernels.topk.reference import KEY_BITS, id_bits

MAX_BLOCKS = 16384


def topk_scratch(batch_size: int, num_kv_heads: int, k: int, device: torch.device | str) -> torch.Tensor:
    """Work space of `topk_blocks`: int32 [B*H, K rounded up to a power of two]."""
    padded = max(16, 1 << (k - 1).bit_length())
    return torch.empty(batch_size * num_kv_heads, padded, dtype=torch.int32, device=device)


def topk_blocks(
    scores: torch.Tensor, num_blocks: torch.Tensor, ids: torch.Tensor, scratch: torch.Tensor, num_warps: int = 0
) -> None:
    """Ids of the K best blocks in rank order: score descending, id ascending.

    Scores are compared at their leading 30 − log2(n_max) bits (float32 has 19 of sign, exponent and mantissa at 2,048
    blocks): closer ones count as ties, which go to the lower id.

    scores float32 [B, H, n_max] without NaN; num_blocks int32 [B]; ids int32 [B, H, K], −1 where fewer than K blocks
    exist; scratch from `topk_scratch`; num_warps 0: by size. Raises `InputError`.
    """
    _launch(scores, num_blocks, ids, scratch, ids.shape[2], None, 0, num_warps)


def topk_table(
    scores: torch.Tensor,
    num_blocks: torch.Tensor,
    table: torch.Tensor,
    counts: torch.Tensor,
    scratch: torch.Tensor,
    blocks_per_head: int,
    num_warps: int = 0,
) -> None:
    """The same as a block table over a pool that holds the whole KV, block i of head bh at bh * blocks_per_head + i.

    table int32 [B, H, K + 1] and counts int32 [B, H] as `decode_attention` takes them, the open block
    (id num_blocks[b]) last. Raises `InputError`.
    """
    require_dtype("counts", counts, torch.int32)
    require_shape("counts", counts, tuple(scores.shape[:2]))
    _launch(scores, num_blocks, table, scratch, table.shape[2] - 1, counts, blocks_per_head, num_warps)


def _launch(
    scores: torch.Tensor,
    num_blocks: torch.Tensor,
    ids: torch.Tensor,
    scratch: torch.Tensor,
    k: int,
    counts: torch.Tensor | None,
    blocks_per_head: int,
    num_warps: int,
) -> None:
    batch, heads, n_max = scores.shape
    require_dtype("scores", scores, torch.float32)
    require_dtype("num_blocks", num_blocks, torch.int32)
    require_dtype("ids", ids, torch.int32)
    require_shape("num_blocks", num_blocks, (batch,))
    require_shape("ids", ids, (batch, heads, ids.shape[2]))
    padded = max(16, 1 << (k - 1).bit_length())
    require_shape("scratch", scratch, (batch * heads, padded))
    require_contiguous(scores=scores, num_blocks=num_blocks, ids=ids, scratch=scratch)
    require_range("blocks", n_max, 1, MAX_BLOCKS)
    require_range("K", k, 1, 1024)
    blocks_padded = max(64, 1 << (n_max - 1).bit_length())
    topk_blocks_kernel[(batch * heads,)](
        scores,
        num_blocks,
        scratch,
        ids,
        heads,
        n_max,
        blocks_per_head,
        num_blocks if counts is None else counts,
        TABLE=counts is not None,
        K=k,
        NP=blocks_padded,
        KP=padded,
        CHUNK=min(16, padded),
        ID_BITS=id_bits(n_max),
        KEY_BITS=KEY_BITS,
        num_warps=num_warps or max(1, min(8, blocks_padded // 512)),
    )
