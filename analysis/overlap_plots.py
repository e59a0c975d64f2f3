"""Pictures of how well predictors find the blocks that attention selects, from overlap.parquet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis import style
from analysis.overlap_frames import (
    LOOKS,
    MAX_PANELS,
    NAMES,
    OWN_QUERY,
    at_budget,
    handles,
    is_first_column,
    panels,
    require,
    share_limits,
    trace_names,
)
from analysis.text_fit import wrapped
from traces.errors import InputError

CMAP = "cividis"
GAIN_CMAP = "BrBG"
BAR_GAP_IN = 0.12
"""Between the colour bars' numbers and the title of the upper maps."""
LABEL_PT, LABELS_SHARE = 6.5, 0.8
"""Of the names below bars: their size, and the share of the figure's width that they may fill."""


def every_step(rows: pd.DataFrame, *predictors: str) -> pd.DataFrame:
    """Rows over all steps, of these predictors."""
    return rows[(rows["guess"] == "all") & rows["predictor"].isin(predictors)]


@style.styled
def draw_distance(frame: pd.DataFrame, budget_tokens: int) -> Figure:
    """Overlap, and attention mass lost against the step's own query, by distance; two panels per trace."""
    rows = require(at_budget(frame, budget_tokens), "draft")
    names = trace_names(rows)
    figure, axes_of = panels(names, 2, 3.4)
    groups = every_step(rows, *LOOKS).groupby(["trace", "predictor", "distance"])
    table: Any = groups[["overlap", "recall", "recall_true"]].mean()
    table["lost"] = 100 * (table["recall_true"] - table["recall"])
    for trace, (upper, lower) in axes_of.items():
        for kind, look in LOOKS.items():
            if (trace, kind) not in table.index.droplevel("distance"):
                continue
            own = table.loc[trace, kind]
            style_of: dict[str, Any] = {"color": look.color, "marker": look.marker, "ms": 4.0, "lw": 1.2, "gid": kind}
            upper.plot(own.index, own["overlap"], **style_of)
            if kind != "random":
                lower.plot(own.index, own["lost"], **style_of)
        for axes in (upper, lower):
            axes.set_xticks(sorted(rows["distance"].unique()))
            axes.grid(True, axis="y")
        lower.axhline(0, color=style.QUIET, lw=0.7)
        lower.set_xlabel("distance (steps)", fontsize=7.5)
        if is_first_column(upper):
            upper.set_ylabel("overlap")
            lower.set_ylabel("mass lost (points)")
    share_limits([pair[0] for pair in axes_of.values()], 0, 1)
    known = table[table.index.get_level_values("predictor") != "random"]["lost"].dropna()
    room = 0.1 + 0.1 * float(known.max() - known.min())
    least, most = min(0.0, float(known.min())) - room, max(0.0, float(known.max())) + room
    share_limits([pair[1] for pair in axes_of.values()], least, most)
    by = every_step(rows, "draft", "previous").groupby(["predictor", "distance"])["overlap"].mean().unstack()
    gap = 100 * (by.loc["draft"] - by.loc["previous"])
    lost = known.groupby(level="predictor").mean()
    title = (
        f"The draft's lead over the earlier query falls from {gap.iloc[0]:.0f} points of overlap one step ahead to "
        f"{gap.iloc[-1]:.0f} at {int(gap.index[-1])}; of the attention mass it loses {lost['draft']:.1f} points, the "
        f"earlier query {lost['previous']:.1f}"
    )
    under = "Distance in steps between prediction and use; " + _what(rows) + "; mass lost against the step's own query"
    style.frame_figure(figure, title, under, (), handles(), 3)
    return figure


