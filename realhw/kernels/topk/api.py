"""Top-K blocks per KV head."""

from __future__ import annotations

import torch

from realhw.kernels.checks import require_contiguous, require_dtype, require_range, require_rows, require_shape
from realhw.kernels.topk.kernel import topk_kernel
from realhw.kernels.topk.reference import id_bits

MAX_BLOCKS = 16384


def topk_blocks(scores: torch.Tensor, num_blocks: torch.Tensor, ids: torch.Tensor, num_warps: int = 0) -> None:
    """Ids of the K best blocks in rank order: score descending, id ascending.

    Scores are compared at their leading 31 − log2(blocks) bits (20 of float32's sign, exponent and mantissa at 2,048
    blocks): closer ones count as ties, which go to the lower id.

    scores float32 [B, H, n_max] without NaN (`score.api.make_scores`); num_blocks int32 [B]; ids int32 [B, H, K], −1
    where fewer than K blocks exist; num_warps 0: by size. Raises `InputError`.
    """
    _launch(scores, num_blocks, ids, ids.shape[2], None, 0, num_warps)


def topk_table(
    scores: torch.Tensor,
    num_blocks: torch.Tensor,
    table: torch.Tensor,
    counts: torch.Tensor,
    blocks_per_head: int,
    num_warps: int = 0,
) -> None:
    """The same as a block table over a pool that holds the whole KV, block i of head bh at bh * blocks_per_head + i.

    table int32 [B, H, K + 1] and counts int32 [B, H] as `decode_attention` takes them, the open block
    (id num_blocks[b]) last. Raises `InputError`.
    """
    require_dtype("counts", counts, torch.int32)
    require_shape("counts", counts, tuple(scores.shape[:2]))
    _launch(scores, num_blocks, table, table.shape[2] - 1, counts, blocks_per_head, num_warps)


def _launch(
    scores: torch.Tensor,
    num_blocks: torch.Tensor,
    ids: torch.Tensor,
    k: int,
    counts: torch.Tensor | None,
    blocks_per_head: int,
    num_warps: int,
) -> None:
    _check(scores, num_blocks, ids, k)
    batch, heads, n_max = scores.shape
    main, tail = split_width(n_max)
    topk_kernel[(batch * heads,)](
        scores, num_blocks, ids, heads, scores.stride(1), num_blocks if counts is None else counts, blocks_per_head,
        TABLE=counts is not None, K=k, NP=main, TP=tail, KP=_padded(k, 16), ID_BITS=id_bits(n_max),
        num_warps=num_warps or (1 if main <= 1024 else min(8, main // 512)),
    )  # fmt: skip


def split_width(count: int) -> tuple[int, int]:
    """Powers of two that hold `count` blocks together; the second is 0 where it would not save a quarter."""
    whole = _padded(count, 64)
    if whole == 64 or count > 3 * whole // 4:
        return whole, 0
    return whole // 2, _padded(count - whole // 2, 64)


def _check(scores: torch.Tensor, num_blocks: torch.Tensor, ids: torch.Tensor, k: int) -> None:
    require_dtype("scores", scores, torch.float32)
    require_dtype("num_blocks", num_blocks, torch.int32)
    require_dtype("ids", ids, torch.int32)
    require_shape("num_blocks", num_blocks, (scores.shape[0],))
    require_shape("ids", ids, (*scores.shape[:2], ids.shape[2]))
    require_contiguous(num_blocks=num_blocks, ids=ids)
    require_rows("scores", scores)
    require_range("blocks", scores.shape[2], 1, MAX_BLOCKS)
    require_range("K", k, 1, 1024)


def _padded(count: int, least: int) -> int:
    return max(least, 1 << (count - 1).bit_length())
