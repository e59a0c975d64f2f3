"""Measure a recorded request: how its ranked sets persist, who is in them, and where the softmax mass lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.codec import Ids
from traces.errors import InputError, TraceError
from traces.group import TraceGroup
from traces.mass import BlockMass
from traces.reader import FileGroup
from traces.schema import DrafterAttributes, draft_distance
from traces.synth.normal import threshold_of
from traces.synth.statistics import (
    DraftKinds,
    DraftState,
    HeadStatistics,
    LayerStatistics,
    TraceStatistics,
    age_octaves,
    popularity_groups,
)

LAGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
DEFAULT_SET_SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
NUM_SINK_BLOCKS = 2
RECENT_TOKENS = 512
"""Blocks younger than this are described by their age. Chosen so that a short turn of a chat is inside."""
_MIN_PAIRS = 16
"""Lags that leave fewer pairs of steps are not measured."""

Members = NDArray[np.bool_]
"""Whether a block is among the K best: [S, L, H, n]."""


def measure(group: TraceGroup, block_size_tokens: int, set_sizes: Sequence[int] = DEFAULT_SET_SIZES) -> TraceStatistics:
    """Statistics of one request at one block size, per layer and head.

    set_sizes: the K, ascending; those beyond what is ranked are left out.

    Raises InputError for a request too short to measure (fewer than 17 steps, or a context of few blocks).
    """
    true = group.ranking("true", block_size_tokens)
    num_steps, num_ranked = true.shape[0], true.shape[-1]
    num_blocks = -(-group.kv_len.astype(np.int64) // block_size_tokens)
    lags = tuple(lag for lag in LAGS if num_steps - lag >= _MIN_PAIRS)
    num_recent = min(RECENT_TOKENS // block_size_tokens, int(num_blocks[0]) // 4)
    most = min(num_ranked, int(num_blocks[0]) - NUM_SINK_BLOCKS - 1)
    sizes = tuple(size for size in set_sizes if size <= most)
    if not lags or not sizes or num_recent < 1:
        raise InputError(
            f"request {group.name!r}: {num_steps} steps and {num_blocks[0]} blocks of {block_size_tokens} tokens are "
            f"too few to measure; at least {_MIN_PAIRS + 1} steps and 8 blocks are needed"
        )
    if tuple(set_sizes) == DEFAULT_SET_SIZES and most > 1.25 * sizes[-1]:
        sizes = (*sizes, most)
    kinds, rows_of_kind = _draft_kinds(group, block_size_tokens)
    drafts = {name: group.ranking(name, block_size_tokens) for name in group.rankings(block_size_tokens)}
    drafts = {name: ids for name, ids in drafts.items() if draft_distance(name)}
    exact = group.ranking("exact", block_size_tokens) if "exact" in group.rankings(block_size_tokens) else None
    ranks = tuple(2**i for i in range(int(num_blocks[0]).bit_length()) if 2**i <= num_blocks[0] - 3)
    block_mass = _block_mass(group, block_size_tokens)
    layers = []
    for at, layer in enumerate(group.layers(block_size_tokens)):
        only = slice(at, at + 1)
        best = None if exact is None else exact[:, only]
        drafted = {name: ids[:, only] for name, ids in drafts.items()}
        by_size = [
            _measure_size(true[:, only], drafted, rows_of_kind, best, size, num_blocks, lags, num_recent)
            for size in sizes
        ]
        mass: dict[str, NDArray[np.float64]] = {}
        if block_mass is not None:
            levels, scale, outside = block_mass.levels, block_mass.scale, block_mass.outside
            dense = BlockMass(levels[:, only], scale[:, only], outside[:, only]).dense()
            mass = _measure_mass(dense, true[:, only], best, sizes, ranks, num_blocks)
        noise = _rank_noise(true[:, only], num_blocks)
        heads = tuple(_head(h, by_size, kinds, mass, noise, exact is not None) for h in range(group.num_kv_heads))
        layers.append(LayerStatistics(layer=layer, heads=heads))
    return TraceStatistics(
        name=group.name,
        kind="measured",
        source=f"request {group.name!r} of {group.model.name}, content hash {group.content_hash}",
        model=group.model,
        block_size_tokens=block_size_tokens,
        context_tokens=int(group.kv_len[0]),
        num_steps=num_steps,
        set_sizes=sizes,
        lags=lags,
        mass_ranks=() if block_mass is None else ranks,
        popularity_groups=tuple(
            popularity_groups(last - first)
            for first, last in age_octaves(num_recent, int(num_blocks[0]) - 1 - NUM_SINK_BLOCKS - num_recent)
        ),
        draft_kinds=tuple(kinds),
        layers=tuple(layers),
    )


_BY_SIZE = ("persistence", "sink", "recency", "popularity")


def _head(
    h: int,
    by_size: list[dict[str, Any]],
    kinds: list[DraftKinds],
    mass: dict[str, NDArray[np.float64]],
    noise: NDArray[np.float64],
    has_exact: bool,
) -> HeadStatistics:
    """One head of one layer, out of arrays whose last axes are [1, H]."""
    rows = {name: tuple(_shares(values[name][..., 0, h]) for values in by_size) for name in _BY_SIZE}
    states = [
        {
            kind: DraftState(
                **{
                    name: tuple(float(values["drafts"][j, kind][name][0, h]) for values in by_size)
                    for name in by_size[0]["drafts"][j, kind]
                }
            )
            for kind in kind_shares.shares
        }
        for j, kind_shares in enumerate(kinds, start=1)
    ]
    listed: dict[str, Any] = {name: _listed(values[..., 0, h]) for name, values in mass.items()}
    return HeadStatistics(
        **rows,
        **listed,
        adjacency=tuple(float(values["adjacency"][0, h]) for values in by_size),
        drafts=tuple(states),
        exact_overlap=tuple(float(values["exact_overlap"][0, h]) for values in by_size) if has_exact else (),
        exact_persistence=tuple(float(values["exact_persistence"][0, h]) for values in by_size) if has_exact else (),
        rank_noise=float(noise[0, h]),
    )


def members(ids: Ids, size: int, num_blocks: int) -> Members:
    """Sets of the first `size` ids of a ranking [..., M], as [..., num_blocks]."""
    out = np.zeros((*ids.shape[:-1], num_blocks + 1), dtype=np.bool_)
    best = ids[..., :size]
    np.put_along_axis(out, np.where(best < 0, num_blocks, best).astype(np.int64), True, axis=-1)
    return out[..., :num_blocks]


def overlap(a: Members, b: Members, size: int) -> NDArray[np.float64]:
    """Mean over steps of |a ∩ b| / size: [L, H]."""
    if not len(a):
        return np.zeros(a.shape[1:3])
    share: NDArray[np.float64] = np.count_nonzero(a & b, axis=-1).mean(axis=0) / size
    return share


def _measure_size(
    true: Ids,
    drafts: Mapping[str, Ids],
    rows_of_kind: Mapping[tuple[int, str], NDArray[np.intp]],
    exact: Ids | None,
    size: int,
    num_blocks: NDArray[np.int64],
    lags: tuple[int, ...],
    num_recent: int,
) -> dict[str, Any]:
    """Statistics at one K; leading axes, then [L, H]. `drafts`: overlaps by (distance, kind) as in DraftState."""
    most = int(num_blocks.max())
    best = members(true, size, most)
    steps = np.arange(len(best))
    ages = [best[steps, ..., num_blocks - 2 - age].mean(axis=0) for age in range(num_recent)]
    middle = best[..., NUM_SINK_BLOCKS : int(num_blocks[0]) - 1 - num_recent]
    by_age = middle.mean(axis=0)[..., ::-1]  # as of the first step
    popularity = []
    for first, last in age_octaves(num_recent, by_age.shape[-1]):
        popular = -np.sort(-by_age[..., first - num_recent : last - num_recent], axis=-1)
        groups = popularity_groups(last - first)
        starts = (np.cumsum(groups) - groups).astype(np.intp)
        popularity.append(np.add.reduceat(popular, starts, axis=-1) / groups)
    pairs = np.count_nonzero(middle[..., 1:] & middle[..., :-1], axis=-1).sum(axis=0)
    base = np.count_nonzero(middle[..., :-1], axis=-1).sum(axis=0)
    overlaps = {
        (j, kind): draft_overlaps(drafts[f"draft{j}"], best, rows, rows_of_kind.get((j, "right")), size)
        for (j, kind), rows in rows_of_kind.items()
    }
    by_mass = None if exact is None else members(exact, size, most)
    return {
        "persistence": np.stack([overlap(best[lag:], best[:-lag], size) for lag in lags]),
        "sink": np.moveaxis(best[..., :NUM_SINK_BLOCKS].mean(axis=0), -1, 0),
        "recency": np.stack(ages),
        "popularity": np.moveaxis(np.concatenate(popularity, axis=-1), -1, 0),
        "adjacency": np.divide(pairs, base, out=np.zeros(pairs.shape), where=base > 0),
        "exact_overlap": np.zeros(0) if by_mass is None else overlap(by_mass, best, size),
        "exact_persistence": np.zeros(0) if by_mass is None else overlap(by_mass[1:], by_mass[:-1], size),
        "drafts": overlaps,
    }


def draft_overlaps(
    ids: Ids, best: Members, rows: NDArray[np.intp], right: NDArray[np.intp] | None, size: int
) -> dict[str, NDArray[np.float64]]:
    """Of the draft rows `rows`, by the names of DraftState, [L, H]. right: the rows of right guesses."""
    draft = members(ids, size, best.shape[-1])
    after, before = (np.empty(0, np.intp) if right is None else np.intersect1d(rows, right + d) for d in (1, -1))
    alone = np.setdiff1d(rows, after)
    if right is rows or not len(alone):
        after = before = np.empty(0, np.intp)
        alone = rows
    out = {
        "with_true": overlap(draft[rows], best[rows], size),
        "with_before": overlap(draft[alone], best[alone - 1], size),
    }
    for name, pairs, step in (
        ("with_next", np.intersect1d(rows, rows - 1), 1),
        ("after_right", after, -1),
        ("before_right", before, 1),
    ):
        if len(pairs) >= _MIN_PAIRS:
            out[name] = overlap(draft[pairs], draft[pairs + step], size)
    return out


def _draft_kinds(
    group: TraceGroup, block_size_tokens: int
) -> tuple[list[DraftKinds], dict[tuple[int, str], NDArray[np.intp]]]:
    """Kinds of draft rows by distance, and the positions of each (distance, kind)."""
    kinds: list[DraftKinds] = []
    rows: dict[tuple[int, str], NDArray[np.intp]] = {}
    distances = sorted(draft_distance(name) for name in group.rankings(block_size_tokens) if draft_distance(name))
    for j in distances[: next((i for i, j in enumerate(distances) if j != i + 1), None)]:
        positions = np.arange(j, group.num_positions)
        kind_of = np.full(group.num_positions, "all", dtype="<U8")
        drafter: DrafterAttributes | None = group.attributes.drafter if isinstance(group, FileGroup) else None
        if isinstance(group, FileGroup) and drafter is not None and drafter.acceptance is not None:
            guessed, accepted = group.array(f"draft{j}/token"), group.array(f"draft{j}/accepted")
            kind_of = np.where(accepted > 0, "right", np.where(guessed < 0, "fallback", "wrong"))
        found = sorted(set(kind_of[positions].tolist()))
        for kind in found:
            rows[j, kind] = positions[kind_of[positions] == kind]
        right = kind_of[positions] == "right"
        again = float((right[1:] & right[:-1]).sum() / max(1, right[:-1].sum()))
        shares = {kind: round(len(rows[j, kind]) / len(positions), 6) for kind in found}
        kinds.append(DraftKinds(shares=shares, repeats=max(again, shares.get("right", 0.0))))
    return kinds, rows


def _block_mass(group: TraceGroup, block_size_tokens: int) -> BlockMass | None:
    """None for a request without any recorded mass: its statistics are those of its sets."""
    try:
        return group.mass(block_size_tokens)
    except TraceError:
        return None


def _measure_mass(
    dense: NDArray[np.float32],
    true: Ids,
    exact: Ids | None,
    sizes: tuple[int, ...],
    ranks: tuple[int, ...],
    num_blocks: NDArray[np.int64],
) -> dict[str, NDArray[np.float64]]:
    """Where the softmax mass lies, [..., L, H]. dense: [S, L, H, n], overwritten."""
    steps = np.arange(len(dense))
    open_mass = dense[steps, ..., num_blocks - 1]
    out = {"sink_mass": dense[..., 0].mean(axis=0), "open_mass": open_mass.mean(axis=0)}
    for name, ids in (("true", true), ("exact", exact)):
        if ids is None:
            continue
        values = np.where(ids >= 0, np.take_along_axis(dense, np.maximum(ids, 0).astype(np.int64), axis=-1), 0.0)
        out[f"{name}_coverage"] = np.stack([values[..., :size].sum(axis=-1).mean(axis=0) for size in sizes])
    same = np.flatnonzero(np.diff(num_blocks) == 0) + 1
    out["stale_loss"] = stale_losses(dense[same], true[same], true[same - 1], sizes).mean(axis=1)
    dense[steps, ..., num_blocks - 1] = 0.0
    dense[..., 0] = 0.0
    order = -np.sort(-dense, axis=-1)
    octaves = np.log2(np.maximum(order, 2.0**-40)) - np.log2(np.maximum(order[..., :1], 2.0**-40))
    curve = np.minimum.accumulate(octaves.mean(axis=0), axis=-1)
    out["octaves_by_rank"] = np.stack([curve[..., rank - 1] for rank in ranks])
    return {name: np.asarray(values, dtype=np.float64) for name, values in out.items()}


def stale_losses(dense: NDArray[np.float32], now: Ids, before: Ids, sizes: Sequence[int]) -> NDArray[np.float64]:
    """Mass [..., n] on the first K ids of `now` less that on those of `before`, both [..., M], by K: [K, ...]."""
    held = []
    for ids in (now, before):
        values = np.where(ids >= 0, np.take_along_axis(dense, np.maximum(ids, 0).astype(np.int64), axis=-1), 0.0)
        held.append(np.cumsum(values, axis=-1, dtype=np.float64)[..., [size - 1 for size in sizes]])
    losses: NDArray[np.float64] = np.moveaxis(held[0] - held[1], -1, 0)
    return losses


def _rank_noise(true: Ids, num_blocks: NDArray[np.int64]) -> NDArray[np.float64]:
    """[L, H]; only blocks ranked in both steps count, so it is a lower bound of the noise."""
    num_ranked = true.shape[-1]
    score = threshold_of((np.arange(num_ranked) + 0.5) / int(num_blocks[0]))
    table = np.full((*true.shape[:-1], int(num_blocks.max()) + 1), np.nan)
    at = np.where(true < 0, table.shape[-1] - 1, true).astype(np.int64)
    np.put_along_axis(table, at, np.broadcast_to(score, true.shape), axis=-1)
    change = np.diff(table[..., :-1], axis=0)
    noise: NDArray[np.float64] = np.nan_to_num(np.nanstd(change, axis=(0, -1)))
    return noise


def _shares(values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _listed(values: NDArray[np.float64]) -> float | tuple[float, ...]:
    return float(values) if values.ndim == 0 else _shares(values)
