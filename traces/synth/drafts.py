"""What draft rows share with the real rows around them, fitted to how they overlap.

A wrong guess is another query of the same text: often a neighbour's token, so that its row may be closer to the row of
the step before than to that of its own step, and differently so among the best blocks than among the many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from traces.synth.normal import FloatArray

_LEAST = 1e-3


@dataclass(frozen=True, slots=True)
class Steadiness:
    """Of the real rows' noise, by level: variance of the steady parts, autocorrelation at lag 1."""

    steady: FloatArray
    lag_1: FloatArray

    @property
    def reversion(self) -> FloatArray:
        """What the steady parts of a position say of the noise of the position before, and of the next."""
        return self.lag_1 / self.steady

    @property
    def unsaid(self) -> FloatArray:
        """Variance of what they do not say of it."""
        return np.maximum(1.0 - self.lag_1**2 / self.steady, _LEAST)


def steadiness(fast: FloatArray, slow: FloatArray, fast_steps: float, slow_steps: float) -> Steadiness:
    lag_1 = fast * np.exp(-1.0 / fast_steps) + slow * np.exp(-1.0 / slow_steps)
    return Steadiness(np.maximum(fast + slow, _LEAST), np.maximum(lag_1, _LEAST / 2))


@dataclass(frozen=True, slots=True)
class DraftNoise:
    """What the noise of a draft row of one kind shares with that of the real rows, by level (`noise_levels`).

    noise = faith · steady parts of its position + known · its white part + before · what the steady parts do not say
    of the noise of the position before + the same of the next position + the rest: a process of its own with the same
    time constants, of which the share `own` of what is steady in the real one is steady.
    """

    faith: FloatArray
    known: FloatArray
    before: FloatArray
    before_if_right: FloatArray
    """`before`, where the row before is of a right guess."""
    next_if_right: FloatArray
    """Where the next row is of a right guess; else 0."""
    own: FloatArray
    real: Steadiness

    def weights(self, after_right: bool, before_right: bool) -> tuple[FloatArray, ...]:
        """Of the steady parts, the white part, the noise before, the noise after, the rest; and `own`."""
        before = self.before_if_right if after_right else self.before
        after = self.next_if_right if before_right else np.zeros_like(before)
        room = 1.0 - self.faith**2 * self.real.steady - self.known**2 * (1.0 - self.real.steady)
        beside = (before**2 + after**2) * self.real.unsaid
        fits = np.sqrt(np.clip(room / np.maximum(beside, 1e-12), 0.0, 1.0))
        before, after = before * fits, after * fits
        rest = np.sqrt(np.maximum(room - beside * fits**2, 0.0))
        return self.faith - (before + after) * self.real.reversion, self.known, before, after, rest, self.own


def draft_noise(
    overlaps: Mapping[str, FloatArray],
    correlations: Callable[[FloatArray], FloatArray],
    real: Steadiness,
    right: Mapping[str, FloatArray] | None,
) -> tuple[DraftNoise, dict[str, FloatArray]]:
    """Of a row's overlaps with the rows around it, by the names of DraftState, [K] each.

    correlations: from overlaps [rows, K] to correlations of the noise by level, [rows, levels]. right: those of right
    rows, where this is another kind. Also returns the correlations by name.
    """
    of = dict(zip(overlaps, correlations(np.stack(list(overlaps.values()))), strict=True))
    white = np.maximum(1.0 - real.steady, _LEAST)
    true = of["with_true"]
    faith = np.clip(true / real.steady, 0.0, 1.0)
    known = np.clip((true - real.steady) / white, 0.0, 1.0)

    def beside(name: str, otherwise: FloatArray, neighbour: Mapping[str, FloatArray] | None = None) -> FloatArray:
        """Weight of what a neighbour's noise has beside the steady parts that gives this overlap with its row."""
        if name not in of:
            return otherwise
        shared = of[name] if neighbour is None else of[name] / np.maximum(neighbour["with_true"], 0.2)
        weight: FloatArray = (shared - faith * real.lag_1) / real.unsaid
        return weight

    before = beside("with_before", np.zeros_like(true))
    nothing = np.zeros_like(true)
    found = DraftNoise(
        faith,
        known,
        before,
        beside("after_right", before, right),
        beside("before_right", nothing, right),
        nothing,
        real,
    )
    _, _, before, _, rest, _ = found.weights(after_right=False, before_right=False)
    if "with_next" in of:
        # of two rows: by the steady parts, and by the first row as the second one's neighbour
        shared = faith**2 * real.lag_1 + before * (true - real.reversion * faith * real.lag_1)
        own = (of["with_next"] - shared) / np.maximum(rest**2 * real.lag_1, _LEAST)
    else:
        own = (1.0 - faith**2) / np.maximum(rest**2, _LEAST)
    own = np.where(rest**2 > _LEAST, np.clip(own, 0.0, 1.0), 0.0)
    return DraftNoise(faith, known, found.before, found.before_if_right, found.next_if_right, own, real), of
