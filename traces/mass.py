"""Softmax mass per block as 8-bit log2 levels, and sums of it over coarser blocks.

Level v > 0 means scale · 2^((v − 255)/8), with the row's scale such that the row sums to what it covers; 0 means
none. All arithmetic on levels is in exact integers or comparisons against constants, so that rankings derived from
levels are the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from traces.schema import MASS_LEVELS_PER_OCTAVE

_FRACTION_BITS = 44
"""2^44 · 2^(−254/8) > 2^12: the smallest level keeps 12 significant bits; 2^18 blocks of the largest sum below 2^63."""

_ROWS_AT_ONCE = 256
"""Rows whose 8-byte weights are summed together, so that they stay in the cache."""


@dataclass(frozen=True, slots=True)
class BlockMass:
    """Softmax mass of a query group (mean over its heads) by block.

    levels: uint8 [S, L, H, n_max]; mass = scale · 2^((level − 255)/8), level 0 = none.
    scale: float32 [S, L, H].
    outside: float32 [S, L, H], the mass that `levels` does not cover (0 where every block is recorded).
    """

    levels: NDArray[np.uint8]
    scale: NDArray[np.float32]
    outside: NDArray[np.float32]

    def dense(self) -> NDArray[np.float32]:
        """Mass per block, float32 [S, L, H, n_max]; each row and its `outside` sum to 1."""
        return unit_mass()[self.levels] * self.scale[..., None]


def _eighth_power(eighths: int, bits: int) -> int:
    """floor(2^(bits + eighths/8)), exactly."""
    return isqrt(isqrt(isqrt(1 << (8 * bits + eighths))))


@lru_cache(maxsize=1)
def _integer_mass() -> NDArray[np.int64]:
    """Integer weight of each level: 2^44 · 2^((level − 255)/8) rounded down, 0 for level 0."""
    table = [0]
    for level in range(1, 256):
        whole, eighths = divmod(level - 255, MASS_LEVELS_PER_OCTAVE)
        table.append(_eighth_power(eighths, _FRACTION_BITS + whole))
    return np.array(table, dtype=np.int64)


@lru_cache(maxsize=1)
def unit_mass() -> NDArray[np.float32]:
    """Mass of each level before scaling, float32 [256]."""
    return (_integer_mass() / 2.0**_FRACTION_BITS).astype(np.float32)


@lru_cache(maxsize=1)
def _thresholds() -> NDArray[np.float64]:
    """Smallest share of the row's maximum that rounds to level 1, 2, … 255 (half a level below it)."""
    bounds = []
    for level in range(1, 256):
        whole, sixteenths = divmod(2 * (level - 255) - 1, 2 * MASS_LEVELS_PER_OCTAVE)
        bounds.append(isqrt(_isqrt3(16 * (60 + whole) + sixteenths)) / 2.0**60)
    return np.array(bounds, dtype=np.float64)


def _isqrt3(exponent: int) -> int:
    return isqrt(isqrt(isqrt(1 << exponent)))


def quantise_mass(mass: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Levels of non-negative masses [..., n] relative to each row's maximum (which gets 255)."""
    values = np.asarray(mass, dtype=np.float64)
    peak = values.max(axis=-1, keepdims=True)
    share = np.divide(values, peak, out=np.zeros_like(values), where=peak > 0)
    levels: NDArray[np.uint8] = np.searchsorted(_thresholds(), share, side="right").astype(np.uint8)
    return levels


_COMPACT_STEPS = ((16, 1), (32, 2), (64, 4))
"""(depth below the row's largest, step) in levels of a compact trace: eighths of an octave to 2 octaves, quarters to 4,
halves to 8."""
_COMPACT_BINS = ((88, 74), (112, 98))
"""(depth, the depth that stands for it): three octaves each, to 14, at the mean mass of what falls in. Deeper: none."""


def coarsen_levels(levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Levels rounded as a compact trace keeps them; what is below 2^-14 of the row's largest becomes 0 (no mass)."""
    table = np.zeros(256, np.uint8)
    table[255] = 255
    depths, start = 255 - np.arange(256), 0
    for end, step in _COMPACT_STEPS:
        inside = (depths > start) & (depths <= end)
        table[inside] = 255 - (start + (depths[inside] - start + step // 2) // step * step)
        start = end
    for end, stands_for in _COMPACT_BINS:
        table[(depths > start) & (depths <= end)] = 255 - stands_for
        start = end
    return table[levels]


def quantise_rows(mass: NDArray[np.floating]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Levels of masses [..., n], and the masses that these levels stand for: float32, rows sum to 1."""
    levels = quantise_mass(mass)
    return levels, unit_mass()[levels] * scale_of(levels)[..., None]


def scale_of(levels: NDArray[np.uint8], covered: NDArray[np.floating] | float = 1.0) -> NDArray[np.float32]:
    """Scale by which each row of `levels` [..., n] sums to `covered`."""
    rows = levels.reshape(-1, levels.shape[-1])
    total = np.empty(len(rows), np.int64)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        total[start : start + _ROWS_AT_ONCE] = _integer_mass()[rows[start : start + _ROWS_AT_ONCE]].sum(axis=-1)
    unit = (total / 2.0**_FRACTION_BITS).reshape(levels.shape[:-1])
    share = np.broadcast_to(np.asarray(covered, dtype=np.float64), unit.shape)
    scale: NDArray[np.float64] = np.divide(share, unit, out=np.zeros(unit.shape), where=unit > 0)
    return scale.astype(np.float32)


def pool_levels(levels: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    """Levels of blocks `factor` times as long, from uint8 [..., n] to [..., ceil(n/factor)]."""
    if factor == 1:
        return levels
    weights = _integer_mass()[levels]
    starts = np.arange(0, levels.shape[-1], factor)
    return quantise_mass(np.add.reduceat(weights, starts, axis=-1))
