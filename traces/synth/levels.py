"""Levels of a head's blocks, from the shares of steps in which they are among the K best.

A block of level m is among the K best of a step where m + Z exceeds that K's threshold, Z standard normal. Sinks have
a level each, recent blocks one by age, all others one by their place in the popularity curve.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traces.synth.normal import FloatArray, above, threshold_of
from traces.synth.statistics import HeadStatistics, TraceStatistics

_LEVELS = np.arange(-9.0, 9.0001, 0.1)
_ROUNDS = 6
_MIDDLE_NODES = 48
_AGE_SMOOTHING_BLOCKS = 2.0


@dataclass(frozen=True, slots=True)
class Nodes:
    """Blocks of one head as weighted levels: sinks, ages, then the popularity curve."""

    levels: FloatArray
    weight: FloatArray
    num_sinks: int
    num_ages: int

    @property
    def ages(self) -> FloatArray:
        """Levels by age, newest selectable block first."""
        return self.levels[self.num_sinks : self.num_sinks + self.num_ages]

    def middle_moments(self) -> tuple[float, float]:
        """Mean and variance of the popularity curve's levels."""
        middle = slice(self.num_sinks + self.num_ages, None)
        mean = float(np.average(self.levels[middle], weights=self.weight[middle]))
        return mean, float(np.average((self.levels[middle] - mean) ** 2, weights=self.weight[middle]))

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


def fit_levels(
    statistics: TraceStatistics, head: HeadStatistics, sizes: FloatArray
) -> tuple[Nodes, FloatArray, FloatArray]:
    """Nodes, positions of the popularity nodes, and the mean occupancy of the blocks that they stand for, by K.

    Each level is such that P(level + Z > threshold of K) is nearest to the occupancies at all K; small K, where few
    blocks decide, weigh as much as large ones.
    """
    sink, recency, popularity = (np.array(rows) for rows in (head.sink, head.recency, head.popularity))
    num_middle = statistics.num_blocks - 1 - sink.shape[1] - recency.shape[1]
    shares = np.clip(statistics.popularity_shares, 0.5 / num_middle, 1 - 0.5 / num_middle)
    even = (np.arange(_MIDDLE_NODES) + 0.5) / _MIDDLE_NODES
    fine = shares[shares < even[6]]
    at = np.unique(np.concatenate([fine, even[even > (fine[-1] if len(fine) else 0.0)]]))
    edges = np.concatenate([[0.0], (at[1:] + at[:-1]) / 2, [1.0]])
    middle = np.stack([np.interp(at, shares, row) for row in popularity])
    occupancy = np.concatenate([sink, recency, middle], axis=1)
    weight = np.concatenate([np.ones(sink.shape[1] + recency.shape[1]), np.diff(edges) * num_middle])
    nodes = Nodes(
        -2.0 * threshold_of(np.clip(occupancy.mean(axis=0), 0.002, 0.998)), weight, sink.shape[1], recency.shape[1]
    )
    for _ in range(_ROUNDS):
        model = above(nodes.thresholds(sizes)[:, None] - _LEVELS[None, :])
        gap = occupancy[:, :, None] - model[:, None, :]
        loss = (gap**2).sum(axis=0) + 1e-7 * _LEVELS**2
        nodes = Nodes(_LEVELS[np.argmin(loss, axis=1)], weight, sink.shape[1], recency.shape[1])
    return nodes, at, middle @ np.diff(edges)
