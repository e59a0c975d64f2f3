"""From one step's attention to the rows of a trace: rankings, masses, and drafts on their way to their position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realhw.hook import RecordError, StepAttention
from traces.codec import rank_scores
from traces.mass import quantise_mass
from traces.schema import DrafterAttributes, GroupAttributes, mass_source
from traces.writer import StepRecord

Ranked = tuple[NDArray[np.int32], NDArray[np.uint8]]
"""Ids and levels, [L_P, H, M] in rank order."""
Issued = Mapping[tuple[int, str], Ranked]
"""By (block size, "" or "_sparse")."""


class DraftQueue:
    """Draft rows on their way from the step that issued them to the position they predict."""

    def __init__(self, distances: int) -> None:
        self.distances = distances
        self._due: dict[tuple[int, int], tuple[int | None, Issued]] = {}
        self._accepted = np.zeros(distances, np.int64)
        self._fallback = np.zeros(distances, np.int64)
        self._rows = np.zeros(distances, np.int64)

    def issue(self, position: int, distance: int, token: int | None, ranked: Issued) -> None:
        self._due[position + distance, distance] = (token, ranked)

    def take(self, position: int, real_token: int) -> dict[int, tuple[int | None, Issued]]:
        """Guessed token and rankings for `position`, by distance; those not issued (the first rows) are absent."""
        due = {}
        for distance in range(1, self.distances + 1):
            entry = self._due.pop((position, distance), None)
            if entry is not None:
                due[distance] = entry
                self._rows[distance - 1] += 1
                self._accepted[distance - 1] += entry[0] == real_token
                self._fallback[distance - 1] += entry[0] is None
        return due

    def summary(self, drafter: DrafterAttributes | None) -> DrafterAttributes | None:
        """`drafter` with what was accepted and what had no guess, by distance."""
        if drafter is None:
            return None
        rows = np.maximum(self._rows, 1)
        return drafter.model_copy(
            update={
                "acceptance": tuple(round(float(x), 6) for x in self._accepted / rows),
                "fallback_share": tuple(round(float(x), 6) for x in self._fallback / rows),
            }
        )


def step_record(
    attention: StepAttention,
    token: int,
    kv_len: int,
    group: GroupAttributes,
    queue: DraftQueue,
    guesses: Sequence[int],
    sparse: Mapping[int, NDArray[np.float32]] | None = None,
) -> StepRecord:
    """Rank this step's rows, queue the guesses' rankings and collect those that are due.

    sparse: by the one block size where they are recorded, scores [L_P, H, R, n − 1] of the pass over a working set.

    Raises RecordError for scores or masses that are not finite.
    """
    rankings: dict[tuple[int, str], Ranked] = {}
    mass, rest = {}, {}
    rows: dict[tuple[int, str], Ranked] = {}
    for size, block in group.blocks.items():
        ids, levels = rows[size, ""] = _ranked(attention.scores[size], group, size, kv_len)
        rankings[size, "true"] = (ids[:, :, 0], levels[:, :, 0])
        for name in ("mean", "prev_layer"):
            if name in block.rankings:
                ranked = _ranked(attention.other_scores[size, name], group, size, kv_len)
                rankings[size, name] = _with_first_layer(ranked, len(block.layers))
        blocks = attention.mass[size].astype(np.float64)
        if not np.isfinite(blocks).all():
            raise RecordError(f"KV length {kv_len}, block size {size}: attention mass is not finite")
        inside = np.where(ids[:, :, 0] >= 0, np.take_along_axis(blocks, np.maximum(ids[:, :, 0], 0), axis=-1), 0)
        rest[size] = (blocks.sum(axis=-1) - inside.sum(axis=-1)).astype(np.float32)
        if block.block_mass or mass_source(group.blocks, size) is None:
            mass[size] = quantise_mass(blocks)
    for size, scores in (sparse or {}).items():
        rows[size, "_sparse"] = _ranked(scores, group, size, kv_len)
    due = queue.take(kv_len, token)
    for distance, (_, predicted) in due.items():
        for (size, kind), ranked in predicted.items():
            rankings[size, f"draft{distance}{kind}"] = ranked
    for distance in range(1, queue.distances + 1):
        row = distance if distance <= len(guesses) else 0
        issued = {key: (ids[:, :, row], levels[:, :, row]) for key, (ids, levels) in rows.items()}
        queue.issue(kv_len, distance, guesses[distance - 1] if row else None, issued)
    tokens = tuple(due[j][0] if j in due else None for j in range(1, queue.distances + 1))
    return StepRecord(kv_len, token, rankings, mass, rest, tokens, attention.query_cos)


def _ranked(scores: NDArray[np.float32], group: GroupAttributes, size: int, kv_len: int) -> Ranked:
    try:
        return rank_scores(scores, group.blocks[size].max_ranked_blocks, group.score_levels_per_octave)
    except ValueError as error:
        raise RecordError(f"KV length {kv_len}, block size {size}, [layer, head, row, block]: {error}") from error


def _with_first_layer(ranked: Ranked, num_layers: int) -> Ranked:
    """Empty rows in front where model layer 0, which no layer precedes, is among the recorded."""
    missing = num_layers - len(ranked[0])
    pad: Any = ((missing, 0), (0, 0), (0, 0))
    return np.pad(ranked[0], pad, constant_values=-1), np.pad(ranked[1], pad)
