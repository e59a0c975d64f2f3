"""Measured kernel times: public GEMM and dense decode-attention tables, interpolated where they reach.

The tables are a random half of a grid. Each is placed on its grid, its holes are filled along the axes from their
nearest neighbours, and a query is a multilinear interpolation between filled corners; outside them there is no answer.
Seconds are interpolated in linear coordinates: on held-out rows logarithms are three times as far off for attention
and no better for GEMM (docs/catalog.md).

Source: ai-dynamo/aiconfigurator at commit 095f58a5 (Apache-2.0), vLLM 0.24.0, bf16.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError

TABLES = Path(__file__).resolve().parent / "data" / "kernels"
GEMM_COLUMNS = ("m", "n", "k")
ATTENTION_COLUMNS = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim")
LARGEST_LINEAR_HEAD_DIM = 256
"""Beyond it the tables' kernel (FA4) is not linear in the batch. Source: the H200 rows of 16 query and 2 KV heads of
512 at 64 tokens: 1.70 ms for batch 256, 0.33 ms for 1,024."""
Float: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Grid:
    """Values on the product of ascending axes, NaN where nothing near was measured."""

    axes: tuple[tuple[float, ...], ...]
    values: Float

    def at(self, *point: float) -> float | None:
        """Multilinear interpolation; null outside the axes or where a corner that counts is unknown."""
        corners: list[tuple[tuple[int, float], ...]] = []
        for axis, x in zip(self.axes, point, strict=True):
            if not axis[0] <= x <= axis[-1]:
                return None
            low = bisect_right(axis, x) - 1
            if axis[low] == x:
                corners.append(((low, 1.0),))
                continue
            share = (x - axis[low]) / (axis[low + 1] - axis[low])
            corners.append(((low, 1.0 - share), (low + 1, share)))
        total = 0.0
        for corner in itertools.product(*corners):
            weight = 1.0
            for _, share in corner:
                weight *= share
            total += weight * self.values.item(tuple(index for index, _ in corner))
        return None if total != total else total


def gemm_table(m: Float, n: Float, k: Float, seconds: Float) -> Grid:
    """Seconds of [m, k] x [k, n] over (m, n, k)."""
    return _grid([m, n, k], seconds)


AttentionTable: TypeAlias = dict[tuple[int, int], Grid]
"""By (num_kv_heads, head_dim): seconds over (batch, KV length, query heads)."""


def attention_table(
    batch: Float, kv_len: Float, num_q_heads: Float, num_kv_heads: Float, head_dim: Float, seconds: Float
) -> AttentionTable:
    """Table of measured dense decode attention, one token per request, KV lengths equal in the batch."""
    table: AttentionTable = {}
    for kv_heads, dim in sorted(set(zip(num_kv_heads.tolist(), head_dim.tolist(), strict=True))):
        rows = (num_kv_heads == kv_heads) & (head_dim == dim)
        points = [batch[rows], kv_len[rows], num_q_heads[rows]]
        extend = (0, 1) if dim <= LARGEST_LINEAR_HEAD_DIM else ()
        table[int(kv_heads), int(dim)] = _grid(points, seconds[rows], extend)
    return table


@lru_cache(maxsize=65_536)
def gemm_s(table: str, m: int, n: int, k: int) -> float | None:
    """Measured seconds of a bf16 product of `m` rows by a [k, n] weight; null where the table does not reach."""
    return _gemm(table).at(m, n, k)


@lru_cache(maxsize=65_536)
def decode_attention_s(
    table: str, batch: int, kv_len: int, num_q_heads: int, num_kv_heads: int, head_dim: int
) -> float | None:
    """Measured seconds of one layer's dense decode attention, bf16; null where the table does not reach."""
    grid = _attention(table).get((num_kv_heads, head_dim))
    return None if grid is None else grid.at(batch, kv_len, num_q_heads)


def table_columns(path: Path) -> tuple[str, ...]:
    """Column names of a parquet table. Raises InputError for a file that is none."""
    return tuple(_parquet(path).schema_arrow.names)


def read_columns(path: Path, names: Sequence[str]) -> dict[str, Float]:
    """Numeric columns and `latency_ms` of a table of this format.

    Raises InputError: unreadable, a missing column (named), no rows, or a value that is not positive and finite.
    """
    file = _parquet(path)
    missing = [name for name in (*names, "latency_ms") if name not in file.schema_arrow.names]
    if missing:
        raise InputError(f"{path}: missing column {missing[0]!r}; it has {', '.join(file.schema_arrow.names)}")
    try:
        table = file.read(columns=[*names, "latency_ms"])
    except OSError as e:  # pyarrow's error for a damaged page
        raise InputError(f"{path}: damaged table: {' '.join(str(e).split())[:120]}") from None
    if not table.num_rows:
        raise InputError(f"{path}: the table has no rows")
    columns: dict[str, Float] = {}
    for name in table.column_names:
        try:
            # Not to_numpy: it imports pandas, a third of a second.
            values = np.asarray(np.from_dlpack(table[name].combine_chunks()), dtype=np.float64)
        except (TypeError, ValueError):
            raise InputError(f"{path}: column {name!r} is not numeric") from None
        bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if bad.size:
            raise InputError(f"{path}: {name}[{bad[0]}] must be positive and finite, got {values[bad[0]]}")
        columns[name] = values
    return columns