@style.styled
def draw_heads(frame: pd.DataFrame, budget_tokens: int) -> Figure:
    """Heat maps one step ahead, a row per trace: overlap of the draft by layer and KV head, and its gain."""
    rows = require(every_step(at_budget(frame, budget_tokens), "draft", "previous"), "draft")
    rows = rows[rows["distance"] == 1]
    names = trace_names(rows[rows["predictor"] == "draft"])
    heights = [max(1, rows[rows["trace"] == trace]["kv_head"].nunique()) for trace in names]
    figure = Figure(figsize=(style.WIDTH_IN, 1.6 + sum(0.55 + 0.16 * h for h in heights)), dpi=style.DPI)
    grid = figure.subplots(len(names), 2, squeeze=False, gridspec_kw={"height_ratios": [2 + h for h in heights]})
    tables = {}
    for trace in names:
        own = rows[rows["trace"] == trace]
        draft, previous = (
            own[own["predictor"] == kind].pivot_table(index="kv_head", columns="layer", values="overlap")
            for kind in ("draft", "previous")
        )
        tables[trace] = (draft, 100 * (draft - previous))
    low = min(float(draft.to_numpy().min()) for draft, _ in tables.values())
    most = max(1.0, max(float(np.abs(gain.to_numpy()).max()) for _, gain in tables.values()))
    norms = Normalize(np.floor(20 * low) / 20, 1), Normalize(-most, most)
    for row, (trace, pair) in enumerate(tables.items()):
        for axes, table, norm, cmap in zip(grid[row], pair, norms, (CMAP, GAIN_CMAP), strict=True):
            axes.imshow(table.to_numpy(), norm=norm, cmap=cmap, aspect="auto", interpolation="nearest")
            _name_cells(axes, table)
        grid[row][0].set_ylabel("KV head", fontsize=6.5)
        grid[row][0].set_title(names[trace], loc="left", fontsize=7.5, pad=2)
    for axes in grid[-1]:
        axes.set_xlabel("layer")
    gap = BAR_GAP_IN / figure.get_size_inches()[1]
    for column, (norm, cmap, label) in enumerate(
        zip(norms, (CMAP, GAIN_CMAP), ("overlap of the draft", "gain over the earlier query (points)"), strict=True)
    ):
        bar = figure.colorbar(
            ScalarMappable(norm, cmap),
            ax=list(grid[:, column]),
            location="top",
            aspect=40,
            fraction=0.03,
            pad=gap,
        )
        bar.set_label(label)
        bar.outline.set_visible(False)
    cells = 100 * np.concatenate([draft.to_numpy().ravel() for draft, _ in tables.values()])
    title = (
        f"One step ahead the draft's overlap is {np.nanmin(cells):.0f} to {np.nanmax(cells):.0f} % by layer and KV head"
    )
    style.frame_figure(figure, title, _what(rows, over="steps"))
    return figure


@style.styled
def draw_guesses(frame: pd.DataFrame, budget_tokens: int) -> Figure:
    """Bars one step ahead per trace: the earlier query, the draft where its token was wrong or right, and overall."""
    rows = at_budget(frame, budget_tokens)
    rows = require(rows[rows["distance"] == 1], "draft", "wrong")
    names = trace_names(rows[rows["predictor"] == "draft"])
    bars = (
        ("previous", "wrong", "earlier query, steps with a wrong token", LOOKS["previous"].color, ""),
        ("draft", "wrong", "draft, its token wrong", LOOKS["draft"].color, "////"),
        ("draft", "right", "draft, its token right", LOOKS["draft"].color, "...."),
        ("draft", "all", "draft, all steps", LOOKS["draft"].color, ""),
    )
    figure = Figure(figsize=(style.WIDTH_IN, 3.9), dpi=style.DPI)
    axes = figure.subplots()
    means = rows.groupby(["trace", "predictor", "guess"])["overlap"].mean()
    digits = 1 if len(names) <= MAX_PANELS else 0
    for at, trace in enumerate(names):
        for offset, (kind, guess, _, color, hatch) in enumerate(bars):
            value = means.get((trace, kind, guess))
            if value is None:
                continue
            x = at + 0.2 * (offset - 1.5)
            axes.bar(
                x, value, 0.18, color=style.pale(color) if hatch else color, hatch=hatch, edgecolor=color, lw=0.6,
                gid=f"{kind} {guess}",
            )  # fmt: skip
            text = f"{100 * value:.{digits}f}"
            axes.text(x, value + 0.01, text, ha="center", va="bottom", fontsize=6, color=style.INK)
        chance = means.get((trace, "random", "all"))
        if chance is not None:
            axes.plot([at - 0.4, at + 0.4], [chance, chance], color=LOOKS["random"].color, lw=1.4, gid="random")
    room_in = LABELS_SHARE * style.WIDTH_IN / len(names)
    lines = {trace: wrapped(name, room_in, LABEL_PT) for trace, name in names.items()}
    labels = ["\n".join([*lines[trace], f"{_right(rows, trace)} right"]) for trace in names]
    axes.set_xticks(range(len(names)), labels, fontsize=LABEL_PT)
    axes.set_ylabel("overlap")
    axes.set_ylim(0, 1.08)
    axes.grid(True, axis="y")
    legend: list[Artist] = [
        Patch(facecolor=style.pale(color) if hatch else color, edgecolor=color, hatch=hatch, label=text)
        for _, _, text, color, hatch in bars
    ]
    legend.append(Line2D([], [], color=LOOKS["random"].color, lw=1.4, label=NAMES["random"]))
    wrong = means.xs("wrong", level="guess").unstack("trace").mean(axis=1)
    title = (
        f"With a wrong token the draft finds {100 * wrong['draft']:.0f} % of the set, the earlier query "
        f"{100 * wrong['previous']:.0f} % in the same steps"
    )
    drafted = means.xs("draft", level="predictor")
    right = drafted[drafted.index.get_level_values("guess") == "right"]
    if len(right):
        title += f"; with a right one {100 * right.mean():.0f} %"
    style.frame_figure(figure, title, "One step ahead; " + _what(rows), (), legend, 3)
    return figure


