"""Which draft rows are of right, wrong and missing guesses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from traces.synth.normal import both_above_fast, threshold_of
from traces.synth.statistics import TraceStatistics

_KINDS_IN_ORDER = ("right", "all", "wrong", "fallback")


def draft_kinds(statistics: TraceStatistics, num_steps: int, rng: np.random.Generator) -> list[NDArray[np.str_]]:
    """Kind of each position's draft row, by distance − 1; [S]. A normal variable that wanders from step to step
    decides for all distances, so that rows right at a large distance tend to be right at a small one."""
    if not statistics.draft_kinds:
        return []
    first = statistics.draft_kinds[0]
    keep = 0.0
    right = first.shares.get("right", 0.0)
    if 0 < right < 1:
        grid = np.linspace(0.0, 0.99, 100)
        joint = both_above_fast(np.full(100, float(threshold_of(right))), grid) / right
        keep = float(np.interp(first.repeats, joint, grid))
    mood = np.empty(num_steps)
    state = rng.standard_normal()
    for step in range(num_steps):
        state = keep * state + np.sqrt(1.0 - keep**2) * rng.standard_normal()
        mood[step] = state
    position = (np.argsort(np.argsort(mood)) + 0.5) / num_steps
    out = []
    for kind_shares in statistics.draft_kinds:
        names = [name for name in _KINDS_IN_ORDER if name in kind_shares.shares]
        edges = np.cumsum([kind_shares.shares[name] for name in names])
        picked = np.searchsorted(edges[:-1], position, side="right")
        out.append(np.array(names)[picked])
    return out


def beside_right(kinds: NDArray[np.str_], step: int, distance: int) -> tuple[bool, bool]:
    """Whether the rows of the steps before and after this one are of right guesses."""
    after = step > distance and str(kinds[step - 1]) == "right"
    return after, step + 1 < len(kinds) and str(kinds[step + 1]) == "right"
