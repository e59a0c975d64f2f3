"""Which draft rows are of right, wrong and missing guesses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError
from traces.synth.normal import both_above_fast, threshold_of
from traces.synth.statistics import DraftKinds, TraceStatistics

_KINDS_IN_ORDER = ("right", "all", "wrong", "fallback")
_DRAWS = 64


def draft_kinds(statistics: TraceStatistics, num_steps: int, rng: np.random.Generator) -> list[NDArray[np.str_]]:
    """Kind of each position's draft row, by distance − 1; [S].

    A normal variable that wanders from step to step decides: per distance one, as slowly as that distance's runs say,
    all with the same innovations, so that rows right at a large distance tend to be right at a small one. Shares are
    exact; of `_DRAWS` draws the one whose runs come nearest to the measured ones is taken.
    """
    if not statistics.draft_kinds:
        return []
    keep = np.array([_correlation(kinds) for kinds in statistics.draft_kinds])[:, None]
    mood = np.empty((len(keep), _DRAWS, num_steps))
    state = np.repeat(rng.standard_normal((1, _DRAWS)), len(keep), axis=0)
    for step in range(num_steps):
        state = keep * state + np.sqrt(1.0 - keep**2) * rng.standard_normal(_DRAWS)
        mood[..., step] = state
    position = (np.argsort(np.argsort(mood, axis=-1), axis=-1) + 0.5) / num_steps
    drawn, off = [], np.zeros(_DRAWS)
    for known, at in zip(statistics.draft_kinds, position, strict=True):
        names = [name for name in _KINDS_IN_ORDER if name in known.shares]
        edges = np.cumsum([known.shares[name] for name in names])
        drawn.append(np.array(names)[np.searchsorted(edges[:-1], at, side="right")])
        right = drawn[-1] == "right"
        off += ((right[:, 1:] & right[:, :-1]).mean(axis=1) - known.repeats * known.shares.get("right", 0.0)) ** 2
    nearest = int(np.argmin(off))
    return [of_draws[nearest] for of_draws in drawn]


def with_acceptance(statistics: TraceStatistics, acceptance: Sequence[float]) -> TraceStatistics:
    """The same attention with another share of right guesses at distances 1, 2, …: that share is the text's and the
    drafter's. Other kinds of rows keep their proportions, runs their correlation.

    Raises InputError where the statistics do not tell right rows from others, or for a share outside 0 … 1.
    """
    if len(acceptance) != len(statistics.draft_kinds):
        raise InputError(f"acceptance: {len(acceptance)} shares for {len(statistics.draft_kinds)} draft distances")
    kinds = []
    for distance, (share, known) in enumerate(zip(acceptance, statistics.draft_kinds, strict=True), start=1):
        right = known.shares.get("right", 0.0)
        if not 0 < right < 1:
            raise InputError(f"acceptance: the source has no right and no wrong guesses at distance {distance}")
        if not 0 <= share <= 1:
            raise InputError(f"acceptance: {share} at distance {distance} is no share of guesses")
        others = {name: of * (1 - share) / (1 - right) for name, of in known.shares.items() if name != "right"}
        again = share
        if 0 < share < 1:
            again = float(both_above_fast(threshold_of(share), np.array(_correlation(known)))) / share
        kinds.append(DraftKinds(shares={"right": share, **others}, repeats=min(1.0, max(again, share))))
    return statistics.model_copy(update={"draft_kinds": tuple(kinds)})


def _correlation(kinds: DraftKinds) -> float:
    """Of the normal variable behind `right` at successive steps."""
    right = kinds.shares.get("right", 0.0)
    if not 0 < right < 1:
        return 0.0
    grid = np.linspace(0.0, 0.99, 100)
    joint = both_above_fast(np.full(100, float(threshold_of(right))), grid) / right
    return float(np.interp(kinds.repeats, joint, grid))


def beside_right(kinds: NDArray[np.str_], step: int, distance: int) -> tuple[bool, bool]:
    """Whether the rows of the steps before and after this one are of right guesses."""
    after = step > distance and str(kinds[step - 1]) == "right"
    return after, step + 1 < len(kinds) and str(kinds[step + 1]) == "right"
