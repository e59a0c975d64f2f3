"""How a block's level falls with its age beyond the recent blocks: what decides how strong the blocks of a longer
context are.

The blocks of each measured octave of age have levels of their own. A longer context adds blocks that are older than any
measured: their levels are those of the last octave, moved by one slope per head over the octave of age.
"""

from __future__ import annotations

import itertools

import numpy as np

from traces.synth.normal import FloatArray, above

_SLOPES = np.arange(0.0, -3.0001, -0.05)


def mean_octave(first_age: int, last_age: int) -> float:
    """Mean log2 of the ages first_age … last_age − 1, each plus one block."""
    return float(np.log2(np.arange(first_age, last_age) + 1.0).mean())


def age_slope(
    spans: list[tuple[int, int]],
    levels: list[FloatArray],
    groups: list[FloatArray],
    occupancy: list[FloatArray],
    thresholds: FloatArray,
) -> float:
    """Level per octave of age, at most 0, with which the levels of each span of ages come nearest to how often the
    blocks of the next one are among the K best; 0 for a single span.

    levels, groups: of each span's blocks and how many have them. occupancy: share of steps, [K, groups] of each span.
    thresholds: of the set sizes, [K].
    """
    losses = np.zeros(len(_SLOPES))
    means = [of @ weight / weight.sum() for of, weight in zip(occupancy, groups, strict=True)]
    count = [weight.sum() for weight in groups]
    scale = np.maximum(np.average(means, axis=0, weights=count), 1e-4)
    for young, old in itertools.pairwise(range(len(spans))):
        apart = mean_octave(*spans[old]) - mean_octave(*spans[young])
        moved = levels[young][None, :] + apart * _SLOPES[:, None]
        expected = above(thresholds[None, :, None] - moved[:, None, :]) @ groups[young] / count[young]
        losses += count[old] * ((means[old] - expected) ** 2 / scale).sum(axis=1)
    return float(_SLOPES[np.argmin(losses)])