@style.styled
def draw_budgets(frame: pd.DataFrame) -> Figure:
    """Attention mass held one step ahead against the budget, a panel per trace."""
    rows = frame[(frame["block_size_tokens"] == 16) & (frame["distance"] == 1) & (frame["selector"] == "minmax")]
    rows = rows[rows["set_is_exact"] & rows["num_blocks"].isin(_whole_budgets(rows))]
    names = trace_names(require(rows, "draft"))
    figure, axes_of = panels(names, 1, 2.4)
    groups = every_step(rows, *LOOKS).groupby(["trace", "predictor", "num_blocks"])
    mean: Any = groups[["recall", "recall_true"]].mean()
    for trace, (axes,) in axes_of.items():
        for kind, look in LOOKS.items():
            if (trace, kind) in mean.index.droplevel("num_blocks"):
                own = mean.loc[trace, kind]
                axes.plot(own.index * 16, own["recall"], color=look.color, marker=look.marker, ms=4, lw=1.2, gid=kind)
        true = mean.loc[trace, "previous"]["recall_true"]
        axes.plot(true.index * 16, true, gid="true", **OWN_QUERY)
        axes.set_xscale("log", base=2)
        axes.set_xticks(true.index * 16, [f"{k * 16:,}" for k in true.index])
        axes.minorticks_off()
        axes.grid(True, axis="y")
        if is_first_column(axes):
            axes.set_ylabel("attention mass on the set")
    share_limits([one for (one,) in axes_of.values()], 0, 1)
    most = mean.groupby(level=["predictor", "num_blocks"]).mean()
    last = int(most.loc["draft"].index.max())
    title = (
        f"At {last * 16:,} tokens the draft's set holds {100 * most.loc[('draft', last), 'recall']:.1f} % of the "
        f"attention mass, the earlier query's {100 * most.loc[('previous', last), 'recall']:.1f} %, the step's own "
        f"{100 * most.loc[('draft', last), 'recall_true']:.1f} %"
    )
    own_query = Line2D([], [], label="the step's own query", **OWN_QUERY)
    under = "One step ahead against the KV budget in tokens; blocks of 16 with newly filled and open ones"
    style.frame_figure(figure, title, under, (), [*handles(), own_query], 4)
    return figure


