"""How every figure looks: sizes, a colour-blind-safe palette, labels with units, header and notes."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from analysis.text_fit import COLUMN_GAP_EMS, FONT, HANDLE_EMS, HANDLE_GAP_EMS, legend_columns

P = ParamSpec("P")

WIDTH_IN = 8.0
DPI = 150
"""Pictures are 1,200 pixels wide."""
RC: Any = {
    "font.family": FONT,
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.7,
    "svg.hashsalt": "oasis-sim",
    "svg.fonttype": "none",
    "text.parse_math": False,
}

INK = "#222222"
QUIET = "#666666"
FAINT = "#bbbbbb"
ALARM = "#D55E00"

# Source: Okabe and Ito, "Color Universal Design" palette, distinct under the common colour-vision deficiencies.
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6D31", "#333333")
MARKERS = ("o", "D", "^", "v", "s", "P", "X", "<", ">", "h")
LEGEND_ROW_IN = 0.185


@dataclass(frozen=True)
class Look:
    """Colour and marker of one system; `filled` is False for bounds that cannot be built."""

    color: str
    marker: str
    filled: bool = True


KNOWN_LOOKS = {
    "dense": Look("#333333", "s"),
    "vllm-offload": Look("#8A8A8A", "s"),
    "flexgen": Look("#8C6D31", "D"),
    "quest": Look("#56B4E9", "^"),
    "retrieval": Look("#D55E00", "v"),
    "prefetch-previous": Look("#E69F00", "D"),
    "oasiskv": Look("#0072B2", "o"),
    "oasiskv-oracle": Look("#009E73", "o", filled=False),
    "h2o": Look("#CC1199", "^"),
    "scissorhands": Look("#880022", "X"),
    "snapkv": Look("#DDBB88", "P"),
    "streamingllm": Look("#778833", "<"),
    "arkvale": Look("#662266", "h"),
    "sparseserve": Look("#BB44FF", "P"),
    "hisparse": Look("#112299", ">"),
    "infinigen": Look("#FFAADD", "v"),
    "shadowkv": Look("#336655", "X"),
    "freekv": Look("#77DD55", "h"),
    "specache": Look("#DD6677", "<"),
    "radix": Look("#99CCAA", "s"),
    "distserve": Look("#AA88FF", ">"),
    "mooncake": Look("#0000FF", "o"),
}
"""Every named system: a colour of its own and a marker, the same in all pictures."""

LABELS = {
    "system": "system",
    "model": "model",
    "hardware": "GPU",
    "trace": "trace",
    "trace_group": "trace group",
    "workload.batch_size": "batch size (requests)",
    "workload.context_tokens": "context (tokens)",
    "workload.output_tokens": "output (tokens)",
    "policy.kv_budget_tokens": "KV budget (tokens)",
    "policy.block_size_tokens": "block size (tokens)",
    "policy.fetch_cap": "fetch cap (share of K)",
    "policy.lookahead_k": "lookahead k (steps)",
    "placement.host_numa": "host NUMA",
    "placement.num_gpus": "GPUs",
    "throughput_tokens_per_s": "throughput (tok/s)",
    "tpot_mean_s": "TPOT, mean (ms)",
    "exposed_transfer_s": "exposed wait (ms)",
    "recall": "recall",
}
STATUS_TEXT = {"ok": "ok", "does_not_fit": "does not fit", "failed": "failed"}
BOUND_NAMES = {
    "hbm": "HBM bandwidth",
    "compute": "compute",
    "h2d": "the host link",
    "remote": "the remote link",
    "capacity": "memory capacity",
    "software": "CPU time between steps",
}


@contextmanager
def applied() -> Iterator[None]:
    """This style, whatever the caller's matplotlib settings; saving needs it too (fonts and ids of SVG)."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        yield


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Run a drawing function under this style."""

    @functools.wraps(draw)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with applied():
            return draw(*args, **kwargs)

    return wrapped


def system_looks(systems: Sequence[str]) -> dict[str, Look]:
    """A look per system: fixed for the named ones, else the next pair of colour and marker that none of them has."""
    looks = {name: KNOWN_LOOKS[name] for name in systems if name in KNOWN_LOOKS}
    taken = {(look.color, look.marker) for look in KNOWN_LOOKS.values()}
    count = len(OKABE_ITO)
    pairs = ((OKABE_ITO[i % count], MARKERS[(i + i // count) % len(MARKERS)]) for i in range(count * len(MARKERS)))
    free = (pair for pair in pairs if pair not in taken)
    for name in systems:
        if name not in looks:
            looks[name] = Look(*next(free), filled="oracle" not in name.split("-"))
    return {name: looks[name] for name in systems}


def label(column: str) -> str:
    """Axis label of a column, with its unit."""
    return LABELS.get(column, column)


def short(column: str) -> str:
    """A column's name without its unit, for sentences."""
    return label(column).split(" (")[0].split(".")[-1].replace("_", " ")


