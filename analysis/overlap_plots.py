"""Pictures of how well predictors find the blocks that attention selects, from a table of `traces.overlap`.

python -m analysis.overlap_plots overlap.parquet FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.load import read_table
from traces.errors import InputError

LOOKS = {
    "draft": style.KNOWN_LOOKS["oasiskv"],
    "previous": style.KNOWN_LOOKS["prefetch-previous"],
    "random": style.Look("#999999", "x"),
}
NAMES = {"draft": "draft token", "previous": "earlier query", "random": "random blocks"}
COLUMNS = ("trace", "context_tokens", "block_size_tokens", "num_blocks", "layer", "predictor", "distance", "overlap")
TOP_BLOCKS = 20


def load_overlap(path: Path) -> pd.DataFrame:
    """The table. Raises InputError where it is none."""
    return read_table(path, COLUMNS, "a table of overlaps")


def _panels(traces: list[str], height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(style.WIDTH_IN, height), dpi=style.DPI)
    axes = figure.subplots(1, len(traces), sharey=True, squeeze=False)[0]
    return figure, list(axes)


def _title(frame: pd.DataFrame, trace: str) -> str:
    context = int(frame[frame["trace"] == trace]["context_tokens"].iloc[0])
    words = [w for w in trace.split("-") if w in ("reasoning", "code", "needle")]
    return f"{words[0] if words else trace}, {context / 1024:g}K"


@style.styled
def draw_distance(frame: pd.DataFrame, num_blocks: int = TOP_BLOCKS, block_size: int = 16) -> Figure:
    """Overlap by distance, a panel per trace."""
    rows = frame[(frame["num_blocks"] == num_blocks) & (frame["block_size_tokens"] == block_size)]
    traces = list(dict.fromkeys(rows["trace"]))
    figure, panels = _panels(traces, 3.6)
    for axes, trace in zip(panels, traces, strict=True):
        for kind, look in LOOKS.items():
            own = rows[(rows["trace"] == trace) & (rows["predictor"] == kind)]
            mean = own.groupby("distance")["overlap"].mean()
            axes.plot(mean.index, mean, color=look.color, marker=look.marker, ms=4.5, lw=1.3, gid=kind)
        axes.set_title(_title(rows, trace))
        axes.set_xticks(sorted(rows["distance"].unique()))
        axes.set_ylim(0, 1)
        axes.grid(True, axis="y")
    panels[0].set_ylabel(f"share of the true top {num_blocks} found")
    panels[len(panels) // 2].set_xlabel("distance (steps between prediction and use)")
    mean = rows.groupby(["distance", "predictor"])["overlap"].mean().unstack()
    gap, last = mean["draft"] - mean["previous"], int(mean.index.max())
    title = (
        f"One step ahead the draft token's query finds {style.percent(float(mean['draft'].iloc[0]))} of the top "
        f"{num_blocks} blocks, the earlier query {style.percent(float(mean['previous'].iloc[0]))}; "
        f"{last} steps ahead {100 * float(gap.iloc[-1]):.0f} points are between them"
    )
    style.frame_figure(
        figure, title, f"Blocks of {block_size} tokens, mean over recorded layers and KV heads", (), _handles(), 3
    )
    return figure


@style.styled
def draw_layers(frame: pd.DataFrame, num_blocks: int = TOP_BLOCKS, block_size: int = 16) -> Figure:
    """Overlap one step ahead by layer, a panel per trace."""
    rows = frame[(frame["num_blocks"] == num_blocks) & (frame["block_size_tokens"] == block_size)]
    rows = rows[rows["distance"] == 1]
    traces = list(dict.fromkeys(rows["trace"]))
    figure, panels = _panels(traces, 3.6)
    for axes, trace in zip(panels, traces, strict=True):
        for kind, look in LOOKS.items():
            own = rows[(rows["trace"] == trace) & (rows["predictor"] == kind)].sort_values("layer")
            axes.plot(own["layer"], own["overlap"], color=look.color, marker=look.marker, ms=3.5, lw=1.1, gid=kind)
        axes.set_title(_title(rows, trace))
        axes.set_ylim(0, 1)
        axes.grid(True, axis="y")
    panels[0].set_ylabel(f"share of the true top {num_blocks} found")
    panels[len(panels) // 2].set_xlabel("layer")
    drafts = rows[rows["predictor"] == "draft"].groupby("layer")["overlap"].mean()
    worst, share = min(drafts.items(), key=lambda item: float(item[1]))
    title = f"Layer {worst} is the hardest to predict ({style.percent(float(share))} found by the draft token's query)"
    style.frame_figure(
        figure, title, f"One step ahead, blocks of {block_size} tokens, mean over KV heads", (), _handles(), 3
    )
    return figure


@style.styled
def draw_recall(frame: pd.DataFrame, block_size: int = 16) -> Figure:
    """Attention mass held one step ahead against the budget, a panel per trace."""
    rows = frame[(frame["block_size_tokens"] == block_size) & (frame["distance"] == 1)]
    rows = rows[rows["num_blocks"] != TOP_BLOCKS]
    traces = list(dict.fromkeys(rows["trace"]))
    figure, panels = _panels(traces, 3.6)
    for axes, trace in zip(panels, traces, strict=True):
        own = rows[rows["trace"] == trace]
        for kind, look in LOOKS.items():
            mean = own[own["predictor"] == kind].groupby("num_blocks")["recall"].mean()
            axes.plot(mean.index * block_size, mean, color=look.color, marker=look.marker, ms=4.5, lw=1.3, gid=kind)
        true = own[own["predictor"] == "draft"].groupby("num_blocks")["recall_true"].mean()
        axes.plot(true.index * block_size, true, color=style.INK, lw=1.1, ls=(0, (4, 2)), gid="true")
        axes.set_xscale("log", base=2)
        axes.set_xticks(true.index * block_size, [f"{k * block_size:,}" for k in true.index])
        axes.minorticks_off()
        axes.set_title(_title(rows, trace))
        axes.set_ylim(0, 1)
        axes.grid(True, axis="y")
    panels[0].set_ylabel("attention mass on the set")
    panels[len(panels) // 2].set_xlabel("KV budget (tokens)")
    most = rows[rows["num_blocks"] == rows["num_blocks"].max()]
    held = most.groupby("predictor")["recall"].mean()
    own_query = float(most[most["predictor"] == "draft"]["recall_true"].mean())
    handles = [*_handles(), Line2D([], [], color=style.INK, lw=1.1, ls=(0, (4, 2)), label="the step's own query")]
    style.frame_figure(
        figure,
        f"At the largest budget the draft's set holds {100 * float(held['draft']):.1f} % of the attention mass, the "
        f"earlier query's {100 * float(held['previous']):.1f} %, the step's own {100 * own_query:.1f} %",
        f"One step ahead, blocks of {block_size} tokens with newly filled and open blocks; mean over layers and heads",
        (),
        handles,
        4,
    )
    return figure


@style.styled
def draw_block_sizes(frame: pd.DataFrame, budget_tokens: int = 512) -> Figure:
    """Overlap and recall one step ahead by block size, of the traces that record several."""
    rows = frame[frame["num_blocks"] * frame["block_size_tokens"] == budget_tokens]
    rows = rows[rows["distance"] == 1]
    several = rows.groupby("trace")["block_size_tokens"].nunique()
    traces = [trace for trace in dict.fromkeys(rows["trace"]) if several[trace] > 1]
    if not traces:
        raise InputError(f"no trace has several block sizes at a budget of {budget_tokens} tokens")
    rows = rows[rows["trace"] == traces[0]]
    shared = set.intersection(*(set(part["layer"]) for _, part in rows.groupby("block_size_tokens")))
    rows = rows[rows["layer"].isin(sorted(shared))]
    figure = Figure(figsize=(style.WIDTH_IN, 3.6), dpi=style.DPI)
    for axes, column, name in zip(
        figure.subplots(1, 2), ("overlap", "recall"), ("share of the true set found", "attention mass on the set"),
        strict=True,
    ):  # fmt: skip
        for kind, look in LOOKS.items():
            mean = rows[rows["predictor"] == kind].groupby("block_size_tokens")[column].mean()
            axes.plot(mean.index, mean, color=look.color, marker=look.marker, ms=4.5, lw=1.3, gid=kind)
        if column == "recall":
            mean = rows[rows["predictor"] == "draft"].groupby("block_size_tokens")["recall_true"].mean()
            axes.plot(mean.index, mean, color=style.INK, lw=1.1, ls=(0, (4, 2)), gid="true")
        axes.set_xscale("log", base=2)
        axes.set_xticks(mean.index, [str(size) for size in mean.index])
        axes.minorticks_off()
        axes.set_xlabel(style.label("policy.block_size_tokens"))
        axes.set_ylabel(name)
        axes.set_ylim(0, 1)
        axes.grid(True, axis="y")
    handles = [*_handles(), Line2D([], [], color=style.INK, lw=1.1, ls=(0, (4, 2)), label="the step's own query")]
    style.frame_figure(
        figure,
        f"At {budget_tokens:,} tokens of budget, smaller blocks hold more attention mass",
        f"{_title(rows, traces[0])}, one step ahead, {len(shared)} layers recorded at every size",
        (),
        handles,
        4,
    )
    return figure


def _handles() -> list[Line2D]:
    return [
        Line2D([], [], color=look.color, marker=look.marker, ms=5, lw=1.3, label=NAMES[kind])
        for kind, look in LOOKS.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    frame = load_overlap(given.table)
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, draw in (
        ("overlap-distance", draw_distance),
        ("overlap-layers", draw_layers),
        ("overlap-recall", draw_recall),
        ("overlap-block-sizes", draw_block_sizes),
    ):
        with style.applied():
            draw(frame).savefig(given.folder / f"{name}.png")


if __name__ == "__main__":
    main()
