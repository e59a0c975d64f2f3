"""Kernel times that calibration measured on the device, interpolated between the sizes that it timed."""

from __future__ import annotations

import math
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


def timed_kernel_s(
    kernels: KernelFigures, kind: str, heads: int, size: int, head_dim: int, rows: int = 1
) -> float | None:
    """Seconds of a launch over `heads` heads (batch x KV heads), bilinear in heads and size; null outside.

    Query rows between timed ones matter little: the nearest set of rows that covers the size serves.
    """
    for _, head_axis, size_axis, seconds in sorted(
        _grids(kernels.timed, kind, head_dim), key=lambda g: abs(g[0] - rows)
    ):
        if head_axis[0] <= heads <= head_axis[-1] and size_axis[0] <= size <= size_axis[-1]:
            per_head = [float(np.interp(size, size_axis, row)) for row in seconds]
            return float(np.interp(heads, head_axis, per_head))
    return None


def timed_selection_s(kernels: KernelFigures, kind: str, heads: int, size: int, kept: int) -> float | None:
    """Seconds of a top-K or plan launch, which computes on more than size and K; null outside.

    Linear in heads and in the lanes that it computes on, among launches whose ratio of lanes to padded K is the nearest
    timed.
    """
    ratio, width = _computes_on(kind, size, kept)
    families = _selection_families(kernels.timed, kind)
    for _, head_axis, widths, seconds in sorted(families, key=lambda f: abs(math.log2(f[0] / ratio))):
        if head_axis[0] <= heads <= head_axis[-1] and widths[0] <= width <= widths[-1]:
            per_head = [float(np.interp(width, widths, row)) for row in seconds]
            return float(np.interp(heads, head_axis, per_head))
    return None


def topk_width(blocks: int) -> tuple[int, int]:
    """Lanes that the top-K kernel runs for a row: powers of two for most of it and for the rest, 0 without a rest."""
    whole = padded(blocks, 64)
    if whole == 64 or blocks > 3 * whole // 4:
        return whole, 0
    return whole // 2, padded(blocks - whole // 2, 64)


def _computes_on(kind: str, size: int, kept: int) -> tuple[float, int]:
    """(ratio of lanes to padded K, lanes): slots rounded up (plan), or blocks in two parts (topk)."""
    main, rest = (padded(size), 0) if kind == "plan" else topk_width(size)
    return main / padded(kept), main + rest


def padded(count: int, least: int = 16) -> int:
    """What the selection kernels round a count up to."""
    return max(least, 1 << (count - 1).bit_length())


Axis = NDArray[np.float64]


@lru_cache(maxsize=64)
def _selection_families(
    timed: tuple[TimedKernel, ...], kind: str
) -> tuple[tuple[float, Axis, Axis, NDArray[np.float64]], ...]:
    """(lanes / padded K, head axis, lanes, seconds [heads, widths]) of every complete grid of a kind."""
    found: dict[float, dict[tuple[int, int], list[float]]] = {}
    for t in timed:
        if t.kind == kind and t.kept is not None:
            ratio, width = _computes_on(kind, t.size, t.kept)
            cells = found.setdefault(ratio, {})
            cells.setdefault((t.heads, width), []).append(t.seconds)
    families = []
    for ratio, cells in found.items():
        heads, widths = sorted({h for h, _ in cells}), sorted({w for _, w in cells})
        if len(cells) == len(heads) * len(widths):
            seconds = np.array([[float(np.mean(cells[h, w])) for w in widths] for h in heads])
            families.append((ratio, np.array(heads, dtype=np.float64), np.array(widths, dtype=np.float64), seconds))
    return tuple(families)


@lru_cache(maxsize=256)
def _gemm_rows(gemms: tuple[MeasuredGemm, ...], n: int, k: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    found = sorted((g.m, g.seconds) for g in gemms if (g.n, g.k) == (n, k))
    return np.array([m for m, _ in found], dtype=np.float64), np.array([s for _, s in found])


@lru_cache(maxsize=64)
def _grids(
    timed: tuple[TimedKernel, ...], kind: str, head_dim: int
) -> tuple[tuple[int, NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]], ...]:
    """(rows, head axis, size axis, seconds [heads, sizes]) of every complete grid of a kind."""
    grids = []
    launches = [t for t in timed if (t.kind, t.head_dim) == (kind, head_dim)]
    for rows in sorted({t.rows for t in launches}):
        cells = {(t.heads, t.size): t.seconds for t in launches if t.rows == rows}
        heads, sizes = sorted({h for h, _ in cells}), sorted({s for _, s in cells})
        if len(cells) == len(heads) * len(sizes):
            seconds = np.array([[cells[h, s] for s in sizes] for h in heads])
            grids.append((rows, np.array(heads, dtype=np.float64), np.array(sizes, dtype=np.float64), seconds))
    return tuple(grids)
