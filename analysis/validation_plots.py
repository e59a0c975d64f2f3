"""Pictures of a validation: predicted against measured, and the error against how much there is to hide.

python -m analysis.validation_plots FOLDER    (a folder that `oasis-sim validate` wrote)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from analysis import style
from analysis.load import read_table
from traces.one_line import end_in_one_line

TABLE = "points.parquet"
COLUMNS = (
    "system", "model", "device", "hardware", "warning", "measured_tpot_s", "predicted_tpot_s", "error",
    "transfer_over_compute", "workload.batch_size",
)  # fmt: skip
CONTENDED = (0.5, 2.0)
"""Transfer / compute within which neither side hides the other."""
LEAST_RATIO = 0.02
"""Where points that move less, or nothing, stand on the logarithmic axis."""
GOAL = 0.03
"""Aim of the median error."""


def _looks(frame: pd.DataFrame) -> dict[str, style.Look]:
    return style.system_looks(sorted(frame["system"].unique(), key=list(style.KNOWN_LOOKS).index))


def _marks(axes: Axes, frame: pd.DataFrame, x: pd.Series, y: pd.Series) -> None:
    for system, look in _looks(frame).items():
        own = frame["system"] == system
        axes.scatter(
            x[own], y[own], s=24, marker=look.marker, facecolors=look.color, edgecolors="white", linewidths=0.4,
            zorder=3, gid=system,
        )  # fmt: skip
    axes.grid(True)


def _handles(frame: pd.DataFrame) -> list[Line2D]:
    counts = frame["system"].value_counts()
    return [
        Line2D([], [], marker=look.marker, ms=5.5, mfc=look.color, mec="white", ls="none", label=f"{s} ({counts[s]})")
        for s, look in _looks(frame).items()
    ]


def _figures(axis: Axis) -> None:
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _of(frame: pd.DataFrame) -> str:
    models = ", ".join(sorted(frame["model"].unique()))
    return (
        f"{len(frame)} decode points on {frame['device'].iloc[0]} ({models}); profile {frame['hardware'].iloc[0]}, "
        "nothing fitted to a step's time."
    )


def _notes(frame: pd.DataFrame) -> list[str]:
    warning = frame["warning"].iloc[0]
    return [f"OTHER DEVICE: {warning}"] if isinstance(warning, str) else []


@style.styled
def draw_scatter(frame: pd.DataFrame) -> Figure:
    """Predicted against measured TPOT; the band is ±5 %."""
    figure = Figure(figsize=(style.WIDTH_IN, 5.2), dpi=style.DPI)
    axes = figure.add_subplot()
    measured, predicted = 1e3 * frame["measured_tpot_s"], 1e3 * frame["predicted_tpot_s"]
    low, high = min(measured.min(), predicted.min()) * 0.9, max(measured.max(), predicted.max()) * 1.1
    ends = np.array([low, high])
    axes.fill_between(ends, 0.95 * ends, 1.05 * ends, color="#eeeeee", lw=0, zorder=1)
    axes.plot(ends, ends, color=style.QUIET, lw=0.8, zorder=2)
    _marks(axes, frame, measured, predicted)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    _figures(axes.xaxis)
    _figures(axes.yaxis)
    axes.set_xlabel("measured TPOT (ms)")
    axes.set_ylabel("predicted TPOT (ms)")
    errors = frame["error"].abs()
    title = (
        f"Predictions of a step are off by {errors.median():.1%} in the median, "
        f"{errors.quantile(0.95):.1%} at the 95th percentile"
    )
    style.frame_figure(figure, title, f"{_of(frame)} Grey: ±5 %.", _notes(frame), _handles(frame), 5)
    return figure


@style.styled
def draw_residuals(frame: pd.DataFrame) -> Figure:
    """Signed error against transfer / compute."""
    figure = Figure(figsize=(style.WIDTH_IN, 4.8), dpi=style.DPI)
    axes = figure.add_subplot()
    ratio = frame["transfer_over_compute"].clip(lower=LEAST_RATIO)
    # Points that move nothing stand side by side, in the order of their step's time.
    still = frame["transfer_over_compute"] <= LEAST_RATIO
    place = frame["measured_tpot_s"].where(still).rank(pct=True).fillna(0)
    x = ratio.where(~still, LEAST_RATIO * 10 ** (0.25 * (place - 0.5)))
    axes.axvspan(*CONTENDED, color="#f2f2f2", lw=0, zorder=0)
    axes.axhline(0, color=style.QUIET, lw=0.8, zorder=2)
    for goal in (-GOAL, GOAL):
        axes.axhline(100 * goal, color=style.FAINT, lw=0.8, ls="--", zorder=2)
    _marks(axes, frame, x, 100 * frame["error"])
    axes.set_xscale("log")
    ticks = [LEAST_RATIO, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50]
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if tick <= 1.5 * ratio.max()]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: "none" if v <= LEAST_RATIO else f"{v:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("transfer alone / compute alone")
    axes.set_ylabel("error of predicted TPOT (%)")
    contended = frame[frame["transfer_over_compute"].between(*CONTENDED)]["error"]
    rest = frame[~frame["transfer_over_compute"].between(*CONTENDED)]["error"]
    title = f"Median |error| {rest.abs().median():.1%} elsewhere" if contended.empty else (
        f"Where transfer takes half to twice as long as compute the median |error| is "
        f"{contended.abs().median():.1%}, elsewhere {rest.abs().median():.1%}"
    )  # fmt: skip
    text = f"{_of(frame)} Grey: transfer / compute of 0.5 to 2; dashed: ±{GOAL:.0%}. Above 0: predicted too slow."
    style.frame_figure(figure, title, text, _notes(frame), _handles(frame), 5)
    return figure


def draw_all(folder: Path) -> list[Path]:
    """Write both pictures beside the table; returns their paths. Raises InputError where there is no such table."""
    frame = read_table(folder / TABLE, COLUMNS, "a validation's table")
    paths = []
    for name, draw in (("validation-scatter.png", draw_scatter), ("validation-residuals.png", draw_residuals)):
        with style.applied():
            draw(frame).savefig(folder / name)
        paths.append(folder / name)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    for path in draw_all(parser.parse_args().folder):
        print(path)


if __name__ == "__main__":
    end_in_one_line()
    main()
