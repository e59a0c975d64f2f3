"""Ranked sets of blocks: from scores to (id, level) pairs, to bitmaps and back.

Rank is defined as (level descending, id ascending). A level is round(r · (score − score of the M-th best)) clipped to
0 … 255, with r levels per octave and the score in log2 of softmax weight: q·k/√d / ln 2. Ranked sets are stored as
one bit per block, XOR a reference (`true`: the same chunk's previous step; exact and drafts: the same step's `true`),
and one level per member in id order, minus the reference's level of that block (0 where it has none), modulo 256.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Levels = NDArray[np.uint8]
MAX_BLOCKS = 2**24 - 1
"""Ids share a 32-bit sort key with the level."""
_PADDING = np.uint32(0xFFFFFFFF)


def rank_scores(scores: NDArray[np.floating], num_ranked_blocks: int, levels_per_octave: int) -> tuple[Ids, Levels]:
    """Best `num_ranked_blocks` of scores [..., n] in rank order: ids int32 and levels uint8, [..., M].

    Padded with id −1 and level 0 where n < M. Raises ValueError for a non-finite score.
    """
    if not np.isfinite(scores).all():
        raise ValueError(f"non-finite score at {_first_index(~np.isfinite(scores))}")
    num_blocks = scores.shape[-1]
    keep = min(num_ranked_blocks, num_blocks)
    if keep == 0:
        return rank_levels(np.zeros(scores.shape, np.uint8), None, num_ranked_blocks)
    values = np.asarray(scores, dtype=np.float64)
    anchor = np.partition(values, num_blocks - keep, axis=-1)[..., num_blocks - keep, None]
    levels = np.rint((values - anchor) * levels_per_octave)
    return rank_levels(np.clip(levels, 0, 255).astype(np.uint8), levels < 0, num_ranked_blocks)


def rank_levels(levels: Levels, excluded: NDArray[np.bool_] | None, num_ranked_blocks: int) -> tuple[Ids, Levels]:
    """Best `num_ranked_blocks` by (level descending, id ascending) of levels uint8 [..., n]; as `rank_scores`.

    Blocks where `excluded` (broadcast to `levels`) are never ranked.
    """
    num_blocks = levels.shape[-1]
    keys = ((np.uint32(255) - levels) << np.uint32(24)) | np.arange(num_blocks, dtype=np.uint32)
    if excluded is not None:
        keys[np.broadcast_to(excluded, keys.shape)] = _PADDING
    keep = min(num_ranked_blocks, num_blocks)
    if 0 < keep < num_blocks:
        keys = np.partition(keys, keep - 1, axis=-1)
    shape = (*levels.shape[:-1], num_ranked_blocks)
    ids, out = np.full(shape, -1, dtype=np.int32), np.zeros(shape, dtype=np.uint8)
    kept = np.sort(keys[..., :keep], axis=-1)
    ids[..., :keep] = _ids(kept)
    out[..., :keep] = np.uint32(255) - (kept >> np.uint32(24))
    return ids, out


def rank_members(ids: Ids, levels: Levels) -> Ids:
    """Members (ids [..., M], −1 padding, levels alike) in rank order; padding goes last."""
    keys = ((np.uint32(255) - levels) << np.uint32(24)) | ids.astype(np.uint32)
    keys[ids < 0] = _PADDING
    keys.sort(axis=-1)
    return _ids(keys)


def best_bits(members: Ids, ranked: Ids) -> NDArray[np.uint8]:
    """Which of members [..., M] are among `ranked` [..., K] (−1: none), one bit each: uint8 [..., ceil(M/8)]."""
    width = int(max(members.max(initial=0), ranked.max(initial=0))) + 1
    found = gather(spread(ranked, np.ones(ranked.shape, np.uint8), width), members)
    return np.packbits(found, axis=-1, bitorder="little")


def rank_set(ids: Ids, reference: Ids, tiers: NDArray[np.int64]) -> Ids:
    """Members ids [..., M] by tier ascending, then in the order of `reference` [..., N], then (those that it lacks) by
    id; −1 last."""
    width = int(max(ids.max(initial=0), reference.max(initial=0))) + 1
    places = np.full((*reference.shape[:-1], width + 1), reference.shape[-1], np.int64)
    order = np.broadcast_to(np.arange(reference.shape[-1]), reference.shape)
    np.put_along_axis(places, np.where(reference < 0, width, reference).astype(np.int64), order, axis=-1)
    places = np.take_along_axis(places, np.maximum(ids, 0).astype(np.int64), axis=-1)
    keys = (tiers * (reference.shape[-1] + 1) + places) << 32 | ids
    keys[ids < 0] = np.iinfo(np.int64).max
    keys.sort(axis=-1)
    ranked: Ids = np.where(keys < np.iinfo(np.int64).max, keys & 0xFFFFFFFF, -1).astype(np.int32)
    return ranked


def _ids(keys: NDArray[np.uint32]) -> Ids:
    ids = (keys & np.uint32(0xFFFFFF)).astype(np.int32)
    ids[keys == _PADDING] = -1
    return ids


def members_in_id_order(ids: Ids, levels: Levels) -> tuple[Ids, Levels]:
    """Rank-ordered ids and levels [..., M] by ascending id, padding (id −1, level 0) last."""
    keys = ids.astype(np.int64)
    keys[ids < 0] = 2**31
    order = np.argsort(keys, axis=-1, kind="stable")
    return np.take_along_axis(ids, order, axis=-1), np.take_along_axis(levels, order, axis=-1)


def bitmap(ids: Ids, num_blocks: int) -> NDArray[np.uint8]:
    """One bit per block (little-endian within bytes): uint8 [..., ceil(num_blocks/8)]. Ids −1 set nothing."""
    rows = ids.reshape(-1, ids.shape[-1])
    bits = np.zeros((rows.shape[0], -(-num_blocks // 8) * 8), dtype=np.uint8)
    row, column = np.nonzero(rows >= 0)
    bits[row, rows[row, column]] = 1
    return np.packbits(bits, axis=-1, bitorder="little").reshape(*ids.shape[:-1], -1)


def encode_steps(bitmaps: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """XOR each step of a chunk [S, …] with the step before; the first stays."""
    out = bitmaps.copy()
    out[1:] ^= bitmaps[:-1]
    return out


def decode_steps(coded: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Inverse of `encode_steps`."""
    return np.bitwise_xor.accumulate(coded, axis=0)


