"""Pictures of where drafts miss, from misses.parquet; of recall under fetch caps; of drafts over a working set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis import style
from analysis.overlap_frames import LOOKS, at_budget, is_first_column, panels, require, share_limits, trace_names

CASES = (
    ("draft", "right", "draft, token right", LOOKS["draft"].color, True),
    ("draft", "wrong", "draft, token wrong", LOOKS["draft"].color, False),
    ("previous", "wrong", "earlier query, same steps", LOOKS["previous"].color, False),
)
"""Predictor, kind of guess, name, colour, pale."""
CHANGE_NAMES = {"returned": "came back"}
BY_NAMES = {
    "change": "kind of block",
    "place": "age of the block (tokens)",
    "churn": "share of the set that is new in the step",
}
CAP_LOOKS = {
    ("draft", 1): (LOOKS["draft"], "-", "draft, 1 ahead"),
    ("draft", 4): (LOOKS["draft"], ":", "draft, 4 ahead"),
    ("previous", 1): (LOOKS["previous"], "-", "earlier query, 1 ahead"),
    ("current", 0): (style.KNOWN_LOOKS["retrieval"], "-", "on demand"),
    ("oracle", 1): (style.KNOWN_LOOKS["oasiskv-oracle"], "-", "every token right"),
    ("random", 1): (LOOKS["random"], "-", "random blocks"),
}


def found_by(frame: pd.DataFrame, by: str) -> pd.DataFrame:
    """Sums over layers by (predictor, guess, trace, order, bin); share found and mass missed per step and head."""
    own = frame[frame["by"] == by]
    keys = ["predictor", "guess", "trace", "order", "bin"]
    mean = own.groupby(keys)[["true_blocks", "missed_blocks", "true_mass", "missed_mass", "row_share"]].mean()
    return mean.assign(found=1 - mean["missed_blocks"] / mean["true_blocks"])


@style.styled
def draw_misses(frame: pd.DataFrame, budget_tokens: int) -> Figure:
    """Share of needed blocks found one step ahead, and mass missed, by change, place and churn; dots are traces."""
    rows = at_budget(frame, budget_tokens)
    rows = require(rows[rows["distance"] == 1], "draft", "wrong")
    figure = Figure(figsize=(style.WIDTH_IN, 5.4), dpi=style.DPI)
    grid = figure.subplots(2, 3, gridspec_kw={"width_ratios": [3, 6, 5]})
    told: dict[str, pd.DataFrame] = {}
    for column, by in enumerate(("change", "place", "churn")):
        found = found_by(rows, by)
        bins = found.reset_index().drop_duplicates("order").sort_values("order")["bin"]
        for row, (value, scale) in enumerate((("found", 100), ("missed_mass", 100))):
            _draw_bins(grid[row][column], found, list(bins), value, scale, by)
        grid[0][column].set_title(BY_NAMES[by], fontsize=8)
        told[by] = found
    grid[0][0].set_ylabel("needed blocks found (%)")
    grid[1][0].set_ylabel("mass missed (points)")
    for axes in grid[0]:
        axes.set_ylim(0, 105)
    most = max(axes.get_ylim()[1] for axes in grid[1])
    for axes in grid[1]:
        axes.set_ylim(0, most)
    legend = [
        Patch(facecolor=style.pale(color) if faint else color, edgecolor=color, label=name)
        for _, _, name, color, faint in CASES
    ]
    change = told["change"]["found"].groupby(level=["predictor", "guess", "bin"]).mean()
    wrong = {name: 100 * float(change["draft", "wrong", name]) for name in ("stayed", "returned", "new")}
    title = (
        f"A wrong draft token still finds {wrong['returned']:.0f} % of the blocks that come back and "
        f"{wrong['new']:.0f} % of new ones; it loses {100 - wrong['stayed']:.0f} % of those that stay"
    )
    count, size = int(rows["num_blocks"].iloc[0]), int(rows["block_size_tokens"].iloc[0])
    traces = rows["trace"].nunique()
    means = f" Bars: means over {traces} traces." if traces > 1 else ""
    notes = (
        "Stayed: needed by the step before, too. Came back: not by it, but within the 64 steps before it. A needed "
        "block that has just filled is resident and left out. Mass: attention mass." + means,
    )
    under = f"One step ahead, best {count} blocks of {size} tokens, mean over steps, layers and KV heads"
    under += "; dots: traces" if traces > 1 else ""
    style.frame_figure(figure, title, under, notes, legend, 3)
    return figure


def _draw_bins(axes: Axes, found: Any, bins: list[str], value: str, scale: float, by: str) -> None:
    for offset, (predictor, guess, _, color, faint) in enumerate(CASES):
        if (predictor, guess) not in found.index.droplevel(["trace", "order", "bin"]):
            continue
        own: Any = scale * found.loc[predictor, guess][value]
        for at, name in enumerate(bins):
            values = own.xs(name, level="bin") if name in own.index.get_level_values("bin") else own.iloc[:0]
            if values.empty:
                continue
            x = at + 0.27 * (offset - 1)
            face = style.pale(color) if faint else color
            axes.bar(
                x, float(values.mean()), 0.25, color=face, edgecolor=color, lw=0.5, gid=f"{predictor} {guess} {name}"
            )  # fmt: skip
            if len(values) > 1:
                axes.plot([x] * len(values), values, ls="none", marker=".", ms=2.5, color=style.INK, zorder=3)
    names = [CHANGE_NAMES.get(name, name.replace(" and more", "\nand more").replace(" to ", "\nto ")) for name in bins]
    axes.set_xticks(range(len(bins)), names, fontsize=6.2)
    axes.tick_params(axis="y", labelsize=7)
    axes.grid(True, axis="y")


@style.styled
def draw_caps(frame: pd.DataFrame, budget_tokens: int) -> Figure:
    """Hit rate, and recall beside that of uncapped on-demand retrieval, against the fetch cap; two panels per trace."""
    rows = at_budget(frame, budget_tokens)
    rows = require(rows[rows["rules"] == "table"], "draft")
    uncapped = rows[(rows["predictor"] == "current") & (rows["fetch_cap"] == rows["fetch_cap"].max())]
    reference = uncapped.groupby("trace")["recall"].mean()
    rows = rows.assign(more=100 * (rows["recall"] - rows["trace"].map(reference)))
    names = trace_names(rows)
    figure, axes_of = panels(names, 2, 3.4)
    for trace, pair in axes_of.items():
        own = rows[rows["trace"] == trace]
        for (predictor, distance), (look, dash, _) in CAP_LOOKS.items():
            line = own[(own["predictor"] == predictor) & (own["distance"] == distance)].sort_values("fetch_cap")
            if line.empty or predictor == "random":
                continue
            for axes, column in zip(pair, ("hit_rate", "more"), strict=True):
                axes.plot(
                    line["fetch_cap"], line[column], color=look.color, marker=look.marker, ms=3.5, lw=1.1, ls=dash,
                    mfc=look.color if look.filled else "white", gid=f"{predictor} {distance}",
                )  # fmt: skip
        for axes in pair:
            axes.set_xscale("log")
            caps = sorted(own["fetch_cap"].unique())
            axes.set_xticks(caps, [f"{cap:g}".lstrip("0") for cap in caps], fontsize=6.5)
            axes.minorticks_off()
            axes.grid(True, axis="y")
        pair[1].set_xlabel("fetch cap", fontsize=7.5)
        if is_first_column(pair[0]):
            pair[0].set_ylabel("hit rate")
            pair[1].set_ylabel("recall (points)")
    seen = rows[rows["predictor"] != "random"]
    share_limits([pair[0] for pair in axes_of.values()], _floor(seen["hit_rate"].min()), 1.02)
    share_limits([pair[1] for pair in axes_of.values()], seen["more"].min() - 0.2, seen["more"].max() + 0.2)
    draft = seen[(seen["predictor"] == "draft") & (seen["distance"] == 1)].groupby("fetch_cap")[["hit_rate", "recall"]]
    mean = draft.mean()
    first, last = mean.iloc[0], mean.iloc[-1]
    title = (
        f"With {100 * mean.index[0]:g} % of K fetched a step instead of all, the draft's hit rate is "
        f"{100 * first['hit_rate']:.0f} instead of {100 * last['hit_rate']:.0f} %, its recall "
        f"{100 * first['recall']:.1f} instead of {100 * last['recall']:.1f} %"
    )
    shown = {key: value for key, value in CAP_LOOKS.items() if key[0] != "random"}
    legend = _legend(shown.values(), ms=4, lw=1.1)
    under = (
        f"Replay at a budget of {budget_tokens:,} tokens against the fetch cap (share of K per step; 1: none); "
        "recall less that of uncapped on-demand retrieval"
    )
    style.frame_figure(figure, title, under, (), legend, 5)
    return figure


def _legend(shown: Iterable[tuple[style.Look, str, str]], ms: float, lw: float) -> list[Line2D]:
    """A line of each (look, dash, name) as the picture draws it."""
    return [
        Line2D(
            [], [], color=look.color, marker=look.marker, ms=ms, lw=lw, ls=dash, label=name,
            mfc=look.color if look.filled else "white",
        )
        for look, dash, name in shown
    ]  # fmt: skip


def _floor(value: float) -> float:
    return max(0.0, int(value * 20 - 0.5) / 20)


@style.styled
def draw_sparse(frame: pd.DataFrame, budget_tokens: int) -> Figure:
    """Drafts whose pass attended to a working set beside dense ones, by distance. InputError where none ran."""
    rows = at_budget(frame, budget_tokens)
    rows = require(rows[rows["guess"] == "all"], "draft_sparse")
    sparse = rows[rows["predictor"] == "draft_sparse"]
    trace = str(sparse["trace"].iloc[0])
    own = rows[rows["trace"] == trace]
    mean = own.groupby(["predictor", "distance"])[["overlap", "recall", "recall_true", "agreement"]].mean()
    mean["lost"] = 100 * (mean["recall_true"] - mean["recall"])
    figure = Figure(figsize=(style.WIDTH_IN, 3.4), dpi=style.DPI)
    left, middle, right = figure.subplots(1, 3)
    kinds = {
        "draft": (LOOKS["draft"], "-", "draft, dense pass"),
        "draft_sparse": (style.Look(LOOKS["draft"].color, "s", filled=False), "--", "draft over the working set"),
        "previous": (LOOKS["previous"], "-", "earlier query"),
    }
    for kind, (look, dash, _) in kinds.items():
        for axes, column in ((left, "overlap"), (middle, "lost")):
            axes.plot(
                mean.loc[kind].index, mean.loc[kind][column], color=look.color, marker=look.marker, ms=4.5, lw=1.3,
                ls=dash, mfc=look.color if look.filled else "white", gid=kind,
            )  # fmt: skip
    both = mean.loc["draft_sparse"]["agreement"]
    right.plot(both.index, both, color=style.INK, marker="o", ms=4.5, lw=1.3, gid="agreement")
    left.set_ylabel("overlap with the true set")
    middle.set_ylabel("mass lost (points)")
    right.set_ylabel("overlap of the two drafts")
    left.set_ylim(0.5, 1)
    middle.set_ylim(0, None)
    right.set_ylim(0.5, 1)
    for axes in (left, middle, right):
        axes.set_xlabel("distance (steps)")
        axes.set_xticks(sorted(own["distance"].unique()))
        axes.grid(True, axis="y")
    drop = 100 * (mean.loc["draft"]["overlap"] - mean.loc["draft_sparse"]["overlap"])
    title = (
        f"A draft that attends to the working set alone names {100 * (1 - float(both.mean())):.1f} % other blocks and "
        f"finds {drop.min():.1f} to {drop.max():.1f} points less of the true set"
    )
    legend = _legend(kinds.values(), ms=4.5, lw=1.3)
    count, size = int(own["num_blocks"].iloc[0]), int(own["block_size_tokens"].iloc[0])
    under = f"{trace_names(frame)[trace]}; best {count} blocks of {size} tokens, mean over steps, layers and KV heads"
    style.frame_figure(figure, title, under, (), legend, 3)
    return figure
