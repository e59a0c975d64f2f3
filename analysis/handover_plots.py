"""Prefill and decode apart: what crossed the network, when tokens came, and who held the memory, a row per point."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis import style
from analysis.load import Run
from analysis.selection import NotDrawn
from analysis.serving_files import short
from analysis.serving_plots import subtitle

MAX_ROWS = 24
MODE = "serving.disaggregation"


@style.styled
def draw_handover(run: Run) -> Figure:
    """Bytes a request, times to the first and second token, memory of both sides.

    Raises `NotDrawn` where no point hands prompts over.
    """
    ok = run.results[run.results["status"] == "ok"]
    rows = ok[ok["network_bytes_per_request"].notna()] if "network_bytes_per_request" in ok else ok[:0]
    if rows.empty:
        raise NotDrawn("no point prefills on other hosts")
    left_out, rows = max(0, len(rows) - MAX_ROWS), rows[:MAX_ROWS]
    looks = style.system_looks(list(dict.fromkeys(rows["system"].astype(str))))
    colors = [looks[system].color for system in rows["system"]]
    at = np.arange(len(rows))[::-1]
    figure = Figure(figsize=(style.WIDTH_IN, 2.0 + 0.26 * len(rows)), dpi=style.DPI)
    network, tokens, decode, staged = figure.subplots(1, 4, sharey=True)
    total = rows["network_bytes_per_request"] / 1e9
    first = np.minimum(rows["admission_network_bytes"] / 1e9, total)
    network.barh(at, total, 0.62, color=[style.pale(color) for color in colors])
    network.barh(at, first, 0.62, color=colors)
    network.set_title("network\nGB a request", loc="left")
    _draw_tokens(tokens, at, rows, colors)
    decode.barh(at, rows["host_bytes_per_request_mean"].fillna(0) / 1e9, 0.62, color=colors)
    decode.set_title("decode host\nGB a request", loc="left")
    staged.barh(at, rows["prefill_staging_bytes_peak"] / 1e9, 0.62, color=colors)
    staged.set_title("prefill hosts\nGB at most", loc="left")
    network.set_yticks(at, _labels(rows))
    for axes in (network, tokens, decode, staged):
        axes.grid(True, axis="x")
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.08)
    for axes in (network, decode, staged):
        axes.set_xlim(left=0)
        if not axes.dataLim.x1 > 0:
            axes.set_xlim(0, 1)
    handles: list[Any] = [
        Patch(color=style.QUIET, label="before decoding"),
        Patch(color=style.pale(style.QUIET), label="after"),
        Line2D([], [], color=style.QUIET, marker="o", ms=4, ls="", label="first token, median"),
        Line2D([], [], color=style.QUIET, marker="|", ms=8, mew=1.6, ls="", label="second token, median"),
    ]
    notes = [f"{left_out} more point(s) are not drawn."] if left_out else []
    style.frame_figure(figure, _title(rows), subtitle(run), notes, handles, 4)
    return figure


def _draw_tokens(axes: Axes, at: np.ndarray[Any, Any], rows: pd.DataFrame, colors: list[str]) -> None:
    first, second = rows["ttft_p50_s"], rows["second_token_p50_s"]
    axes.hlines(at, first, second, color=colors, lw=1.2)
    axes.scatter(first, at, s=16, color=colors, zorder=3)
    axes.scatter(second, at, s=60, marker="|", color=colors, linewidth=1.6, zorder=3)
    spread = max(first.max(), second.max()) / max(min(first.min(), second.min()), 1e-9)
    if spread > 10:
        axes.set_xscale("log")
        style.plain_log(axes.xaxis)
    else:
        axes.set_xlim(0, 1.08 * max(first.max(), second.max()))
    axes.set_title("tokens\nseconds after arrival", loc="left")


def _labels(rows: pd.DataFrame) -> list[str]:
    """System, mode, and what else differs between the points."""
    varied = [c for c in rows.columns if "." in c and c != MODE and rows[c].nunique() > 1]
    texts = []
    for _, row in rows.iterrows():
        others = [f"{short(c)} {style.value_text(row[c])}" for c in varied if pd.notna(row[c])]
        mode = [str(row[MODE])] if MODE in rows and pd.notna(row[MODE]) else []
        texts.append(", ".join([f"{row['system']}  {' '.join(mode)}".strip(), *others]))
    return texts


def _title(rows: pd.DataFrame) -> str:
    """What the leanest point sends, against the one that sends most."""
    least, most = rows["network_bytes_per_request"].min(), rows["network_bytes_per_request"].max()
    if least >= 0.95 * most:
        return f"Each request sends {style.number(most / 1e9)} GB from prefill to decode"
    lean = rows.sort_values("network_bytes_per_request", kind="stable").iloc[0]
    mode = f", {lean[MODE]}," if MODE in rows and pd.notna(lean[MODE]) else ""
    return (
        f"{lean['system']}{mode} sends {style.number(least / 1e9)} GB a request from prefill to decode; the most is "
        f"{style.number(most / 1e9)}"
    )