def spread(ids: Ids, values: Levels, num_blocks: int) -> Levels:
    """Values of ids [..., M] by block, uint8 [..., num_blocks]; 0 where no id is. Ids −1 are left out."""
    rows = np.zeros((*ids.shape[:-1], num_blocks + 1), np.uint8)
    np.put_along_axis(rows, np.where(ids < 0, num_blocks, ids).astype(np.int64), values, axis=-1)
    return rows[..., :num_blocks]


def gather(values: Levels, ids: Ids) -> Levels:
    """Inverse of `spread`: values [..., n] at ids [..., M], 0 where the id is −1."""
    taken = np.take_along_axis(values, np.maximum(ids, 0).astype(np.int64), axis=-1)
    taken[ids < 0] = 0
    return taken


def accumulate_levels(coded: Levels, ids: Ids, bitmaps: NDArray[np.uint8]) -> Levels:
    """Levels by block, uint8 [S, …, n], of a chunk whose levels were coded against the step before.

    ids and bitmaps are the chunk's members, decoded.
    """
    member = np.unpackbits(bitmaps, axis=-1, bitorder="little")
    levels = np.zeros_like(member)
    levels.reshape(-1)[np.flatnonzero(member.view(np.bool_))] = coded[ids >= 0]
    for step in range(1, len(levels)):
        levels[step] += levels[step - 1] * member[step]
    return levels


def decode_members(bitmaps: NDArray[np.uint8], max_members: int) -> Ids:
    """Ids in ascending order, int32 [..., M], padded with −1.

    Raises OverflowError (row index as its argument) where a row has more than `max_members`.
    """
    rows = np.ascontiguousarray(bitmaps).reshape(-1, bitmaps.shape[-1])
    width = np.int64(rows.shape[1] * 8)
    flat = np.flatnonzero(np.unpackbits(rows, bitorder="little").view(np.bool_))
    counts = np.bitwise_count(rows).sum(axis=-1, dtype=np.int64)
    if counts.size and counts.max() > max_members:
        raise OverflowError(np.unravel_index(int(np.argmax(counts > max_members)), bitmaps.shape[:-1]))
    if counts.size and counts.min() == max_members:
        ids = (flat % width).astype(np.int32)
    else:
        ids = np.full(rows.shape[0] * max_members, -1, dtype=np.int32)
        starts = np.repeat(np.arange(rows.shape[0]) * max_members - (np.cumsum(counts) - counts), counts)
        ids[np.arange(flat.size) + starts] = flat % width
    return ids.reshape(*bitmaps.shape[:-1], max_members)


def _first_index(mask: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))