@style.styled
def draw_block_sizes(frame: pd.DataFrame, budget_tokens: int) -> Figure:
    """Overlap and recall one step ahead by block size, of the first trace that records several."""
    rows = every_step(at_budget(frame, budget_tokens, None), *LOOKS)
    rows = require(rows[rows["distance"] == 1], "draft")
    several = rows.groupby("trace")["block_size_tokens"].nunique()
    traces = [trace for trace in dict.fromkeys(rows["trace"]) if several[trace] > 1]
    if not traces:
        raise InputError(f"no trace has several block sizes at a budget of {budget_tokens} tokens")
    rows = rows[rows["trace"] == traces[0]]
    shared = set.intersection(*(set(part["layer"]) for _, part in rows.groupby("block_size_tokens")))
    rows = rows[rows["layer"].isin(sorted(shared))]
    figure = Figure(figsize=(style.WIDTH_IN, 3.4), dpi=style.DPI)
    mean = rows.groupby(["predictor", "block_size_tokens"])[["overlap", "recall", "recall_true"]].mean()
    sizes = sorted(rows["block_size_tokens"].unique())
    for axes, column, name in zip(
        figure.subplots(1, 2), ("overlap", "recall"), ("overlap", "attention mass on the set"), strict=True
    ):
        for kind, look in LOOKS.items():
            axes.plot(
                sizes, mean.loc[kind][column], color=look.color, marker=look.marker, ms=4.5, lw=1.3, gid=kind
            )  # fmt: skip
        if column == "recall":
            axes.plot(sizes, mean.loc["draft"]["recall_true"], gid="true", **OWN_QUERY)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel(style.label("policy.block_size_tokens"))
        axes.set_ylabel(name)
        axes.set_ylim(0, 1)
        axes.grid(True, axis="y")
    own_query = Line2D([], [], label="the step's own query", **OWN_QUERY)
    held, found = mean.loc["draft"]["recall"], 100 * mean.loc["draft"]["overlap"]
    title = (
        f"At {budget_tokens:,} tokens of budget blocks of {sizes[0]} hold {100 * held.iloc[0]:.0f} % of the attention "
        f"mass, blocks of {sizes[-1]} {100 * held.iloc[-1]:.0f} %; overlap is {found.min():.0f} to {found.max():.0f} %"
    )
    under = f"{trace_names(frame)[traces[0]]}, one step ahead, {len(shared)} layers recorded at every size"
    style.frame_figure(figure, title, under, (), [*handles(), own_query], 4)
    return figure


def _what(rows: pd.DataFrame, over: str = "steps, recorded layers and KV heads") -> str:
    count, size = int(rows["num_blocks"].iloc[0]), int(rows["block_size_tokens"].iloc[0])
    return f"best {count} blocks of {size} tokens, mean over {over}"


def _right(rows: pd.DataFrame, trace: str) -> str:
    own = rows[(rows["trace"] == trace) & (rows["predictor"] == "draft")]
    steps = own.groupby("guess")["steps"].first()
    return style.percent(float(steps.get("right", 0)) / float(steps["all"]))


def _whole_budgets(rows: pd.DataFrame) -> list[int]:
    """Block counts that are powers of two: the budgets, without the top K of a publication."""
    return [int(count) for count in rows["num_blocks"].unique() if int(count) & (int(count) - 1) == 0]


def _name_cells(axes: Axes, table: pd.DataFrame) -> None:
    values = table.to_numpy()
    axes.set_yticks(range(len(table.index)), [str(head) for head in table.index], fontsize=6.5)
    step = max(1, -(-len(table.columns) // 15))
    places = range(0, len(table.columns), step)
    axes.set_xticks(places, [str(table.columns[i]) for i in places], fontsize=6.5)
    axes.tick_params(length=0)
    if len(table.columns) > 12:
        return
    is_share = float(values.max()) <= 1
    for (row, column), value in np.ndenumerate(values):
        text = f"{100 * value:.0f}" if is_share else f"{value:+.0f}"
        shade: Any = axes.images[0].norm(value)
        dark = shade < 0.45 if axes.images[0].get_cmap().name == CMAP else abs(shade - 0.5) > 0.35
        axes.text(column, row, text, ha="center", va="center", fontsize=6, color="white" if dark else style.INK)
