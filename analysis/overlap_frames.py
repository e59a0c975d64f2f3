"""The tables of `oasis-sim trace overlap`, loaded and averaged; names and looks that their pictures share."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.load import read_table
from traces.errors import InputError

OVERLAP, MISSES, CAPS = "overlap.parquet", "misses.parquet", "caps.parquet"
GROUP = ("trace", "task", "model", "context_tokens", "block_size_tokens", "num_blocks")
OVERLAP_COLUMNS = (
    *GROUP, "layer", "kv_head", "selector", "predictor", "distance", "guess", "steps", "overlap", "recall",
    "recall_true", "agreement", "set_is_exact",
)  # fmt: skip
MISSES_COLUMNS = (
    *GROUP, "layer", "predictor", "distance", "guess", "by", "bin", "order", "true_blocks", "missed_blocks",
    "true_mass", "missed_mass", "row_share",
)  # fmt: skip
CAPS_COLUMNS = (*GROUP, "predictor", "distance", "fetch_cap", "rules", "hit_rate", "recall", "churn")
LOOKS = {
    "draft": style.KNOWN_LOOKS["oasiskv"],
    "previous": style.KNOWN_LOOKS["prefetch-previous"],
    "random": style.Look("#999999", "x"),
}
NAMES = {"draft": "draft token", "previous": "earlier query", "random": "random blocks"}
_TITLE_CHARACTERS = 22
MAX_PANELS = 5
"""Panels in one row of a picture."""


def load_overlap(path: Path) -> pd.DataFrame:
    """Raises InputError where it is none."""
    return read_table(path, OVERLAP_COLUMNS, "a table of overlaps")


def load_misses(path: Path) -> pd.DataFrame:
    return read_table(path, MISSES_COLUMNS, "a table of misses")


def load_caps(path: Path) -> pd.DataFrame:
    return read_table(path, CAPS_COLUMNS, "a table of fetch caps")


def at_budget(frame: pd.DataFrame, budget_tokens: int, block_size_tokens: int | None = 16) -> pd.DataFrame:
    """Rows of a budget whose sets are as recorded, by min/max score. Raises InputError where there are none."""
    rows = frame[frame["num_blocks"] * frame["block_size_tokens"] == budget_tokens]
    if block_size_tokens is not None:
        rows = rows[rows["block_size_tokens"] == block_size_tokens]
    if "selector" in rows:
        rows = rows[rows["selector"] == "minmax"]
    if "set_is_exact" in rows:
        rows = rows[rows["set_is_exact"]]
    if rows.empty:
        size = "" if block_size_tokens is None else f" in blocks of {block_size_tokens}"
        raise InputError(f"the table has no exact sets of {budget_tokens} tokens{size}")
    return rows


def require(rows: pd.DataFrame, predictor: str, guess: str | None = None) -> pd.DataFrame:
    """The rows, where some are of this predictor (and kind of guess). Raises InputError where none is."""
    own = rows[rows["predictor"] == predictor]
    if guess is not None:
        own = own[own["guess"] == guess]
    if own.empty:
        raise InputError(f"the table has no rows of predictor {predictor!r}" + (f", guess {guess!r}" if guess else ""))
    return rows


def trace_names(frame: pd.DataFrame) -> dict[str, str]:
    """A short name of each trace, in the table's order: task and context, the model where there are several."""
    first = frame.drop_duplicates("trace").set_index("trace")
    several = first["model"].nunique() > 1
    names = {}
    for trace, row in first.iterrows():
        name = f"{row['task']}, {context_name(int(row['context_tokens']))}"
        names[str(trace)] = f"{short_model(str(row['model']))} {name}" if several else name
    told: dict[str, str] = {}
    for trace, name in names.items():
        same = [other for other, other_name in names.items() if other_name == name]
        told[trace] = name if len(same) == 1 else f"{name} ({_told_apart(trace, str(first.loc[trace, 'task']), same)})"
    return told


def context_name(tokens: int) -> str:
    """6K of 6,144; 15.75K of 16,128; 60 tokens of 60."""
    return f"{tokens / 1024:.4g}K" if tokens >= 1024 else f"{tokens} tokens"


def short_model(model: str) -> str:
    """SmolLM2 of SmolLM2-135M-Instruct; Gemma-3 of gemma-3-270m-it."""
    parts = re.split("[-_]", model)
    kept = [part for part in parts if not re.fullmatch(r"\d+(\.\d+)?[mMbB]|it|[Ii]nstruct|[Cc]hat|q\d.*", part)]
    name = "-".join(kept) or model
    return name[0].upper() + name[1:]


def _told_apart(trace: str, task: str, all_traces: list[str]) -> str:
    """Words of a trace's name that the others do not all have, without its task and context."""
    words = [set(name.split("-")) for name in all_traces]
    own = [word for word in trace.split("-") if word not in set.intersection(*words)]
    own = [word for word in own if word != task and not re.fullmatch(r"\d+k", word)]
    return "-".join(own) or trace


def panels(names: dict[str, str], rows_each: int, height_each: float) -> tuple[Figure, dict[str, list[Axes]]]:
    """A figure with `rows_each` axes per trace, one above the other; titles on the upper ones."""
    bands = -(-len(names) // MAX_PANELS)
    columns = -(-len(names) // bands)
    figure = Figure(figsize=(style.WIDTH_IN, 1.2 + height_each * bands), dpi=style.DPI)
    grid = figure.subplots(bands * rows_each, columns, squeeze=False)
    found: dict[str, list[Axes]] = {}
    for at, (trace, name) in enumerate(names.items()):
        band, column = divmod(at, columns)
        found[trace] = [grid[band * rows_each + row][column] for row in range(rows_each)]
        found[trace][0].set_title("\n".join(textwrap.wrap(name, _TITLE_CHARACTERS)), fontsize=8)
    for at in range(len(names), bands * columns):
        for row in range(rows_each):
            grid[(at // columns) * rows_each + row][at % columns].set_visible(False)
    return figure, found


def share_limits(axes: list[Axes], low: float, high: float) -> None:
    """The same y limits everywhere; numbers only in the first column of each row."""
    for one in axes:
        one.set_ylim(low, high)
        spec = one.get_subplotspec()
        if spec is not None and not spec.is_first_col():
            one.set_yticklabels([])


def is_first_column(axes: Axes) -> bool:
    spec = axes.get_subplotspec()
    return spec is None or bool(spec.is_first_col())


def handles(kinds: tuple[str, ...] = ("draft", "previous", "random")) -> list[Line2D]:
    return [
        Line2D([], [], color=LOOKS[kind].color, marker=LOOKS[kind].marker, ms=5, lw=1.3, label=NAMES[kind])
        for kind in kinds
    ]


OWN_QUERY: dict[str, Any] = {"color": style.INK, "lw": 1.1, "ls": (0, (4, 2))}
"""Line of the step's own query."""
