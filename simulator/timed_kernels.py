"""Kernel times that calibration measured on the device, interpolated between the sizes that it timed."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from simulator.specs.hardware import KernelFigures, MeasuredGemm, TimedKernel


def timed_gemm_s(kernels: KernelFigures, m: int, n: int, k: int) -> float | None:
    """Seconds of a product whose (n, k) was timed, linear in m; null outside."""
    rows, seconds = _gemm_rows(kernels.gemms, n, k)
    if len(rows) == 0 or not rows[0] <= m <= rows[-1]:
        return None
    return float(np.interp(m, rows, seconds))


def timed_kernel_s(kernels: KernelFigures, kind: str, heads: int, size: int, rows: int = 1) -> float | None:
    """Seconds of a launch over `heads` heads (batch x KV heads), bilinear in heads and size; null outside.

    Query rows between timed ones matter little: the nearest set of rows that covers the size serves.
    """
    for _, head_axis, size_axis, seconds in sorted(_grids(kernels.timed, kind), key=lambda g: abs(g[0] - rows)):
        if head_axis[0] <= heads <= head_axis[-1] and size_axis[0] <= size <= size_axis[-1]:
            per_head = [float(np.interp(size, size_axis, row)) for row in seconds]
            return float(np.interp(heads, head_axis, per_head))
    return None


@lru_cache(maxsize=256)
def _gemm_rows(gemms: tuple[MeasuredGemm, ...], n: int, k: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    found = sorted((g.m, g.seconds) for g in gemms if (g.n, g.k) == (n, k))
    return np.array([m for m, _ in found], dtype=np.float64), np.array([s for _, s in found])


@lru_cache(maxsize=64)
def _grids(
    timed: tuple[TimedKernel, ...], kind: str
) -> tuple[tuple[int, NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]], ...]:
    """(rows, head axis, size axis, seconds [heads, sizes]) of every complete grid of a kind."""
    grids = []
    for rows in sorted({t.rows for t in timed if t.kind == kind}):
        cells = {(t.heads, t.size): t.seconds for t in timed if t.kind == kind and t.rows == rows}
        heads, sizes = sorted({h for h, _ in cells}), sorted({s for _, s in cells})
        if len(cells) == len(heads) * len(sizes):
            seconds = np.array([[cells[h, s] for s in sizes] for h in heads])
            grids.append((rows, np.array(heads, dtype=np.float64), np.array(sizes, dtype=np.float64), seconds))
    return tuple(grids)
