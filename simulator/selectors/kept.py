"""Rankings without a query, from the attention mass that blocks have had or from their positions: what to keep.

Scores are integers, so that no order of summation matters. Masses are those of dense attention, as everywhere in
replay; a live system would see them divided by the share that its resident blocks hold.
`simulator.selectors.kept_reference` states the same per step in plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.group import TraceGroup

Int64 = NDArray[np.int64]

UNITS_PER_MASS = 2**32
"""Integer mass: 4,096 steps of a whole row stay below 2^45, `UNIMPORTANT`."""
UNIMPORTANT = 2**45
"""One step without importance outweighs all mass of a history."""
RECENT = 2**60
SINK = 2**61
NOT_SELECTABLE = -(2**62)


@dataclass(frozen=True, slots=True)
class Keeping:
    """Resolved choices of a selector that keeps."""

    selector: str
    block_size_tokens: int
    recent_blocks: int = 0
    """Newest selectable blocks that rank before all others, newest first."""
    sink_blocks: int = 0
    """First blocks of the context that rank before the recent ones (sink-recent)."""
    history_steps: int = 0
    """Steps that `persistence` looks back over, the current one included."""
    from_prompt: bool = False
    """Whether accumulated-mass starts with the sums of the prompt's queries."""


def kept_ranking(group: TraceGroup, keeping: Keeping, num_blocks: NDArray[np.int32]) -> NDArray[np.int32]:
    """Selectable blocks best first, int32 [S, L, H, n_max − 1], −1 past a row's end.

    Row t knows the attention of steps up to t. num_blocks: int32 [S], the open block included. Ties go to the lower id.

    - sink-recent: the first blocks, then the newest (StreamingLLM, arXiv 2309.17453).
    - prompt-window: blocks with generated tokens, newest first, then by the mass that the prompt's last queries gave
      (SnapKV, arXiv 2404.14469).
    - accumulated-mass: the recent blocks, then by the mass summed over the steps of the trace, or over the prompt's
      queries too (H2O, arXiv 2306.14048).
    - persistence: the recent blocks, then by the number of steps of the history in which the block's mass was below
      its share of an even spread, fewest first, then by the history's mass (Scissorhands, arXiv 2305.17118).
    """
    width = max(1, int(num_blocks.max()) - 1)
    layers = group.layers(keeping.block_size_tokens)
    ranking = np.empty((len(num_blocks), len(layers), group.num_kv_heads, width), dtype=np.int32)
    ids = np.arange(width)
    selectable = ids < num_blocks[:, None] - 1
    recent = selectable & (ids >= num_blocks[:, None] - 1 - keeping.recent_blocks)
    for layer in range(len(layers)):
        score = np.broadcast_to(_scores(group, keeping, layer, width), ranking[:, layer].shape).copy()
        score[np.broadcast_to(recent[:, None], score.shape)] = 0
        score += np.where(recent, RECENT + ids, 0)[:, None]
        score[..., : keeping.sink_blocks] = SINK - ids[: keeping.sink_blocks]
        score[np.broadcast_to(~selectable[:, None], score.shape)] = NOT_SELECTABLE
        order = np.argsort(-score, axis=-1, kind="stable")
        ranking[:, layer] = np.where(np.take_along_axis(score, order, -1) == NOT_SELECTABLE, -1, order)
    return ranking


def _scores(group: TraceGroup, keeping: Keeping, layer: int, width: int) -> Int64 | NDArray[Any]:
    """Scores [S, H, width] of blocks that are neither sinks nor recent."""
    size = keeping.block_size_tokens
    if keeping.selector == "sink-recent":
        return np.arange(width)
    if keeping.selector == "prompt-window":
        window = group.prompt_window_mass(size)
        assert window is not None
        score = _widened(mass_units(window[layer]), width)
        generated = np.arange(width) >= (int(group.kv_len[0]) - 1) // size
        return np.where(generated, RECENT + np.arange(width), score)
    mass = group.mass(size)
    levels = type(mass)(mass.levels[:, layer], mass.scale[:, layer], mass.outside[:, layer])
    units = mass_units(levels.dense())[..., :width]
    total = np.cumsum(units, axis=0)
    if keeping.selector == "accumulated-mass":
        if not keeping.from_prompt:
            return total
        prompt = group.prefill_mass(size)
        assert prompt is not None
        return total + (int(group.kv_len[0]) - 1) * _widened(mass_units(prompt[layer]), width)
    exists = np.arange(width) < -(-group.kv_len.astype(np.int64) // size)[:, None]
    even = units * group.kv_len.astype(np.int64)[:, None, None] >= UNITS_PER_MASS * size
    unimportant = np.cumsum(exists[:, None] & ~even, axis=0, dtype=np.int64)
    return _last(total, keeping.history_steps) - UNIMPORTANT * _last(unimportant, keeping.history_steps)


def _widened(units: Int64, width: int) -> Int64:
    """Rows [H, n] of the prompt's blocks as [H, width]: blocks that came later had none of its mass."""
    kept = units[:, :width]
    return np.pad(kept, ((0, 0), (0, width - kept.shape[1])))


def _last(running: Int64, num_steps: int) -> Int64:
    """Sums over the last `num_steps` rows from running sums over all rows."""
    window = running.copy()
    window[num_steps:] -= running[:-num_steps]
    return window


def mass_units(mass: NDArray[np.floating[Any]]) -> Int64:
    """Integer mass, rounded down."""
    return (np.asarray(mass, dtype=np.float64) * UNITS_PER_MASS).astype(np.int64)
