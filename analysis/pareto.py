"""Throughput against recall: every point, the frontier of systems that can be built, the recall threshold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from analysis import style
from analysis.selection import Case, NotDrawn, best_buildable, is_admissible, is_bound_only


def pareto_frontier(recall: Sequence[float], value: Sequence[float]) -> list[int]:
    """Positions of the points that no other beats in one coordinate without losing in the other.

    Ordered by falling value and rising recall; of equal points the first is kept.
    """
    order = sorted(range(len(recall)), key=lambda i: (-value[i], -recall[i], i))
    frontier, reached = [], float("-inf")
    for i in order:
        if recall[i] > reached:
            frontier.append(i)
            reached = recall[i]
    return frontier


@style.styled
def draw_pareto(case: Case) -> Figure:
    """Raises `NotDrawn` where fewer than two points that ran have a recall."""
    rows = case.ok[case.ok["recall"].notna()]
    unknown = len(case.ok) - len(rows)
    if len(rows) < 2:
        raise NotDrawn("fewer than two points have both a recall and " + style.short(case.objective))
    looks = style.system_looks(case.systems)
    systems = [s for s in case.systems if s in set(rows["system"])]
    figure = Figure(figsize=(style.WIDTH_IN, 4.8), dpi=style.DPI)
    axes = figure.add_subplot()
    for system in systems:
        look, own = looks[system], rows[rows["system"] == system]
        keeps = is_admissible(own)
        for part, edge, suffix in ((own[~keeps], style.pale(look.color), "|below"), (own[keeps], look.color, "")):
            axes.scatter(
                part["recall"],
                part[case.objective],
                s=24,
                marker=look.marker,
                facecolors=edge if look.filled else "white",
                edgecolors=edge,
                linewidths=0.9,
                zorder=2.5 if suffix else 3,
                gid=system + suffix,
            )
    handles = [_handle(system, looks[system]) for system in systems]
    buildable = rows[~rows["system"].map(is_bound_only).astype(bool)]
    if len(buildable):
        places = pareto_frontier(buildable["recall"].tolist(), buildable[case.objective].tolist())
        line = buildable.iloc[places]
        axes.plot(
            line["recall"],
            line[case.objective],
            color=style.INK,
            lw=1.2,
            zorder=4,
            path_effects=[withStroke(linewidth=2.4, foreground="white")],
            drawstyle="steps-pre",
            gid="frontier",
        )
        for place, point in line.iterrows():
            look = looks[str(point["system"])]
            color = look.color if is_admissible(line.loc[[place]]).item() else style.pale(look.color)
            axes.scatter(
                [point["recall"]], [point[case.objective]], s=36, marker=look.marker, facecolors=color,
                edgecolors="white", linewidths=0.6, zorder=5, gid="on frontier",
            )  # fmt: skip
        handles.append(Line2D([], [], color=style.INK, lw=1.4, label="frontier of what can be built"))
    thresholds = rows["min_recall"].dropna()
    lead = best_buildable(case)
    if len(thresholds):
        mark = thresholds.max() if lead is None or pd.isna(lead["min_recall"]) else float(lead["min_recall"])
        axes.axvline(mark, color=style.ALARM, lw=1.3, ls=(0, (5, 3)), zorder=1, gid="threshold")
        low = axes.get_xlim()[0]
        axes.axvspan(min(low, mark), mark, color=style.ALARM, alpha=0.06, lw=0, zorder=0)
        axes.set_xlim(left=min(low, mark))
        handles.append(Line2D([], [], color=style.ALARM, lw=1.3, ls=(0, (5, 3)), label=f"recall threshold {mark:.3f}"))
    if lead is not None and pd.notna(lead["recall"]):
        axes.scatter(
            [lead["recall"]],
            [lead[case.objective]],
            s=190,
            facecolors="none",
            edgecolors=style.ALARM,
            linewidths=2,
            zorder=6,
            gid="best",
        )
        handles.append(
            Line2D(
                [], [], marker="o", ms=10, mfc="none", mec=style.ALARM, mew=2, ls="none", label="best admissible point"
            )
        )
    axes.grid(True)
    axes.set_ylim(0, rows[case.objective].max() * 1.08)
    axes.set_xlabel("recall (share of attention mass on blocks that attention reads)")
    axes.set_ylabel(style.label(case.objective))
    axes.yaxis.set_major_formatter(lambda v, _: style.number(v))
    style.frame_figure(figure, _title(case, rows, lead), case.subtitle, _notes(rows, thresholds, unknown), handles, 5)
    return figure


def _handle(system: str, look: style.Look) -> Line2D:
    name = f"{system} (a bound)" if is_bound_only(system) else system
    face = look.color if look.filled else "white"
    return Line2D([], [], marker=look.marker, ms=5.5, mfc=face, mec=look.color, ls="none", label=name)


def _notes(rows: pd.DataFrame, thresholds: pd.Series[float], unknown: int) -> list[str]:
    notes = ["Pale: below the threshold of the point's own budget and block size."] if len(thresholds) else []
    if thresholds.nunique() > 1:
        notes.append(
            f"The threshold depends on budget and block size ({thresholds.min():.3f} to {thresholds.max():.3f} here); "
            "the line is that of the best point."
        )
    if ((rows["recall_upper"] - rows["recall"]) > 1e-6).any():
        notes.append("Recall is a lower bound where the trace does not record the mass of every block.")
    if unknown:
        notes.append(f"{unknown} point(s) without a known recall are not drawn.")
    return notes


def _title(case: Case, rows: pd.DataFrame, lead: pd.Series[Any] | None) -> str:
    if lead is None:
        return "No point keeps the recall threshold"
    faster = rows[(rows[case.objective] > lead[case.objective]) & ~rows["system"].map(is_bound_only).astype(bool)]
    text = (
        f"{lead['system']} is the fastest that keeps the recall threshold, {style.number(lead[case.objective])} tok/s"
    )
    if not case.objective.startswith("throughput"):
        text = f"{lead['system']} has the best {style.short(case.objective)} that keeps the recall threshold"
    if len(faster):
        gain = faster[case.objective].max() / lead[case.objective] - 1
        text += f"; giving up recall would gain at most {style.percent(gain)}"
    return text
