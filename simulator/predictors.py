"""Which recorded ranking, and which row of it, a predictor offers for the blocks of a future step."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np
from numpy.typing import NDArray

from simulator.replay_settings import ReplaySettings
from simulator.selectors.kept import kept_ranking
from simulator.selectors.table import SELECTORS
from traces.errors import InputError
from traces.group import TraceGroup


@dataclass(frozen=True, slots=True)
class PredictedRanking:
    """The predictor's ranking for step r is ids[r − shift]; int32 [S, L, H, W], −1 past a row's end."""

    ids: NDArray[np.int32]
    shift: int
    near_ids: NDArray[np.int32] | None = None
    """Ranking one step ahead, for the urgent part of `refine`; row r is ids for step r."""


def recorded_ranking(group: TraceGroup, name: str, block_size_tokens: int, reason: str) -> NDArray[np.int32]:
    """A ranking of the trace. Raises InputError, saying what asked for it, where it was not recorded."""
    recorded = group.rankings(block_size_tokens)
    if name not in recorded:
        near = get_close_matches(name, recorded, n=3, cutoff=0.0)
        raise InputError(
            f"{reason} needs ranking {name!r}, which trace group {group.name!r} does not have at "
            f"{block_size_tokens} tokens a block; recorded: {', '.join(recorded)} (nearest: {', '.join(near)})"
        )
    return group.ranking(name, block_size_tokens)


def selector_ranking(group: TraceGroup, settings: ReplaySettings, num_blocks: NDArray[np.int32]) -> NDArray[np.int32]:
    """The selector's ranking per step, int32 [S, L, H, M]. num_blocks: int32 [S], the open block included."""
    if settings.keeping is not None:
        return kept_ranking(group, settings.keeping, num_blocks)
    name = SELECTORS[settings.selector].ranking
    assert name is not None
    return recorded_ranking(group, name, settings.block_size_tokens, f"selector {settings.selector!r}")


def draft_ranking(group: TraceGroup, settings: ReplaySettings, distance: int) -> NDArray[np.int32]:
    """What a draft token `distance` steps ahead predicted. Raises InputError beyond the recorded distances."""
    size = settings.block_size_tokens
    recorded = sorted(int(name[5:]) for name in group.rankings(size) if is_draft(name))
    if distance not in recorded:
        raise InputError(
            f"lookahead_k {settings.lookahead_k} needs drafts {distance} steps ahead; trace group {group.name!r} "
            f"records distances {', '.join(map(str, recorded)) or 'none'} at {size} tokens a block"
        )
    name = f"draft{distance}_sparse" if settings.draft_pass == "sparse" else f"draft{distance}"
    return recorded_ranking(group, name, size, f"draft_pass {settings.draft_pass!r}")


def previous_layer_ranking(
    group: TraceGroup, settings: ReplaySettings, true_ids: NDArray[np.int32]
) -> NDArray[np.int32]:
    """What the input of the layer before predicts for each step. Model layer 0 has none: its own query, on demand."""
    size = settings.block_size_tokens
    layers = group.layers(size)
    ids = recorded_ranking(group, "prev_layer", size, "predictor 'previous-layer'")
    if 0 not in layers:
        return ids
    first = layers.index(0)
    width = max(ids.shape[-1], true_ids.shape[-1])
    ids = np.pad(ids, ((0, 0), (0, 0), (0, 0), (0, width - ids.shape[-1])), constant_values=-1)
    ids[:, first, :, : true_ids.shape[-1]] = true_ids[:, first]
    return ids


def is_draft(name: str) -> bool:
    return name.startswith("draft") and name[5:].isdigit()


def predicted_ranking(
    group: TraceGroup,
    settings: ReplaySettings,
    num_blocks: NDArray[np.int32],
    true_ids: NDArray[np.int32],
    seed: int,
) -> PredictedRanking:
    """The predictor as rows of a ranking.

    num_blocks: int32 [S], blocks per step, the open one included. true_ids: the selector's ranking.
    """
    k = settings.lookahead_k
    if settings.predictor in ("current", "oracle"):
        return PredictedRanking(true_ids, 0)
    if settings.predictor == "previous":
        return PredictedRanking(true_ids, k)
    if settings.predictor == "previous-layer":
        return PredictedRanking(previous_layer_ranking(group, settings, true_ids), 0)
    if settings.predictor == "random":
        layers = group.layers(settings.block_size_tokens)
        ids = random_ranking(layers, group.num_kv_heads, num_blocks, settings.num_kept, k, seed)
        return PredictedRanking(ids, 0)
    if settings.lookahead_mode == "union":
        drafts = [draft_ranking(group, settings, distance) for distance in range(1, k + 1)]
        return PredictedRanking(interleave(drafts, k), 0)
    near = draft_ranking(group, settings, 1) if settings.lookahead_mode == "refine" else None
    return PredictedRanking(draft_ranking(group, settings, k), 0, near)


def random_ranking(
    layers: tuple[int, ...], num_kv_heads: int, num_blocks: NDArray[np.int32], num_kept: int, k: int, seed: int
) -> NDArray[np.int32]:
    """K blocks drawn without replacement per (row, layer, head) from those selectable when the plan is made.

    Row r ranks blocks 0 … num_blocks[r − k] − 2; rows r < k are masked. Each (layer, head) has its own stream, so
    that recording more layers does not change a layer's draw.
    """
    num_steps = len(num_blocks)
    ids = np.full((num_steps, len(layers), num_kv_heads, num_kept), -1, dtype=np.int32)
    selectable = num_blocks[: max(num_steps - k, 0), None] - 1
    if not selectable.size or selectable.max() < 1:
        return ids
    columns = np.arange(selectable.max())
    width = min(num_kept, len(columns))
    for index, layer in enumerate(layers):
        for head in range(num_kv_heads):
            draw = np.random.default_rng([seed, layer, head]).random((len(selectable), len(columns)))
            draw[columns >= selectable] = 2.0
            order = np.argsort(draw, axis=1, kind="stable")[:, :width]
            ids[k:, index, head, :width] = np.where(columns[:width] < selectable, order, -1)
    return ids


def interleave(drafts: list[NDArray[np.int32]], k: int) -> NDArray[np.int32]:
    """Rank-wise interleave of draft j at row r − k + j for each target row r, nearest first, duplicates dropped.

    Each draft: int32 [S, L, H, M]. Returns int32 [S, L, H, k·M]; rows r < k are masked.
    """
    num_steps = len(drafts[0])
    parts = [np.full_like(draft, -1) for draft in drafts]
    for j, (part, draft) in enumerate(zip(parts, drafts, strict=True), start=1):
        part[k:] = draft[j : num_steps - k + j]
    return merge_ranks(parts)


def merge_ranks(parts: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Rank 0 of each part, then rank 1 of each, …, duplicates and negative ids dropped.

    Each part: int32 [S, L, H, M]. Returns int32 [S, L, H, M · parts], −1 past a row's end.
    """
    from simulator.replay_kernel import drop_duplicates

    merged = np.stack(parts, axis=-1)
    rows = merged.reshape(-1, merged.shape[-2] * merged.shape[-1])
    drop_duplicates(rows, int(rows.max(initial=0)) + 1)
    return rows.reshape(*merged.shape[:-2], -1)
