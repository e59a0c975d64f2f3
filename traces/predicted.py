"""Predicted block sets beside true ones, a layer at a time: who is in both, and the attention mass that each reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from traces.file_group import FileGroup
from traces.group import TraceGroup
from traces.mass import BlockMass
from traces.schema import STEPS_PER_CHUNK, masked_rows

Bools = NDArray[np.bool_]
Guess = Literal["right", "wrong", "none"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predictor at a distance: row t − shift of `ranking` is its set for step t."""

    predictor: str
    selector: str
    """minmax or exact: the ranking that it is to match."""
    distance: int
    ranking: str
    shift: int

    @property
    def true_ranking(self) -> str:
        return "exact" if self.selector == "exact" else "true"


@dataclass(frozen=True, slots=True)
class Window:
    """Steps [start, stop) of one layer, membership of the K blocks [W, H, n], n the blocks of the last step.

    true: the step's own set. predicted: what was predicted for it. before: the set of the step that predicted.
    open: the open block, which attention always reads. filled: blocks that filled since the prediction, which are
    resident without a fetch (docs/decisions.md, 1); both [W, 1, n]. mass: float32, or null where not every block's
    was recorded.
    """

    start: int
    stop: int
    true: Bools
    predicted: Bools
    before: Bools
    open: Bools
    filled: Bools
    mass: NDArray[np.float32] | None


def predictions(group: TraceGroup, block_size_tokens: int, max_distance: int) -> Iterator[Prediction]:
    """What can be compared at a block size: previous step, drafts as recorded, and by exact mass where it is fine.

    A compact copy's masses are too coarse to rank by.
    """
    recorded = group.rankings(block_size_tokens)
    fine = group.has_block_mass(block_size_tokens) and not _has_coarse_mass(group, block_size_tokens)
    for distance in range(1, min(max_distance, group.num_positions - 1) + 1):
        yield Prediction("previous", "minmax", distance, "true", distance)
        for name, predictor in ((f"draft{distance}", "draft"), (f"draft{distance}_sparse", "draft_sparse")):
            if name in recorded:
                yield Prediction(predictor, "minmax", distance, name, 0)
        if fine:
            yield Prediction("previous", "exact", distance, "exact", distance)


def windows(
    group: TraceGroup, block_size_tokens: int, num_blocks: int, index: int, prediction: Prediction
) -> Iterator[Window]:
    """The steps that have a prediction, `STEPS_PER_CHUNK` at a time. index: of the recorded layer."""
    selectable = (group.kv_len - 1) // block_size_tokens
    true = group.ranking(prediction.true_ranking, block_size_tokens)
    predicted = group.ranking(prediction.ranking, block_size_tokens)
    mass = group.mass(block_size_tokens) if group.has_block_mass(block_size_tokens) else None
    distance, shift = prediction.distance, prediction.shift
    for start in range(distance, group.num_positions, STEPS_PER_CHUNK):
        stop = min(start + STEPS_PER_CHUNK, group.num_positions)
        width = int(selectable[stop - 1]) + 1
        now, then = selectable[start:stop, None, None], selectable[start - distance : stop - distance, None, None]
        block = np.arange(width)
        rows = slice(start, stop)
        yield Window(
            start,
            stop,
            true=members(true[rows, index, :, :num_blocks], width),
            predicted=members(predicted[start - shift : stop - shift, index, :, :num_blocks], width),
            before=members(true[start - distance : stop - distance, index, :, :num_blocks], width),
            open=block == now,
            filled=(block >= then) & (block < now),
            mass=None if mass is None else _dense(mass, rows, index, width),
        )


def members(ids: NDArray[np.int32], width: int) -> Bools:
    """Which of the blocks 0 … width − 1 are among ids [..., K] (−1: none): bool [..., width]."""
    found = np.zeros((*ids.shape[:-1], width + 1), bool)
    np.put_along_axis(found, np.where(ids < 0, width, ids).astype(np.int64), True, axis=-1)
    return found[..., :width]


def held(mass: NDArray[np.float32], blocks: Bools) -> NDArray[np.float64]:
    """Mass [W, H, n] on `blocks`, [W, H]."""
    total: NDArray[np.float64] = np.where(blocks, mass, 0).sum(axis=-1, dtype=np.float64)
    return total


def guesses(group: TraceGroup, distance: int) -> Mapping[Guess, Bools]:
    """Steps [S] by what was guessed for them `distance` before: the right token, a wrong one, none.

    Empty where that is not recorded. Steps before `distance` are in none of them.
    """
    right = group.accepted(distance)
    if right is None:
        return {}
    issued = np.arange(group.num_positions) >= distance
    guessed = group.array(f"draft{distance}/token") >= 0 if isinstance(group, FileGroup) else np.ones_like(issued)
    return {"right": right & issued, "wrong": ~right & guessed & issued, "none": ~right & ~guessed & issued}


def set_is_exact(group: TraceGroup, block_size_tokens: int, ranking: str, num_blocks: int) -> bool:
    """Whether the best K of a ranking are as recorded. A compact copy's drafts are, at the sizes of its nested sets."""
    if not isinstance(group, FileGroup) or not masked_rows(ranking):
        return True
    block = group.attributes.blocks[block_size_tokens]
    return block.draft_sets is None or num_blocks in (*block.draft_sets, block.max_ranked_blocks)


def _has_coarse_mass(group: TraceGroup, block_size_tokens: int) -> bool:
    if not isinstance(group, FileGroup):
        return False
    return any(block.mass_resolution == "compact" for block in group.attributes.blocks.values())


def _dense(mass: BlockMass, rows: slice, index: int, width: int) -> NDArray[np.float32]:
    part = BlockMass(mass.levels[rows, index, :, :width], mass.scale[rows, index], mass.outside[rows, index])
    return part.dense()