def display_scale(column: str) -> float:
    """Factor from the stored unit to the label's: seconds are shown in ms."""
    return 1e3 if column.endswith("_s") and not column.endswith("per_s") else 1.0


def number(value: float, digits: int = 3) -> str:
    """A figure for people: thousands separated, `digits` significant below 1,000; a dash where null."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 1000 or value == 0:
        return f"{value:,.0f}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def value_text(value: Any) -> str:
    """A parameter's value as a user typed it."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        if value != value:
            return "–"
        return f"{value:,.0f}" if value == int(value) and abs(value) >= 1000 else f"{value:g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "–" if value is None else str(value)


def plain_log(axis: Axis) -> None:
    """Numbers as written on a logarithmic axis that is drawn; between decades too where there is hardly one."""
    low, high = sorted(axis.get_view_interval())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    between = FuncFormatter(lambda value, _: f"{value:g}") if high < 10 * low else NullFormatter()
    axis.set_minor_formatter(between)


def pale(color: str) -> tuple[float, float, float]:
    """The colour mixed with white, for what matters less; opaque, so that overlaps stay pale."""
    red, green, blue = to_rgb(color)
    return (0.32 * red + 0.68, 0.32 * green + 0.68, 0.32 * blue + 0.68)


def bytes_per_s(value: float) -> str:
    return f"{value / 1e12:.2f} TB/s" if value >= 1e12 else f"{number(value / 1e9)} GB/s"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 or share == 0 else f"{100 * share:.1f} %"


def spread(targets: Sequence[float], gap: float, low: float = 0.0, high: float = 1.0) -> list[float]:
    """Positions near `targets`, in the same order, at least `gap` apart inside [low, high] where they fit."""
    if not targets:
        return []
    gap = min(gap, (high - low) / max(1, len(targets) - 1))
    order = sorted(range(len(targets)), key=lambda i: targets[i])
    placed: list[float] = []
    for i in order:
        placed.append(max(targets[i], low) if not placed else max(targets[i], placed[-1] + gap))
    ceiling = high
    for j in range(len(placed) - 1, -1, -1):
        placed[j] = min(placed[j], ceiling)
        ceiling = placed[j] - gap
    result = [0.0] * len(targets)
    for position, i in zip(placed, order, strict=True):
        result[i] = position
    return result


def frame_figure(
    figure: Figure,
    title: str,
    subtitle: str,
    notes: Iterable[str] = (),
    handles: Sequence[Artist] = (),
    most_legend_columns: int = 4,
) -> None:
    """Header (the finding, what it holds for, one legend) and notes, with the axes laid out between them.

    The legend has columns as `legend_columns` finds; the figure grows by its rows after the first.
    """
    width, height = figure.get_size_inches()
    labels = [str(handle.get_label()) for handle in handles]
    columns = legend_columns(labels, RC["legend.fontsize"], most_legend_columns, width - 0.1) if labels else 1
    legend_rows = -(-len(handles) // columns)
    if legend_rows > 1:
        height += LEGEND_ROW_IN * (legend_rows - 1)
        figure.set_size_inches(width, height)
    title_lines = textwrap.wrap(title, int(width * 11))
    note_lines = [line for note in notes for line in textwrap.wrap(note, int(width * 17))]
    subtitle_lines = textwrap.wrap(subtitle, int(width * 15))
    y = height - 0.10
    figure.text(
        0.012, y / height, "\n".join(title_lines), va="top", fontsize=11, fontweight="bold", color=INK, linespacing=1.15
    )
    y -= 0.195 * len(title_lines) + 0.03
    figure.text(0.012, y / height, "\n".join(subtitle_lines), va="top", fontsize=8.5, color=QUIET, linespacing=1.2)
    y -= 0.16 * len(subtitle_lines) + 0.04
    if handles:
        figure.legend(
            handles=list(handles),
            loc="upper left",
            bbox_to_anchor=(0.004, y / height),
            ncols=columns,
            handlelength=HANDLE_EMS,
            handletextpad=HANDLE_GAP_EMS,
            columnspacing=COLUMN_GAP_EMS,
            borderaxespad=0.0,
        )
        y -= LEGEND_ROW_IN * legend_rows + 0.06
    foot = 0.06 + 0.145 * len(note_lines)
    if note_lines:
        figure.text(
            0.012, 0.05 / height, "\n".join(note_lines), va="bottom", fontsize=7.5, color=QUIET, linespacing=1.25
        )
    figure.set_layout_engine(
        "constrained", rect=(0.006, foot / height, 0.988, (y - foot) / height), w_pad=0.05, h_pad=0.05
    )
