"""Response lines: throughput, recall and exposed wait against each swept parameter, the others at the best point."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.selection import (
    CONTEXT_COLUMNS,
    Case,
    NotDrawn,
    best_buildable,
    best_by_system,
    is_admissible,
    is_bound_only,
    left_out,
    matching,
    sorted_values,
    swept_parameters,
)

METRIC_ROWS = ("recall", "exposed_transfer_s")
"""Drawn under the objective."""
COLUMNS_PER_BAND = 4
MAX_TICK_LABELS = 6
WIDE_SPAN = 5.0
"""A panel whose range is this many times the next widest gets a y-axis of its own."""
CONTEXT, BUDGET = "workload.context_tokens", "policy.kv_budget_tokens"
NOT_AXES = ("system", "model", "hardware", "trace", "trace_group")


def response_axes(case: Case) -> list[str]:
    """Swept parameters that some system heeds, in the schema's order."""
    return [c for c in swept_parameters(case.rows) if c not in NOT_AXES]


def response_line(case: Case, point: pd.Series[Any], parameter: str) -> pd.DataFrame:
    """Rows of the point's system along `parameter`, everything else as at the point.

    A budget that follows the context (a fixed share of it) is followed along the context axis.
    """
    free = {parameter, *(CONTEXT_COLUMNS if parameter == CONTEXT else ())}
    rows = matching(case.rows, point, free)
    if parameter == CONTEXT and rows[CONTEXT].nunique() < 2 and pd.notna(point[BUDGET]):
        wider = matching(case.rows, point, free | {BUDGET})
        share = point[BUDGET] / point[CONTEXT]
        rows = wider[(wider[BUDGET] / wider[CONTEXT] - share).abs() <= 1e-3 * share]
    return rows[rows[parameter].notna()].drop_duplicates(parameter)


