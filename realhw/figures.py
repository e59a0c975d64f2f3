"""From measurements to a profile's figures: value, spread, repetitions and where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from realhw.measurement import Measurement
from simulator.specs.base import Figure


def fit_affine(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """y = t0 + slope x by least squares of relative errors: (t0 >= 0, slope, worst relative error)."""
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    design = np.stack([1.0 / ys, xs / ys], axis=1)
    t0, slope = np.linalg.lstsq(design, np.ones_like(ys), rcond=None)[0]
    if t0 < 0.0:
        t0 = 0.0
        ratio = xs / ys
        slope = ratio.sum() / (ratio * ratio).sum()
    worst = float(np.abs((t0 + slope * xs) / ys - 1.0).max())
    return float(t0), float(slope), worst


def rounded(value: float) -> float:
    """Five significant digits: beyond them is noise."""
    return float(f"{value:.5g}")


@dataclass(frozen=True, slots=True)
class FigureMaker:
    """Figures of one calibration."""

    on: str
    """Device, software and date: the head of every source."""

    def figure(self, value: float, what: str, spread: float, repetitions: int) -> Figure:
        return Figure(
            value=rounded(value), source=f"{self.on}: {what}", spread=rounded(spread), repetitions=repetitions
        )

    def rate(self, row: Measurement, what: str) -> Figure:
        """Bytes of a row over its time."""
        value = row.num_bytes / row.median
        return self.figure(value, what, value * row.spread / row.median, row.repetitions)

    def time(self, row: Measurement, what: str) -> Figure:
        return self.figure(row.median, what, row.spread, row.repetitions)

    def fit(self, rows: Sequence[Measurement], x: Sequence[float], what: str, inverse: bool) -> tuple[Figure, Figure]:
        """(t0, slope or its inverse); the spread is that of the repetitions, the fit's worst error is in the source."""
        t0, slope, worst = fit_affine(x, [r.median for r in rows])
        relative = float(np.median([r.spread / r.median for r in rows]))
        text = f"{what}; fit to {len(rows)} sizes, least squares of relative errors, off by at most {worst:.1%}"
        value = 1.0 / slope if inverse else slope
        n = min(r.repetitions for r in rows)
        return self.figure(t0, text, t0 * relative, n), self.figure(value, text, value * relative, n)
