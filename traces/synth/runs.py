"""What a layer's process ranks over many steps, and which of several draws of it is the most typical one.

Blocks change slowly, so that one draw of few heads is uncertain by several percent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from traces.codec import Ids
from traces.synth.kinds import beside_right
from traces.synth.measure import members, overlap
from traces.synth.process import LayerProcess, Scores

ENOUGH_HEADS = 8
"""A layer of fewer heads is drawn several times, about as many heads in all: it costs no more than one of eight."""
_LEAST_SHARE = 1e-3


def ranked_rows(
    process: LayerProcess, kinds: Sequence[NDArray[np.str_]], context: int, num_steps: int, size: int, count: int
) -> Ids:
    """Best `count` blocks of `true` and of the drafts 1, 2, … as [1 + D, S, H, count], from `context` tokens on; −1
    where there is no draft. The process is spent."""
    best = np.full((1 + len(kinds), num_steps, len(process.heads), count), -1, np.int32)
    for step in range(num_steps):
        for j, scores in scores_of_step(process, kinds, context, step, size):
            best[j, step] = best_blocks(scores, count)
    return best


def scores_of_step(
    process: LayerProcess, kinds: Sequence[NDArray[np.str_]], context: int, step: int, size: int
) -> Iterator[tuple[int, Scores]]:
    """Advance to `step`; the scores of `true` as 0 and of the drafts 1, 2, … that there are, each over the blocks that
    it may select, [H, n]."""
    selectable = (context + step - 1) // size
    process.advance(selectable)
    yield 0, process.scores[:, :selectable]
    for j, of_step in enumerate(kinds, start=1):
        if step >= j:
            after, before = beside_right(of_step, step, j)
            drafted = process.draft_scores(j, str(of_step[step]), after_right=after, before_right=before)
            yield j, drafted[:, : (context + step - j - 1) // size]


def best_blocks(scores: Scores, count: int) -> Ids:
    """Ids of the best `count` blocks, best first, [H, count]."""
    top = np.argpartition(-scores, count - 1, axis=-1)[:, :count]
    order = np.argsort(-np.take_along_axis(scores, top, axis=-1), axis=-1)
    return np.take_along_axis(top, order, axis=-1).astype(np.int32)


def num_draws(num_heads: int) -> int:
    """Of a layer with so many heads."""
    return max(1, round(ENOUGH_HEADS / num_heads))


def most_typical(rows_of: Callable[[int], Ids], draws: int, set_sizes: Sequence[int]) -> int:
    """The draw whose sets come nearest to the mean of all draws in what they share: with those of the step before and,
    drafts, with those that they are for. rows_of: `ranked_rows` of draw 0, 1, …."""
    if draws == 1:
        return 0
    found = np.log([_changes(rows_of(draw), set_sizes) for draw in range(draws)])
    off = (found - found.mean(axis=0)) ** 2
    return int(np.argmin((off / np.maximum(off.mean(axis=0), 1e-12)).sum(axis=-1)))


def _changes(rows: Ids, set_sizes: Sequence[int]) -> list[float]:
    """Shares of the K best blocks, by K and ranking: new since the step before; of drafts, not needed."""
    found, num_blocks = [], int(rows.max()) + 1
    for set_size in set_sizes:
        true = members(rows[0], set_size, num_blocks)[:, None]
        for j, of_ranking in enumerate(rows):
            sets = members(of_ranking, set_size, num_blocks)[:, None] if j else true
            shared = [overlap(sets[j + 1 :], sets[j:-1], set_size)]
            shared += [overlap(sets[j:], true[j:], set_size)] if j else []
            found += [max(_LEAST_SHARE, 1.0 - float(share.mean())) for share in shared]
    return found