@style.styled
def draw_response(case: Case) -> Figure:
    """A column of small plots per swept parameter, a line per system. Raises `NotDrawn` if nothing is swept."""
    parameters = response_axes(case)
    if not parameters:
        raise NotDrawn(
            "no parameter is varied besides the system" if len(case.systems) > 1 else "no parameter is varied"
        )
    points = best_by_system(case)
    metrics = [case.objective, *(m for m in METRIC_ROWS if m != case.objective and case.ok[m].notna().any())]
    bands = -(-len(parameters) // COLUMNS_PER_BAND)
    columns = min(COLUMNS_PER_BAND, len(parameters))
    legend_rows = -(-len(points) // 6)
    figure = Figure(
        figsize=(style.WIDTH_IN, 1.2 + 0.2 * legend_rows + bands * (0.35 + 1.35 * len(metrics))), dpi=style.DPI
    )
    panels = figure.subplots(bands * len(metrics), columns, squeeze=False)
    looks = style.system_looks(case.systems)
    for index in range(bands * COLUMNS_PER_BAND):
        band, column = divmod(index, COLUMNS_PER_BAND)
        if column >= columns:
            continue
        for row, metric in enumerate(metrics):
            axes = panels[band * len(metrics) + row][column]
            if index >= len(parameters):
                axes.set_visible(False)
                continue
            _draw_panel(axes, case, points, parameters[index], metric, looks)
            last = row == len(metrics) - 1
            axes.set_xlabel(style.label(parameters[index]) if last else "")
            axes.tick_params(labelbottom=last)
            axes.set_ylabel(style.label(metric) if column == 0 else "")
    _share_metric_limits(panels, len(metrics), bands)
    handles = [_handle(str(s), looks[str(s)]) for s in points["system"]]
    notes = [
        "Each line varies one parameter and holds the others at its system's best point (large marker). Hollow small "
        "markers are below the recall threshold. Dotted: the system does not heed the parameter.",
    ]
    if bounds := [str(s) for s in points["system"] if is_bound_only(str(s))]:
        notes.append(f"{', '.join(bounds)}: knows the future, a bound and not a system to build; hollow throughout.")
    if missing := left_out(case):
        notes.append("Not drawn: " + ", ".join(missing) + ".")
    style.frame_figure(figure, _title(case, parameters), case.subtitle, notes, handles, 6)
    return figure


def _draw_panel(
    axes: Axes, case: Case, points: pd.DataFrame, parameter: str, metric: str, looks: dict[str, style.Look]
) -> None:
    ticks = sorted_values(case.rows[parameter])
    scale = style.display_scale(metric)
    for _, best in points.iloc[::-1].iterrows():
        look = looks[str(best["system"])]
        point = case.rows.loc[best["row"]]
        rows = response_line(case, point, parameter)
        if rows.empty:
            if pd.notna(point[metric]):
                axes.axhline(point[metric] * scale, color=look.color, ls=":", lw=1.3, zorder=2)
            continue
        rows = rows[(rows["status"] == "ok") & rows[metric].notna()]
        rows = rows.assign(place=[ticks.index(v) for v in rows[parameter]]).sort_values("place")
        style_line = "-" if look.filled else "--"
        axes.plot(
            rows["place"], rows[metric] * scale, style_line, color=look.color, lw=1.3, zorder=3, gid=str(best["system"])
        )
        for (_, row), admissible in zip(rows.iterrows(), is_admissible(rows), strict=True):
            own = row.name == point.name
            face = look.color if admissible and look.filled else "white"
            axes.plot(
                [row["place"]], [row[metric] * scale], marker=look.marker, ms=7 if own else 3.8, mfc=face,
                mec=look.color, mew=1.1, ls="none", zorder=5 if own else 4,
            )  # fmt: skip
    every = -(-len(ticks) // MAX_TICK_LABELS)
    axes.set_xticks(range(len(ticks)), [style.value_text(v) if i % every == 0 else "" for i, v in enumerate(ticks)])
    axes.set_xlim(-0.35, len(ticks) - 0.65)
    axes.grid(True, axis="y")
    axes.margins(y=0.12)
    axes.yaxis.set_major_formatter(lambda v, _: style.number(v))


def _share_metric_limits(panels: Any, num_metrics: int, bands: int) -> None:
    """One y-range per metric, so that columns compare at a glance; each its own where one would flatten the others."""
    for row in range(num_metrics):
        same = [a for band in range(bands) for a in panels[band * num_metrics + row] if a.get_visible()]
        spans = sorted(float(np.ptp(a.get_ylim())) for a in same)
        if len(spans) > 1 and spans[-1] > WIDE_SPAN * spans[-2]:
            continue
        low, high = min(a.get_ylim()[0] for a in same), max(a.get_ylim()[1] for a in same)
        for axes in same:
            axes.set_ylim(low, high)
            if axes is not same[0] and axes.get_subplotspec().colspan.start > 0:
                axes.tick_params(labelleft=False)


def _handle(system: str, look: style.Look) -> Line2D:
    face = look.color if look.filled else "white"
    return Line2D(
        [], [], color=look.color, ls="-" if look.filled else "--", marker=look.marker, ms=5.5, mfc=face, mec=look.color,
        lw=1.3, label=system,
    )  # fmt: skip


def _title(case: Case, parameters: list[str]) -> str:
    lead = best_buildable(case)
    if lead is None:
        return "No point keeps the recall threshold; how each system answers to the swept parameters"
    spans = {}
    for parameter in parameters:
        rows = response_line(case, lead, parameter)
        values = rows.loc[rows["status"] == "ok", case.objective].dropna()
        if len(values) > 1 and values.min() > 0:
            spans[parameter] = values.max() / values.min()
    if not spans:
        return f"{lead['system']} is best; it does not heed the swept parameters"
    widest = max(spans, key=lambda p: spans[p])
    if spans[widest] < 1.005:
        return f"None of the swept parameters moves {lead['system']}'s {style.short(case.objective)}"
    return (
        f"Around its best point {lead['system']} answers most to {style.short(widest)}: "
        f"×{spans[widest]:.2f} in {style.short(case.objective)}"
    )
