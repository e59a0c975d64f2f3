"""Times between tokens of all requests of a run, in memory that does not grow with the run."""

from __future__ import annotations

import math

import numpy as np

BINS_PER_OCTAVE = 1024
"""Gaps that differ by less than a thousandth may be told as their mean."""
SHORTEST_S = 1e-12


class TokenGaps:
    """A count and a sum for each of BINS_PER_OCTAVE bins an octave."""

    def __init__(self) -> None:
        self.num_gaps = 0
        self.total_s = 0.0
        self._bins: dict[int, list[float]] = {}

    def add(self, gap_s: float, count: int = 1) -> None:
        """`count` requests waited so long for a token."""
        if not count:
            return
        self.num_gaps += count
        self.total_s += gap_s * count
        entry = self._bins.setdefault(math.floor(math.log2(max(gap_s, SHORTEST_S)) * BINS_PER_OCTAVE), [0, 0.0])
        entry[0] += count
        entry[1] += gap_s * count

    @property
    def mean_s(self) -> float | None:
        return self.total_s / self.num_gaps if self.num_gaps else None

    def quantile_s(self, share: float) -> float | None:
        """The gap that `share` of all gaps do not exceed, to a thousandth; None without gaps."""
        if not self.num_gaps:
            return None
        counts, sums = np.array([self._bins[at] for at in sorted(self._bins)]).T
        at = min(int(np.searchsorted(np.cumsum(counts), share * self.num_gaps)), len(counts) - 1)
        return float(sums[at] / counts[at])
