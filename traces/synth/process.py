"""Runs the fitted process of one layer: scores, draft scores and softmax mass of every block, step by step.

Holds the scores of one step and of the few before it that drafts look back to; all arrays are [H, n] of float32.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from traces.synth.fit import HeadProcess
from traces.synth.normal import FloatArray, threshold_of

Scores = NDArray[np.float32]
_KERNEL_BLOCKS = 64
"""Length of the kernel that correlates the levels of neighbouring blocks."""
_MASS_KNOTS = 128
_MOST_KEPT = 1 << 18
_LEVEL_BINS = 64
"""In which the weights of draft rows are told apart."""
_LEAST_MASS = 1e-9


class LayerProcess:
    """One layer's KV heads. `advance` once per step, then read `scores`, `draft_scores` and `mass`."""

    def __init__(
        self,
        heads: Sequence[HeadProcess],
        capacity_blocks: int,
        first_selectable: int,
        mass_ranks: FloatArray,
        num_distances: int,
        rng: np.random.Generator,
    ) -> None:
        self.heads, self._rng, self._mass_ranks = tuple(heads), rng, mass_ranks
        self._shape = (len(heads), capacity_blocks)
        self._own = np.stack([self._placed(head, capacity_blocks, first_selectable) for head in heads])
        noise = np.array([head.mass_noise for head in heads], np.float32)
        self._mass_follows = np.array([[head.mass_follows] for head in heads], np.float32)
        self._mass_shift = self._normal() * noise[:, None]
        self._next = (self._normal(), self._normal(), self._normal())
        self._other = tuple(self._normal() for _ in range(2 if num_distances else 0))
        self._keep = [
            np.array([[np.exp(-1.0 / getattr(head, name))] for head in heads], np.float32)
            for name in ("fast_steps", "slow_steps")
        ]
        self._past: deque[Scores] = deque(maxlen=max(2, num_distances + 1))
        self._num_selectable = -1
        self._draft_weights: dict[tuple[int, str, bool, bool], tuple[Scores | None, ...]] = {}
        self._at_these_levels: dict[int, Scores] = {}
        """By id of an array of `_draft_weights`, which stay."""
        self._curves: dict[tuple[int, float | None], tuple[FloatArray, FloatArray]] = {}
        self.scores: Scores = np.empty(self._shape, np.float32)
        """Of the current step; only the first `num_selectable` columns mean anything."""

    def advance(self, num_selectable: int) -> None:
        """Go to the next step, at which blocks 0 … num_selectable − 1 may be selected."""
        if num_selectable != self._num_selectable:
            self._set_levels(num_selectable)
        fast, slow, white = self._next
        self._steady = self._fast_scale * fast + self._slow_scale * slow
        self._white = self._white_scale * white
        self._past.append(self._steady + self._white)
        self.scores = self._levels + self._past[-1]
        for state, keep in zip((fast, slow, *self._other), itertools.cycle(self._keep)):
            state *= keep
            state += np.sqrt(1.0 - keep**2) * self._normal()
        self._next = (fast, slow, self._normal())

    def draft_scores(
        self, distance: int, kind: str, *, after_right: bool = False, before_right: bool = False
    ) -> Scores:
        """Scores by a draft of this kind, made `distance` steps ago for the current step.

        after_right, before_right: whether the row of the step before, and of the next, is of a right guess.
        """
        scores: Scores
        if kind == "fallback":
            scores = self._levels + self._past[-1 - distance]
            return scores
        steady, white, before, after, rest, own = self._weights(distance, kind, after_right, before_right)
        scores = self._levels.copy()
        for weight, noise in ((steady, self._steady), (white, self._white), (before, self._past[-2])):
            if weight is not None:
                scores += self._at_levels(weight) * noise
        if after is not None:
            fast, slow, next_white = self._next
            following = self._fast_scale * fast + self._slow_scale * slow + self._white_scale * next_white
            scores += self._at_levels(after) * following
        if rest is not None:
            scores += self._at_levels(rest) * self._other_noise(own)
        return scores

    def _other_noise(self, own: Scores | None) -> Scores:
        """Of a process beside this one with the same time constants: what a wrong guess attends to instead.

        own: how much of this process's steady variance it has, [H, bins].
        """
        if own is None:
            return self._normal()
        steady = self._at_levels(own)
        variance = steady * (self._fast_scale**2 + self._slow_scale**2)
        fast, slow = self._other
        white: Scores = np.sqrt(np.maximum(1.0 - variance, 0.0)) * self._normal()
        white += np.sqrt(steady) * (self._fast_scale * fast + self._slow_scale * slow)
        return white

    def _weights(self, distance: int, kind: str, after_right: bool, before_right: bool) -> tuple[Scores | None, ...]:
        """`DraftNoise.weights` of every head by bin of level, each [H, bins]; None where all are 0."""
        key = (distance, kind, after_right, before_right)
        if key not in self._draft_weights:
            rows = []
            for head in self.heads:
                of_head = head.drafts[distance - 1][kind].weights(after_right, before_right)
                bins = np.linspace(head.noise_levels[0], head.noise_levels[-1], _LEVEL_BINS)
                rows.append([np.interp(bins, head.noise_levels, weight) for weight in of_head])
            by_name = np.moveaxis(np.array(rows, np.float32), 1, 0)
            self._draft_weights[key] = tuple(weight if weight.any() else None for weight in by_name)
        return self._draft_weights[key]

    def _at_levels(self, by_bin: Scores) -> Scores:
        """Values by head and bin of level, at the blocks' levels; for contexts of few blocks kept until the next one
        comes. Not to be written to."""
        if id(by_bin) in self._at_these_levels:
            return self._at_these_levels[id(by_bin)]
        values: Scores = by_bin.ravel()[self._level_bins]
        if values.size <= _MOST_KEPT:
            self._at_these_levels[id(by_bin)] = values
        return values

    def log2_mass(self, follows: float | None = None) -> Scores:
        """log2 of the softmax mass of every block of the current step, the open one last, [H, num_selectable + 1].

        The blocks between the sink and the open block follow the measured curve of mass by rank, at ranks that come
        from the score plus a shift that is fixed per block. Where it was measured what the K best by score hold, the
        blocks between one K and the next are scaled to hold that. The sink's and the open block's shares are constant.
        follows: instead of every head's own.
        """
        count = self._num_selectable
        share_of_noise = self._mass_follows if follows is None else np.float32(follows)
        noise = share_of_noise * (self.scores[:, :count] - self._levels[:, :count])
        shifted: Scores = self._levels[:, :count] + noise + self._mass_shift[:, :count]
        out = np.empty((len(self.heads), count + 1), np.float32)
        for index, head in enumerate(self.heads):
            between = np.interp(shifted[index, 1:], *self._mass_curve(index, follows, shifted[index, 1:])).astype(
                np.float32
            )
            if len(head.held):
                between += self._held_correction(index, between)
            share = max(1.0 - head.sink_mass - head.open_mass, _LEAST_MASS)
            out[index, 1:count] = between + np.log2(share / np.exp2(between).sum(dtype=np.float64))
            out[index, 0] = np.log2(max(head.sink_mass, _LEAST_MASS))
            out[index, count] = np.log2(max(head.open_mass, _LEAST_MASS))
        return out

    def _mass_curve(self, index: int, follows: float | None, shifted: Scores) -> tuple[FloatArray, FloatArray]:
        """Octaves by score, ascending; made when blocks come, and kept until the next ones."""
        if (index, follows) not in self._curves:
            ranks = np.unique(np.geomspace(1, len(shifted), _MASS_KNOTS).astype(int))
            best = -np.sort(-shifted)[ranks - 1]
            octaves = rank_octaves(ranks, self._mass_ranks, self.heads[index].octaves_by_rank)
            rising = best[::-1].astype(np.float64) + 1e-9 * np.arange(len(ranks))
            self._curves[index, follows] = rising, octaves[::-1]
        return self._curves[index, follows]

    def _held_correction(self, index: int, between: Scores) -> Scores:
        """Octaves to add to those of blocks 1, 2, … so that each group of ranks by score holds its share."""
        groups, shares = self._score_groups(index)
        order = np.argsort(-self.scores[index, : len(between) + 1])
        group_of = np.empty(len(order), np.intp)
        group_of[order] = groups
        group_of = group_of[1:]
        has = np.bincount(group_of, np.exp2(between.astype(np.float64)), len(shares))
        correction: Scores = np.log2(shares / np.maximum(has, 1e-300))[group_of].astype(np.float32)
        return correction

    def _score_groups(self, index: int) -> tuple[NDArray[np.intp], FloatArray]:
        """Group of each rank by score, and the share of the mass between sink and open block of each group.

        The last group is what no K reaches. At another context than the measured it weighs as much more or less as
        the curve of mass by rank says of the ranks in it.
        """
        head, count = self.heads[index], self._num_selectable
        sizes = head.set_sizes[head.set_sizes < count]
        held = head.held[: len(sizes)]
        groups = np.searchsorted(sizes, np.arange(count), side="right")
        shares = np.diff(np.concatenate([[0.0], held, [1.0]]))
        first = int(sizes[-1]) + 1 if len(sizes) else 1
        tails = [self._tail(index, first, blocks) for blocks in (head.source_blocks - 1, count)]
        if tails[0] > 0:
            shares[-1] *= tails[1] / tails[0]
        return groups, np.maximum(shares, _LEAST_MASS)

    def _tail(self, index: int, first: int, last: int) -> float:
        """Mass of ranks `first` … `last` − 1, in units of the largest."""
        if last <= first:
            return 0.0
        octaves = rank_octaves(np.arange(first, last), self._mass_ranks, self.heads[index].octaves_by_rank)
        return float(np.exp2(octaves).sum())

    def _set_levels(self, num_selectable: int) -> None:
        """Levels and noise shares with the sinks at the front and all others by age."""
        self._num_selectable = num_selectable
        self._curves, self._at_these_levels = {}, {}
        levels = np.empty(self._shape, np.float32)
        age = np.maximum(num_selectable - 1.0 - np.arange(self._shape[1]), 0.0)
        for row, own, head in zip(levels, self._own, self.heads, strict=True):
            row[:] = head.level_at(age, own)
            trend = head.nodes.age_trend()[: max(0, num_selectable - len(head.sink_levels))]
            recent = slice(num_selectable - len(trend), num_selectable)
            row[recent] = trend[::-1] + head.age_spread * own[recent]
            sinks = head.sink_levels[:num_selectable]
            row[: len(sinks)] = sinks
        parts = [head.noise_shares(row.astype(np.float64)) for row, head in zip(levels, self.heads, strict=True)]
        fast, slow = (np.stack(part).astype(np.float32) for part in zip(*parts, strict=True))
        self._levels = levels
        if self._other:
            self._level_bins = np.stack(
                [_binned(row, head.noise_levels) for row, head in zip(levels, self.heads, strict=True)]
            )
            self._level_bins += np.arange(len(self.heads), dtype=np.int32)[:, None] * _LEVEL_BINS
        self._fast_scale, self._slow_scale = np.sqrt(fast), np.sqrt(slow)
        self._white_scale = np.sqrt(np.maximum(1.0 - fast - slow, 0.0))

    def _placed(self, head: HeadProcess, count: int, first_selectable: int) -> FloatArray:
        """How popular each block is among those of its age, as a normal score, placed so that neighbours correlate as
        measured. It stays so while the block ages.

        The blocks between sinks and recent ones have exactly the levels of their octave of age at first; chance only
        says which has which.
        """
        step = head.level_correlation
        kernel = step ** np.arange(_KERNEL_BLOCKS)
        order = np.convolve(self._rng.standard_normal(count + _KERNEL_BLOCKS - 1), kernel, mode="valid")[:count]
        block = np.arange(count)
        sinks, oldest_recent = head.nodes.num_sinks, first_selectable - head.nodes.num_ages
        own = np.empty(count)
        edges = [*(last for _, last in head.nodes.spans), first_selectable - sinks]
        octave = np.searchsorted(edges, first_selectable - 1 - block, side="right")
        octave[(block < sinks) | (block >= oldest_recent)] = -1
        for each in np.unique(octave):
            blocks = block[octave == each]
            placed = blocks[np.argsort(-order[blocks])]
            own[placed] = threshold_of((np.arange(len(blocks)) + 0.5) / len(blocks))
        return own

    def _normal(self) -> Scores:
        return self._rng.standard_normal(self._shape, dtype=np.float32)


def _binned(levels: Scores, known: FloatArray) -> NDArray[np.int32]:
    """Of `_LEVEL_BINS` bins between the lowest and the highest known level."""
    width = max(known[-1] - known[0], 1e-9) / (_LEVEL_BINS - 1)
    bins: NDArray[np.int32] = np.clip(np.rint((levels - known[0]) / width), 0, _LEVEL_BINS - 1).astype(np.int32)
    return bins


def rank_octaves(ranks: NDArray[np.int_], known_ranks: FloatArray, octaves: FloatArray) -> FloatArray:
    """log2 of mass by rank, linear in log2 of the rank; beyond the last known rank it falls on as just before."""
    at, known = np.log2(ranks), np.log2(known_ranks)
    out = np.interp(at, known, octaves)
    if len(known) > 1:
        slope = min(0.0, float((octaves[-1] - octaves[-2]) / (known[-1] - known[-2])))
        out += np.maximum(at - known[-1], 0.0) * slope
    return out
