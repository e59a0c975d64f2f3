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
        placed = [self._placed_levels(head, capacity_blocks, first_selectable) for head in heads]
        self._middle, self._own = (np.stack(part).astype(np.float32) for part in zip(*placed, strict=True))
        noise = np.array([head.mass_noise for head in heads], np.float32)
        self._mass_follows = np.array([[head.mass_follows] for head in heads], np.float32)
        self._mass_shift = self._normal() * noise[:, None]
        self._fast, self._slow = self._normal(), self._normal()
        self._next_white = self._normal()
        self._other = tuple(self._normal() for _ in range(2 if num_distances else 0))
        self._keep = [
            np.array([[np.exp(-1.0 / getattr(head, name))] for head in heads], np.float32)
            for name in ("fast_steps", "slow_steps")
        ]
        self._past: deque[tuple[Scores, Scores]] = deque(maxlen=num_distances + 1)
        self._num_selectable = -1
        self._draft_weights: dict[tuple[int, str, bool, bool], tuple[Scores, ...]] = {}
        self._curves: dict[tuple[int, float | None], tuple[FloatArray, FloatArray]] = {}
        self.scores: Scores = np.empty(self._shape, np.float32)
        """Of the current step; only the first `num_selectable` columns mean anything."""

    def advance(self, num_selectable: int) -> None:
        """Go to the next step, at which blocks 0 … num_selectable − 1 may be selected."""
        if num_selectable != self._num_selectable:
            self._set_levels(num_selectable)
        for state, keep in zip((self._fast, self._slow, *self._other), itertools.cycle(self._keep)):
            state *= keep
            state += np.sqrt(1.0 - keep**2) * self._normal()
        steady = (self._fast_scale * self._fast + self._slow_scale * self._slow).astype(np.float32, copy=False)
        white, self._next_white = self._next_white, self._normal()
        self._past.append((steady, white))
        self.scores = self._levels + steady + self._white_scale * white

    def draft_scores(
        self, distance: int, kind: str, *, after_right: bool = False, before_right: bool = False
    ) -> Scores:
        """Scores by a draft of this kind, made `distance` steps ago for the current step.

        after_right, before_right: whether the row of the step before, and of the next, is of a right guess.
        """
        scores: Scores
        if kind == "fallback":
            steady, white = self._past[-1 - distance]
            scores = self._levels + steady + self._white_scale * white
            return scores
        faith, known, before, after, fresh, own = self._weights(distance, kind, after_right, before_right)
        (steady, white), (_, white_before) = self._past[-1], self._past[-2]
        mixed = known * white + before * white_before + after * self._next_white
        if fresh.any():
            mixed += fresh * self._normal()
        noise = steady + self._white_scale * mixed
        scores = self._levels + faith * noise
        if (faith < 1).any():
            scores += np.sqrt(1.0 - faith**2) * self._other_noise(own)
        return scores

    def _other_noise(self, steady: Scores) -> Scores:
        """Of a process beside this one with the same time constants: what a wrong guess attends to instead.

        steady: how much of this process's steady variance it has.
        """
        variance = steady * (self._fast_scale**2 + self._slow_scale**2)
        fast, slow = self._other
        white: Scores = np.sqrt(np.maximum(1.0 - variance, 0.0)) * self._normal()
        white += np.sqrt(steady) * (self._fast_scale * fast + self._slow_scale * slow)
        return white

    def _weights(self, distance: int, kind: str, after_right: bool, before_right: bool) -> tuple[Scores, ...]:
        """`DraftNoise.weights` of every head, each [H, 1]."""
        key = (distance, kind, after_right, before_right)
        if key not in self._draft_weights:
            rows = [head.drafts[distance - 1][kind].weights(after_right, before_right) for head in self.heads]
            columns = (np.array(column, np.float32)[:, None] for column in zip(*rows, strict=True))
            self._draft_weights[key] = tuple(columns)
        return self._draft_weights[key]

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
        """Levels and noise shares with the sinks at the front and the recent blocks by age."""
        self._num_selectable = num_selectable
        self._curves = {}
        levels = self._middle.copy()
        for row, own, head in zip(levels, self._own, self.heads, strict=True):
            trend = head.nodes.age_trend()[: max(0, num_selectable - len(head.sink_levels))]
            recent = slice(num_selectable - len(trend), num_selectable)
            row[recent] = trend[::-1] + head.age_spread * own[recent]
            sinks = head.sink_levels[:num_selectable]
            row[: len(sinks)] = sinks
        parts = [head.noise_shares(row.astype(np.float64)) for row, head in zip(levels, self.heads, strict=True)]
        fast, slow = (np.stack(part).astype(np.float32) for part in zip(*parts, strict=True))
        self._levels = levels
        self._fast_scale, self._slow_scale = np.sqrt(fast), np.sqrt(slow)
        self._white_scale = np.sqrt(np.maximum(1.0 - fast - slow, 0.0))

    def _placed_levels(self, head: HeadProcess, count: int, first_selectable: int) -> tuple[FloatArray, FloatArray]:
        """The levels of the popularity curve, placed so that neighbours correlate as measured, and each block's
        popularity as a normal score: a block that is popular while recent stays so.

        The blocks between sinks and recent ones that are as old as those which the curve was measured over have
        exactly its levels; chance only says which. Older ones have them, by octave, lowered by their age; all others
        have them once more.
        """
        step = head.level_correlation
        kernel = step ** np.arange(_KERNEL_BLOCKS)
        order = np.convolve(self._rng.standard_normal(count + _KERNEL_BLOCKS - 1), kernel, mode="valid")[:count]
        block = np.arange(count)
        sinks, oldest_recent = head.nodes.num_sinks, first_selectable - head.nodes.num_ages
        levels, own = np.empty(count), np.empty(count)
        others = block[(block < sinks) | (block >= oldest_recent)]
        groups = [(others, head.middle_levels(len(others)))]
        for first, last in _spans(head.nodes.num_ages, head.oldest_age, first_selectable - sinks):
            groups.append((block[first_selectable - last : first_selectable - first], head.aged_levels(first, last)))
        for blocks, of_group in groups:
            placed = blocks[np.argsort(-order[blocks])]
            levels[placed] = of_group
            own[placed] = threshold_of((np.arange(len(blocks)) + 0.5) / len(blocks))
        return levels, own

    def _normal(self) -> Scores:
        return self._rng.standard_normal(self._shape, dtype=np.float32)


def _spans(num_recent: int, oldest_measured: int, oldest: int) -> list[tuple[int, int]]:
    """Ages [first, last) from the recent blocks to `oldest`: those measured, then by octave."""
    edges = [num_recent, min(oldest_measured or oldest, oldest)]
    while edges[-1] < oldest:
        edges.append(min(2 * edges[-1], oldest))
    return [(first, last) for first, last in itertools.pairwise(edges) if last > first]


def rank_octaves(ranks: NDArray[np.int_], known_ranks: FloatArray, octaves: FloatArray) -> FloatArray:
    """log2 of mass by rank, linear in log2 of the rank; beyond the last known rank it falls on as just before."""
    at, known = np.log2(ranks), np.log2(known_ranks)
    out = np.interp(at, known, octaves)
    if len(known) > 1:
        slope = min(0.0, float((octaves[-1] - octaves[-2]) / (known[-1] - known[-2])))
        out += np.maximum(at - known[-1], 0.0) * slope
    return out
