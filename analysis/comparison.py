"""Systems side by side: the objective of each one's best point, and what that point needs."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import style
from analysis.selection import Case, NotDrawn, best_buildable, best_by_system, is_bound_only, left_out

BASELINE = "dense"


@style.styled
def draw_comparison(case: Case) -> Figure:
    """One bar per system, best on top, with its batch, recall and memory.

    Raises `NotDrawn` where fewer than two systems ran.
    """
    points = best_by_system(case)
    if len(points) < 2:
        raise NotDrawn("fewer than two systems ran")
    points = points.iloc[::-1].reset_index(drop=True)
    looks = style.system_looks(case.systems)
    scale = style.display_scale(case.objective)
    values = points[case.objective] * scale
    figure = Figure(figsize=(style.WIDTH_IN, 1.55 + 0.42 * len(points)), dpi=style.DPI)
    axes = figure.add_subplot()
    for y, (_, point) in enumerate(points.iterrows()):
        color = looks[point["system"]].color
        axes.barh(
            y,
            values[y],
            height=0.66,
            color=color if point["admissible"] else style.pale(color),
            hatch="" if point["admissible"] else "////",
            edgecolor="white",
            lw=0.5,
            gid=str(point["system"]),
        )
        axes.text(values[y], y, " " + _text(point, values[y]), va="center", fontsize=7.5, color=style.INK)
    axes.set_ylim(-0.6, len(points) - 0.4)
    axes.set_xlim(0, values.max() * 1.75)
    axes.set_yticks(range(len(points)), [_name(system) for system in points["system"]])
    axes.set_xlabel(style.label(case.objective))
    axes.xaxis.set_major_formatter(lambda v, _: style.number(v))
    axes.grid(True, axis="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    notes = ["Each system at its best point; batch, recall and memory are that point's."]
    handles = []
    if not points["admissible"].all():
        handles = [
            Patch(facecolor=style.FAINT, hatch="////", edgecolor="white", label="keeps too little recall: not a choice")
        ]
    if missing := left_out(case):
        notes.append("Not drawn: " + ", ".join(missing) + ".")
    style.frame_figure(figure, _title(case, points), case.subtitle, notes, handles, 2)
    return figure


def _name(system: str) -> str:
    return f"{system} (a bound)" if is_bound_only(system) else system


def _text(point: pd.Series[Any], value: float) -> str:
    parts = [style.number(value), f"batch {style.value_text(point['workload.batch_size'])}"]
    if pd.notna(point["recall"]):
        parts.append(f"recall {point['recall']:.3f}")
    memory = f"HBM {point['hbm_bytes_peak'] / 1e9:.0f} GB"
    if point["host_bytes_peak"] > 0:
        memory += f" + host {point['host_bytes_peak'] / 1e9:.0f} GB"
    return " · ".join([*parts, memory])


def _title(case: Case, points: pd.DataFrame) -> str:
    lead = best_buildable(case)
    if lead is None:
        return "No system keeps the recall threshold"
    text = f"{lead['system']} is best: {style.number(lead[case.objective] * style.display_scale(case.objective))}"
    text += " tok/s" if case.objective.startswith("throughput") else ""
    dense = points[points["system"] == BASELINE]
    if len(dense) and lead["system"] != BASELINE:
        text += f", {lead[case.objective] / dense[case.objective].iloc[0]:.2f} times dense attention"
    return text
