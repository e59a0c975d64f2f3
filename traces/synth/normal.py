"""The normal distribution, vectorised: probabilities of one and of two correlated variables above a threshold."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

_LIMIT = 9.0
_POINTS = 20001
"""Table from −9 to 9: linear interpolation is then within 5e-8 of math.erfc."""
_ANGLES = 12
"""Nodes of the quadrature of Owen's T."""
_JOINT_LIMIT, _JOINT_THRESHOLDS, _JOINT_CORRELATIONS = 8.0, 641, 65


@lru_cache(maxsize=1)
def _table() -> tuple[FloatArray, FloatArray]:
    x = np.linspace(-_LIMIT, _LIMIT, _POINTS)
    return x, np.array([0.5 * math.erfc(value / math.sqrt(2.0)) for value in x])


def above(threshold: ArrayLike) -> FloatArray:
    """P(Z > threshold) of a standard normal Z."""
    _, upper = _table()
    at = (np.clip(np.asarray(threshold, dtype=np.float64), -_LIMIT, _LIMIT) + _LIMIT) * ((_POINTS - 1) / (2 * _LIMIT))
    low = np.minimum(at.astype(np.intp), _POINTS - 2)
    probability: FloatArray = upper[low] + (at - low) * (upper[low + 1] - upper[low])
    return probability


def threshold_of(share: ArrayLike) -> FloatArray:
    """h with P(Z > h) = share, within ±9."""
    x, upper = _table()
    return np.interp(np.asarray(share, dtype=np.float64), upper[::-1], x[::-1])


def both_above(threshold: ArrayLike, correlation: ArrayLike) -> FloatArray:
    """P(X > h and Y > h) of standard normals with `correlation` in −1 … 1; arguments broadcast.

    P = P(X > h) − 2 T(h, sqrt((1 − r) / (1 + r))) with Owen's T, integrated over the angle by Gauss–Legendre.
    Source: Owen, Tables for computing bivariate normal probabilities, Ann. Math. Stat. 27 (1956).
    """
    h, r = np.broadcast_arrays(np.asarray(threshold, np.float64), np.asarray(correlation, np.float64))
    top = np.arctan(np.sqrt((1.0 - r) / np.maximum(1.0 + r, 1e-12)))
    nodes, weights = np.polynomial.legendre.leggauss(_ANGLES)
    angle = 0.5 * top[..., None] * (nodes + 1.0)
    inner = np.exp(-0.5 * (h[..., None] / np.cos(angle)) ** 2)
    owen_t = 0.5 * top * (inner * weights).sum(axis=-1) / (2.0 * math.pi)
    joint: FloatArray = above(h) - 2.0 * owen_t
    return joint


@lru_cache(maxsize=1)
def _joint_table() -> FloatArray:
    """`both_above` at thresholds −8 … 8 and at sqrt(1 − correlation) 0 … 1, where it is smooth."""
    h = np.linspace(-_JOINT_LIMIT, _JOINT_LIMIT, _JOINT_THRESHOLDS)
    distance = np.linspace(0.0, 1.0, _JOINT_CORRELATIONS)
    return both_above(h[:, None], 1.0 - distance[None, :] ** 2)


def both_above_fast(threshold: FloatArray, correlation: FloatArray) -> FloatArray:
    """`both_above` by bilinear interpolation in a table, for correlations 0 … 1; within 2e-4."""
    table = _joint_table()
    x = (np.clip(threshold, -_JOINT_LIMIT, _JOINT_LIMIT) + _JOINT_LIMIT) * ((_JOINT_THRESHOLDS - 1) / 2 / _JOINT_LIMIT)
    y = np.sqrt(1.0 - np.clip(correlation, 0.0, 1.0)) * (_JOINT_CORRELATIONS - 1)
    row = np.minimum(x.astype(np.intp), _JOINT_THRESHOLDS - 2)
    column = np.minimum(y.astype(np.intp), _JOINT_CORRELATIONS - 2)
    row, column = np.broadcast_arrays(row, column)
    dx, dy = x - row, y - column
    near = table[row, column] * (1 - dy) + table[row, column + 1] * dy
    far = table[row + 1, column] * (1 - dy) + table[row + 1, column + 1] * dy
    joint: FloatArray = near * (1 - dx) + far * dx
    return joint