def _parquet(path: Path) -> Any:
    import pyarrow.parquet as pq
    from pyarrow.lib import ArrowException

    try:
        return pq.ParquetFile(path)
    except (OSError, ArrowException) as e:
        raise InputError(f"{path}: not a readable parquet table: {' '.join(str(e).split())[:120]}") from None


@lru_cache(maxsize=8)
def _gemm(table: str) -> Grid:
    columns = read_columns(_file(table, "gemm"), GEMM_COLUMNS)
    return gemm_table(columns["m"], columns["n"], columns["k"], columns["latency_ms"] / 1e3)


@lru_cache(maxsize=8)
def _attention(table: str) -> AttentionTable:
    c = read_columns(_file(table, "decode_attention"), ATTENTION_COLUMNS)
    # Source: the table's notes: KV length = isl + step.
    return attention_table(
        c["batch_size"], c["isl"] + c["step"], c["num_heads"], c["num_key_value_heads"], c["head_dim"],
        c["latency_ms"] / 1e3,
    )  # fmt: skip


def _file(table: str, kernel: str) -> Path:
    path = TABLES / f"{table}_{kernel}_bf16.parquet"
    if not path.is_file():
        known = sorted(p.name.removesuffix("_gemm_bf16.parquet") for p in TABLES.glob("*_gemm_bf16.parquet"))
        raise InputError(f"kernels.table: no {kernel} table {table!r}; there are {', '.join(known)}")
    return path


def _grid(points: Sequence[Float], values: Float, extend: tuple[int, ...] = ()) -> Grid:
    """Values at scattered grid points, holes filled.

    A hole becomes the mean of what each axis' neighbours say, weighted by 1 / (distance in octaves)^2. `extend`: axes
    along which one grid step past the last measurement is drawn on in a straight line.
    """
    axes = [np.unique(p) for p in points]
    grid = np.full([len(axis) for axis in axes], np.nan)
    grid[tuple(np.searchsorted(axis, p) for axis, p in zip(axes, points, strict=True))] = values
    octaves = [np.log2(axis) for axis in axes]
    everywhere = range(len(axes))
    while _fill_with(_between, axes, grid, octaves, everywhere):
        pass
    if extend and _fill_with(_beyond, axes, grid, octaves, extend):
        while _fill_with(_between, axes, grid, octaves, everywhere):
            pass
    return Grid(tuple(tuple(axis.tolist()) for axis in axes), grid)


def _fill_with(
    guesser: Callable[[Float, Float, Float], tuple[Float, Float]],
    axes: list[Float], grid: Float, octaves: list[Float], along: Iterable[int],
) -> bool:  # fmt: skip
    """Fill in place the holes that `guesser` reaches from the values known now; whether there were any."""
    total, weights = np.zeros_like(grid), np.zeros_like(grid)
    for axis in along:
        guess, weight = guesser(axes[axis], octaves[axis], np.moveaxis(grid, axis, -1))
        total += np.moveaxis(guess * weight, -1, axis)
        weights += np.moveaxis(weight, -1, axis)
    holes = np.isnan(grid) & (weights > 0)
    grid[holes] = total[holes] / weights[holes]
    return bool(holes.any())


def _between(x: Float, octave: Float, lines: Float) -> tuple[Float, Float]:
    """For each hole of `lines` [..., len(x)]: linear interpolation between its known neighbours, and its weight."""
    low, high, inside = _known_neighbours(lines)
    inside &= np.isnan(lines)
    low, high = np.where(inside, low, 0), np.where(inside, high, 0)
    y_low, y_high = np.take_along_axis(lines, low, -1), np.take_along_axis(lines, high, -1)
    span = np.where(inside, x[high] - x[low], 1.0)
    guess = np.where(inside, y_low + (y_high - y_low) * (x - x[low]) / span, 0.0)
    distance = np.where(inside, np.minimum(octave - octave[low], octave[high] - octave), 1.0)
    return guess, np.where(inside, 1.0 / distance**2, 0.0)


def _known_neighbours(lines: Float) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Index of the nearest known value at or below and at or above each place, and where both exist."""
    size = lines.shape[-1]
    known = ~np.isnan(lines)
    index = np.arange(size)
    below = np.maximum.accumulate(np.where(known, index, -1), axis=-1)
    above = np.minimum.accumulate(np.where(known, index, size)[..., ::-1], axis=-1)[..., ::-1]
    return below, above, (below >= 0) & (above < size)


def _beyond(x: Float, octave: Float, lines: Float) -> tuple[Float, Float]:
    """For the hole right after two adjacent known values: their straight line, and its weight.

    Kept between no growth and growth in proportion, which bound any kernel of the form t0 + c x.
    """
    guess, weight = np.zeros_like(lines), np.zeros_like(lines)
    slope = (lines[..., 1:-1] - lines[..., :-2]) / (x[1:-1] - x[:-2])
    last = lines[..., 1:-1]
    drawn = np.clip(last + slope * (x[2:] - x[1:-1]), last, last * x[2:] / x[1:-1])
    holes = np.isnan(lines[..., 2:]) & ~np.isnan(drawn)
    guess[..., 2:] = np.where(holes, drawn, 0.0)
    weight[..., 2:] = np.where(holes, 1.0 / (octave[2:] - octave[1:-1]) ** 2, 0.0)
    return guess, weight
