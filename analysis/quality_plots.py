"""Pictures of what sparsity costs in quality, from the quality.parquet of `oasis-sim quality`.

python -m analysis.quality_plots FOLDER [FOLDER ...] [--out FOLDER]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analysis import style
from analysis.load import read_table
from traces.errors import InputError

TABLE = "quality.parquet"
BUDGET = "policy.kv_budget_tokens"
LOOKS = {
    "current": style.Look("#56B4E9", "^"),
    "previous": style.KNOWN_LOOKS["prefetch-previous"],
    "draft1": style.KNOWN_LOOKS["oasiskv"],
    "draft2": style.Look("#CC79A7", "s"),
    "draft3": style.Look("#8C6D31", "P"),
    "draft4": style.Look("#333333", "v"),
    "oracle": style.KNOWN_LOOKS["oasiskv-oracle"],
    "random": style.Look("#999999", "X"),
}
COLUMNS = ("predictor", BUDGET, "kl", "kl_low", "kl_high", "recall", "h2d_bytes_per_token", "num_prompts", "num_steps")


def load_quality(folders: Sequence[Path]) -> pd.DataFrame:
    """Rows of all folders, with their name in `run`. Raises InputError where one has no such table."""
    frames = []
    for folder in folders:
        path = folder / TABLE if folder.is_dir() else folder
        frame = read_table(path, COLUMNS, "a quality table")
        frames.append(frame.assign(run=folder.name))
    return pd.concat(frames, ignore_index=True)


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's, with mean ranks for ties."""
    ranks = [pd.Series(values).rank().to_numpy() for values in (x, y)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _correlation(frame: pd.DataFrame) -> str:
    if len(frame) < 3:
        return "unknown"
    return f"{rank_correlation(frame['recall'].tolist(), frame['kl'].tolist()):.2f}"


def _scatter(axes: Axes, frame: pd.DataFrame, column: str, scale: float) -> None:
    budgets = sorted(frame[BUDGET].unique())
    for predictor, look in LOOKS.items():
        own = frame[frame["predictor"] == predictor]
        sizes = [18 + 26 * budgets.index(budget) for budget in own[BUDGET]]
        low = np.maximum(own["kl"] - own["kl_low"], 0)
        high = np.maximum(own["kl_high"] - own["kl"], 0)
        axes.errorbar(
            own[column] * scale, own["kl"], yerr=[low, high], fmt="none", ecolor=style.pale(look.color), elinewidth=0.8
        )
        axes.scatter(
            own[column] * scale,
            own["kl"],
            s=sizes,
            marker=look.marker,
            facecolors=look.color if look.filled else "white",
            edgecolors=look.color,
            linewidths=0.9,
            zorder=3,
            gid=predictor,
        )
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)
    axes.grid(True)
    axes.set_ylabel("KL divergence from dense (nats per token)")


def _plain_ticks(axis: Axis) -> None:
    """Figures instead of powers on a log axis, at 1, 2 and 5 of each decade."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _handles(frame: pd.DataFrame) -> list[Line2D]:
    present = [p for p in LOOKS if p in set(frame["predictor"])]
    handles = []
    for predictor in present:
        look = LOOKS[predictor]
        face = look.color if look.filled else "white"
        handles.append(Line2D([], [], marker=look.marker, ms=5.5, mfc=face, mec=look.color, ls="none", label=predictor))
    return handles


def _subtitle(frame: pd.DataFrame) -> str:
    budgets = ", ".join(f"{b:,}" for b in sorted(frame[BUDGET].unique()))
    return (
        f"A point per policy; larger marks have a larger budget ({budgets} tokens). "
        f"{int(frame['num_prompts'].max())} prompts, {int(frame['num_steps'].max())} positions in all; "
        "bars: 95 % bootstrap interval over prompts."
    )


@style.styled
def draw_bytes(frame: pd.DataFrame) -> Figure:
    """KL against bytes that cross the host link per token."""
    figure = Figure(figsize=(style.WIDTH_IN, 4.8), dpi=style.DPI)
    axes = figure.add_subplot()
    moving = frame[frame["h2d_bytes_per_token"] > 0]
    if moving.empty:
        raise InputError("no policy moves any bytes; there is nothing to draw against them")
    _scatter(axes, moving, "h2d_bytes_per_token", 1e-6)
    axes.set_xscale("log")
    _plain_ticks(axes.xaxis)
    axes.set_xlabel("host-to-HBM traffic (MB per token)")
    middle = sorted(moving[BUDGET].unique())[len(moving[BUDGET].unique()) // 2]
    own = moving[(moving[BUDGET] == middle) & (moving["predictor"] != "random")]
    best, worst = own.loc[own["kl"].idxmin()], own.loc[own["kl"].idxmax()]
    apart = "and their intervals are apart" if best["kl_high"] < worst["kl_low"] else "and their intervals overlap"
    title = (
        f"At {middle:,} tokens of budget, policies that predict lie between {best['kl']:.3f} ({best['predictor']}) "
        f"and {worst['kl']:.3f} nats ({worst['predictor']}), {apart}"
    )
    style.frame_figure(figure, title, _subtitle(moving), (), _handles(moving), 8)
    return figure


@style.styled
def draw_recall(frame: pd.DataFrame) -> Figure:
    """KL against recall: is recall a proxy?"""
    figure = Figure(figsize=(style.WIDTH_IN, 4.8), dpi=style.DPI)
    axes = figure.add_subplot()
    _scatter(axes, frame, "recall", 1.0)
    axes.set_xlabel("recall (share of attention mass on blocks that attention reads)")
    informed = frame[frame["predictor"] != "random"]
    title = (
        f"KL falls as recall grows: rank correlation {_correlation(frame)} over {len(frame)} policies, "
        f"{_correlation(informed)} without the random ones"
    )
    style.frame_figure(figure, title, _subtitle(frame), (), _handles(frame), 8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="default: the first folder")
    given = parser.parse_args()
    frame = load_quality(given.folders)
    out = given.out or given.folders[0]
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in (("quality-bytes", draw_bytes), ("quality-recall", draw_recall)):
        with style.applied():
            draw(frame).savefig(out / f"{name}.png")


if __name__ == "__main__":
    main()
