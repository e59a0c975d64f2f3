"""Levels of a head's blocks, from the shares of steps in which they are among the K best.

A block of level m is among the K best of a step where m + Z exceeds that K's threshold, Z standard normal. Sinks have
a level each, recent blocks one by age, all others one by their place in the popularity curve.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from traces.synth.normal import FloatArray, above, threshold_of
from traces.synth.statistics import HeadStatistics, TraceStatistics

_LEVELS = np.arange(-9.0, 9.0001, 0.1)
_ROUNDS = 6
_AGE_SMOOTHING_BLOCKS = 2.0


@dataclass(frozen=True, slots=True)
class Nodes:
    """Blocks of one head as weighted levels: sinks, ages, then the popularity curves by octave of age."""

    levels: FloatArray
    weight: FloatArray
    num_sinks: int
    num_ages: int
    octaves: tuple[int, ...]
    """Numbers of levels of each octave of age of the popularity curves."""

    @property
    def ages(self) -> FloatArray:
        """Levels by age, newest selectable block first."""
        return self.levels[self.num_sinks : self.num_sinks + self.num_ages]

    def by_octave(self, values: FloatArray) -> list[FloatArray]:
        """Of the popularity curves' levels, [..., levels], by octave of age."""
        return np.split(values, np.cumsum(self.octaves)[:-1], axis=-1)

    @property
    def middle(self) -> slice:
        """Where the popularity curves are."""
        return slice(self.num_sinks + self.num_ages, None)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Ages [first, last) of the octaves, in blocks."""
        counts = [round(float(weight.sum())) for weight in self.by_octave(self.weight[self.middle])]
        edges = np.cumsum([self.num_ages, *counts]).tolist()
        return list(itertools.pairwise(edges))

    def middle_moments(self) -> tuple[float, float]:
        """Mean and variance of the popularity curves' levels."""
        levels, weight = self.levels[self.middle], self.weight[self.middle]
        mean = float(np.average(levels, weights=weight))
        return mean, float(np.average((levels - mean) ** 2, weights=weight))

    def age_trend(self) -> FloatArray:
        """What of `ages` is age: smoothed over neighbours. The rest belongs to the blocks that were measured there,
        and moves on with them."""
        reach = np.arange(self.num_ages)
        kernel = np.exp(-0.5 * ((reach[:, None] - reach[None, :]) / _AGE_SMOOTHING_BLOCKS) ** 2)
        trend: FloatArray = kernel @ self.ages / kernel.sum(axis=1)
        return trend

    def aged(self, blocks: float) -> FloatArray:
        """Levels halfway between those of a step and of the same blocks when `blocks` more have come."""
        out, trend = self.levels.copy(), self.age_trend()
        later = np.interp(np.arange(self.num_ages) + blocks, np.arange(self.num_ages), trend)
        out[self.num_sinks : self.num_sinks + self.num_ages] += (later - trend) / 2
        return out

    def thresholds(self, sizes: FloatArray) -> FloatArray:
        """Scores above which K blocks are expected."""
        grid = np.linspace(self.levels.min() - 6.0, self.levels.max() + 6.0, 400)
        expected = (above(grid[:, None] - self.levels[None, :]) * self.weight[None, :]).sum(axis=1)
        return np.interp(-sizes, -expected, grid)


def fit_levels(statistics: TraceStatistics, head: HeadStatistics, sizes: FloatArray) -> Nodes:
    """Nodes of one head.

    Each level is such that P(level + Z > threshold of K) is nearest to the occupancies at all K; small K, where few
    blocks decide, weigh as much as large ones.
    """
    sink, recency, popularity = (np.array(rows) for rows in (head.sink, head.recency, head.popularity))
    groups = np.concatenate(statistics.popularity_groups)
    octaves = tuple(len(octave) for octave in statistics.popularity_groups)
    occupancy = np.concatenate([sink, recency, popularity], axis=1)
    weight = np.concatenate([np.ones(sink.shape[1] + recency.shape[1]), groups])
    levels = -2.0 * threshold_of(np.clip(occupancy.mean(axis=0), 0.002, 0.998))
    nodes = Nodes(levels, weight, sink.shape[1], recency.shape[1], octaves)
    for _ in range(_ROUNDS):
        model = above(nodes.thresholds(sizes)[:, None] - _LEVELS[None, :])
        gap = occupancy[:, :, None] - model[:, None, :]
        loss = (gap**2).sum(axis=0) + 1e-7 * _LEVELS**2
        nodes = replace(nodes, levels=_LEVELS[np.argmin(loss, axis=1)])
    return nodes
