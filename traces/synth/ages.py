"""How a block's level falls with its age beyond the recent blocks: what decides how strong the blocks of a longer
context are.

A longer context adds blocks that are older than any measured. Levels are taken as linear in the octave of age, with one
slope per head, plus what a block has of its own: the popularity curve, narrowed by what of its spread is age.
"""

from __future__ import annotations

import numpy as np

from traces.synth.levels import Nodes
from traces.synth.normal import FloatArray, above
from traces.synth.statistics import HeadStatistics, TraceStatistics, age_octaves

_SLOPES = np.arange(0.0, -3.0001, -0.05)


def mean_octave(first_age: int, last_age: int) -> float:
    """Mean log2 of the ages first_age … last_age − 1, each plus one block."""
    return float(np.log2(np.arange(first_age, last_age) + 1.0).mean())


def own_share(slope: float, spread: float, first_age: int, last_age: int) -> float:
    """What of the standard deviation of levels is left beside age, over blocks of these ages. spread: variance."""
    aged = slope**2 * float(np.log2(np.arange(first_age, last_age) + 1.0).var())
    return float(np.sqrt(max(0.0, 1.0 - aged / max(spread, 1e-9))))


def age_slope(statistics: TraceStatistics, head: HeadStatistics, nodes: Nodes, thresholds: FloatArray) -> float:
    """Level per octave of age, at most 0, that comes nearest to how often blocks of each octave are among the K best;
    0 where the statistics do not say. thresholds: of the set sizes, [K]."""
    if not head.older or len(head.older[0]) < 2:
        return 0.0
    oldest = statistics.num_blocks - 1 - nodes.num_sinks
    octaves = age_octaves(nodes.num_ages, oldest - nodes.num_ages)
    count = np.array([last - first for first, last in octaves], dtype=np.float64)
    at = np.array([mean_octave(*octave) for octave in octaves]) - mean_octave(nodes.num_ages, oldest)
    occupancy = np.array(head.older)
    scale = np.maximum((occupancy * count).sum(axis=1) / count.sum(), 1e-4)
    mean, spread = nodes.middle_moments()
    middle = slice(nodes.num_sinks + nodes.num_ages, None)
    levels, weight = nodes.levels[middle] - mean, nodes.weight[middle] / nodes.weight[middle].sum()
    losses = []
    for slope in _SLOPES:
        own = mean + own_share(slope, spread, nodes.num_ages, oldest) * levels
        moved = own[None, None, :] + slope * at[None, :, None]
        expected = (above(thresholds[:, None, None] - moved) * weight).sum(axis=-1)
        losses.append(float((count * (occupancy - expected) ** 2 / scale[:, None]).sum()))
    return float(_SLOPES[np.argmin(losses)])
