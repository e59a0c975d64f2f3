"""Pictures of what sparsity costs in quality, from the quality.parquet of `oasis-sim quality`.

python -m analysis.quality_plots FOLDER [--task TASK] [--out FOLDER]
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
from analysis.quality_tables import BLOCK, BUDGET, CAP, informed, load_quality, rank_correlation
from traces.errors import InputError
from traces.one_line import end_in_one_line

DRAWN = {"previous": "D", "draft1": "o", "draft4": "v", "oracle": "^"}
"""Predictors of the picture of traffic; the others lie between them."""
BUDGET_COLORS = ("#E69F00", "#0072B2", "#009E73", "#CC79A7")
BLOCK_COLORS = ("#0072B2", "#E69F00", "#009E73")
RANDOM_COLOR = "#999999"
LEAST_KL = 1e-4
"""Policies below it, whose budget holds the whole context, are left out of a logarithmic picture."""


def _set_log(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        _plain_ticks(axis)
    axes.grid(True)


def _plain_ticks(axis: Axis) -> None:
    """Figures instead of powers on a log axis, at 1, 2 and 5 of each decade."""
    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _subtitle(frame: pd.DataFrame, what: str) -> str:
    prompts, steps = frame["num_prompts"], frame["num_steps"]
    count = f"{prompts.min()}" if prompts.min() == prompts.max() else f"{prompts.min()} to {prompts.max()}"
    return f"{what} {count} prompts, up to {int(steps.max()):,} positions a policy; below {LEAST_KL:g} nats not shown."


@style.styled
def draw_bytes(frame: pd.DataFrame) -> Figure:
    """KL against bytes that cross the host link per token, a panel per block size; lines join the fetch caps."""
    moving = frame[(frame["h2d_bytes_per_token"] > 0) & frame["predictor"].isin(DRAWN) & (frame["kl"] >= LEAST_KL)]
    if moving.empty:
        raise InputError("no policy that predicts moves any bytes; there is nothing to draw against them")
    budgets, blocks = sorted(moving[BUDGET].unique()), sorted(moving[BLOCK].unique())
    figure = Figure(figsize=(style.WIDTH_IN, 4.4), dpi=style.DPI)
    grid = figure.subplots(1, len(blocks), sharex=True, sharey=True, squeeze=False)[0]
    for axes, block in zip(grid, blocks, strict=True):
        for (budget, predictor), own in moving[moving[BLOCK] == block].groupby([BUDGET, "predictor"], sort=True):
            own = own.sort_values(CAP)
            color = BUDGET_COLORS[budgets.index(budget) % len(BUDGET_COLORS)]
            x = own["h2d_bytes_per_token"] * 1e-6
            if predictor == "draft1":
                axes.fill_between(x, own["kl_low"], own["kl_high"], color=style.pale(color), alpha=0.6, lw=0)
            axes.plot(x, own["kl"], color=color, marker=DRAWN[predictor], ms=4, lw=0.9, gid=f"{predictor} {budget}")
        axes.set_title(f"blocks of {block} tokens")
        axes.set_xlabel("host-to-HBM traffic (MB per token)")
    for axes in grid:
        _set_log(axes)
    grid[0].set_ylabel("KL divergence from dense (nats per token)")
    handles = [
        Line2D([], [], color=color, lw=3, label=f"{budget:,} tokens")
        for budget, color in zip(budgets, BUDGET_COLORS, strict=False)
    ]
    present = [p for p in DRAWN if p in set(moving["predictor"])]
    handles += [Line2D([], [], color=style.INK, marker=DRAWN[p], ms=4, ls="none", label=p) for p in present]
    caps = ", ".join(f"{cap:g}" for cap in sorted(moving[CAP].unique()))
    band = " Band: 95 % bootstrap interval over prompts, draft1." if "draft1" in present else ""
    what = f"Colour: KV budget. A line's points are fetch caps of {caps}.{band}"
    style.frame_figure(figure, _cap_title(moving), _subtitle(moving, what), (), handles, 8)
    return figure


def _cap_title(frame: pd.DataFrame) -> str:
    """What the smallest cap and none cost, at the middle budget and block size of the first predictor drawn."""
    budgets, blocks = sorted(frame[BUDGET].unique()), sorted(frame[BLOCK].unique())
    budget, block = budgets[len(budgets) // 2], blocks[len(blocks) // 2]
    predictor = "draft1" if "draft1" in set(frame["predictor"]) else str(frame["predictor"].iloc[0])
    own = frame[(frame[BUDGET] == budget) & (frame[BLOCK] == block) & (frame["predictor"] == predictor)]
    told = [
        f"{row['h2d_bytes_per_token'] * 1e-6:.2f} MB a token for {row['kl']:.3f} nats at a cap of {row[CAP]:g}"
        for _, row in own.sort_values(CAP).iloc[[0, -1]].iterrows()
    ]
    return f"{predictor}, budget {budget:,}, blocks of {block}: {', '.join(dict.fromkeys(told))}"


@style.styled
def draw_recall(frame: pd.DataFrame) -> Figure:
    """KL against the attention mass that is missed: is recall a proxy, and what recall buys what KL?"""
    shown = frame[(frame["kl"] >= LEAST_KL) & (frame["recall"] < 1)]
    if shown.empty:
        raise InputError(f"no policy differs from dense by {LEAST_KL:g} nats; there is nothing to draw")
    budgets, blocks = sorted(shown[BUDGET].unique()), sorted(shown[BLOCK].unique())
    figure = Figure(figsize=(style.WIDTH_IN, 4.8), dpi=style.DPI)
    axes = figure.add_subplot()
    for block, color in zip(blocks, BLOCK_COLORS, strict=False):
        for random in (True, False):
            own = shown[(shown[BLOCK] == block) & ((shown["predictor"] == "random") == random)]
            axes.scatter(
                1 - own["recall"],
                own["kl"],
                s=[8 + 12 * budgets.index(budget) for budget in own[BUDGET]],
                marker="X" if random else "o",
                facecolors="none" if not random else RANDOM_COLOR,
                edgecolors=RANDOM_COLOR if random else color,
                linewidths=0.8,
                gid=f"{block} {'random' if random else 'predicted'}",
            )
    _set_log(axes)
    axes.invert_xaxis()
    axes.set_xlabel("attention mass missed (1 − recall)")
    axes.set_ylabel("KL divergence from dense (nats per token)")
    predicted = informed(shown)
    title = (
        f"KL falls as recall grows: rank correlation {_correlation(predicted)} over {len(predicted)} policies; "
        f"at one budget and block size {_correlation_within(predicted)} in the median"
    )
    handles = [
        Line2D([], [], marker="o", ls="none", mfc="none", mec=color, label=f"blocks of {block}")
        for block, color in zip(blocks, BLOCK_COLORS, strict=False)
    ]
    if len(predicted) < len(shown):
        handles.append(Line2D([], [], marker="X", ls="none", mfc=RANDOM_COLOR, mec=RANDOM_COLOR, label="random"))
        title += ", random ones left out"
    sizes = ", ".join(f"{b:,}" for b in budgets)
    what = f"A point per policy; larger marks have a larger budget ({sizes} tokens)."
    style.frame_figure(figure, title, _subtitle(shown, what), (), handles, 8)
    return figure


def _correlation(frame: pd.DataFrame) -> str:
    return f"{rank_correlation(frame['recall'], frame['kl']):.2f}" if len(frame) > 2 else "unknown"


def _correlation_within(frame: pd.DataFrame) -> str:
    found = [rank_correlation(own["recall"], own["kl"]) for _, own in frame.groupby([BUDGET, BLOCK]) if len(own) > 2]
    return f"{np.median(found):.2f}" if found else "unknown"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", default="all", help="of the prompts; default: every prompt")
    parser.add_argument("--out", type=Path, help="default: the folder")
    given = parser.parse_args(arguments)
    frame = load_quality(given.folder, given.task)
    out = given.out or given.folder
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in (("bytes", draw_bytes), ("recall", draw_recall)):
        with style.applied():
            draw(frame).savefig(out / f"{given.folder.name}-{name}.png")


if __name__ == "__main__":
    end_in_one_line()
    main()
