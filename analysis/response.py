"""Response lines: throughput, recall and exposed wait against each swept parameter, the others at the best point."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from analysis import style
from analysis.selection import (
    CONTEXT_COLUMNS,
    Case,
    NotDrawn,
    best_by_system,
    is_admissible,
    is_bound_only,
    left_out,
    matching,
    sorted_values,
    swept_parameters,
)
from analysis.text_fit import tick_labels

METRIC_ROWS = ("recall", "exposed_transfer_s")
"""Drawn under the objective."""
MAX_SINGLE_BAND = 5
"""Up to this many swept parameters stand side by side; more are split into rows of at most `COLUMNS_PER_BAND`."""
COLUMNS_PER_BAND = 4
PANELS_WIDTH_IN = style.WIDTH_IN - 0.75
"""Of a row of panels: what y labels and numbers leave."""
MAX_DODGE = 0.2
"""Step between systems at one value, where values are 1 apart; less where many systems share `DODGE_SPAN`."""
DODGE_SPAN = 0.5
LOG_RATIO = 20.0
WIDE_SPAN = 5.0
"""A panel whose range is this many times the next widest gets a y-axis of its own."""
CONTEXT, BUDGET = "workload.context_tokens", "policy.kv_budget_tokens"
NOT_AXES = ("system", "model", "hardware", "trace", "trace_group")


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


def response_lines(case: Case) -> dict[str, dict[str, pd.DataFrame]]:
    """Rows by swept parameter and system, of the parameters along which some system has two points or more."""
    candidates = [c for c in swept_parameters(case.rows) if c not in NOT_AXES]
    if not candidates:
        return {}
    points = {str(p["system"]): case.rows.loc[p["row"]] for _, p in best_by_system(case).iterrows()}
    lines = {c: {name: response_line(case, point, c) for name, point in points.items()} for c in candidates}
    return {c: by_system for c, by_system in lines.items() if any(len(rows) > 1 for rows in by_system.values())}


@style.styled
def draw_response(case: Case) -> Figure:
    """A column of small plots per swept parameter, a line per system. Raises `NotDrawn` if nothing is swept."""
    lines = response_lines(case)
    parameters = list(lines)
    if not parameters:
        raise NotDrawn(
            "no parameter is varied besides the system" if len(case.systems) > 1 else "no parameter is varied"
        )
    points = best_by_system(case)
    metrics = [case.objective, *(m for m in METRIC_ROWS if m != case.objective and case.ok[m].notna().any())]
    bands = 1 if len(parameters) <= MAX_SINGLE_BAND else -(-len(parameters) // COLUMNS_PER_BAND)
    columns = -(-len(parameters) // bands)
    figure = Figure(figsize=(style.WIDTH_IN, 1.4 + bands * (0.35 + 1.35 * len(metrics))), dpi=style.DPI)
    panels = figure.subplots(bands * len(metrics), columns, squeeze=False)
    looks = style.system_looks(case.systems)
    for index in range(bands * columns):
        band, column = divmod(index, columns)
        for row, metric in enumerate(metrics):
            axes = panels[band * len(metrics) + row][column]
            if index >= len(parameters):
                axes.set_visible(False)
                continue
            _draw_panel(axes, case, points, lines, parameters[index], metric, columns)
            last = row == len(metrics) - 1
            axes.set_xlabel(style.label(parameters[index]) if last else "")
            axes.tick_params(labelbottom=last)
            axes.set_ylabel(style.label(metric) if column == 0 else "")
    _share_metric_limits(panels, len(metrics), bands)
    handles = [_handle(str(s), looks[str(s)]) for s in points["system"]]
    notes = [
        "Each line varies one parameter and holds the others at its system's best point (large marker); values are "
        "spaced evenly, and systems stand side by side at each. Hollow markers are below the recall threshold. Dotted: "
        "the system does not heed the parameter.",
    ]
    if (case.rows["status"] != "ok").any():
        notes.append("× at the foot of a panel: the point does not fit, or failed.")
    if bounds := [str(s) for s in points["system"] if is_bound_only(str(s))]:
        notes.append(f"{', '.join(bounds)}: knows the future, a bound and not a system to build; hollow throughout.")
    if missing := left_out(case):
        notes.append("Not drawn: " + ", ".join(missing) + ".")
    style.frame_figure(figure, _title(case, lines), case.subtitle, notes, handles, 6)
    return figure


def _draw_panel(
    axes: Axes,
    case: Case,
    points: pd.DataFrame,
    lines: dict[str, dict[str, pd.DataFrame]],
    parameter: str,
    metric: str,
    num_columns: int,
) -> None:
    looks = style.system_looks(case.systems)
    ticks = sorted_values(case.rows[parameter])
    scale = style.display_scale(metric)
    crossed = 0
    heeding = [str(s) for s in points["system"] if not lines[parameter][str(s)].empty]
    shifts = dict(zip(heeding, dodges(len(heeding)), strict=True))
    for _, best in points.iloc[::-1].iterrows():
        look = looks[str(best["system"])]
        point = case.rows.loc[best["row"]]
        rows = lines[parameter][str(best["system"])]
        if rows.empty:
            if pd.notna(point[metric]):
                axes.axhline(point[metric] * scale, color=look.color, ls=":", lw=1.3, zorder=2)
            continue
        if metric == case.objective:
            _mark_missing(axes, rows[rows["status"] != "ok"][parameter], ticks, look, crossed)
            crossed += bool((rows["status"] != "ok").any())
        rows = rows[(rows["status"] == "ok") & rows[metric].notna()]
        shift = shifts[str(best["system"])]
        rows = rows.assign(place=[ticks.index(v) + shift for v in rows[parameter]]).sort_values("place")
        style_line = "-" if look.filled else "--"
        axes.plot(
            rows["place"], rows[metric] * scale, style_line, color=look.color, lw=1.3, zorder=3, gid=str(best["system"])
        )
        keeps, own = is_admissible(rows), rows.index == point.name
        for part, size, filled in (
            (~keeps & ~own, 3.8, False),
            (keeps & ~own, 3.8, True),
            (own, 7, bool(best["admissible"])),
        ):
            axes.plot(
                rows["place"][part],
                rows[metric][part] * scale,
                marker=look.marker,
                ms=size,
                mfc=look.color if filled and look.filled else "white",
                mec=look.color,
                mew=1.1,
                ls="none",
                zorder=4 if size < 5 else 5,
            )
    labels, size = tick_labels([style.value_text(v) for v in ticks], PANELS_WIDTH_IN / num_columns * 0.72)
    axes.set_xticks(range(len(ticks)), labels, fontsize=size)
    axes.set_xlim(-0.45, len(ticks) - 0.55)
    axes.grid(True, axis="y")
    axes.margins(y=0.12)
    if metric == case.objective and _spans_decades(case, points):
        axes.set_yscale("log")
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda v, _: style.number(v))


def dodges(count: int) -> list[float]:
    """Where systems stand about a value, so that equal results do not hide each other."""
    step = min(MAX_DODGE, DODGE_SPAN / max(1, count - 1))
    return [step * (i - (count - 1) / 2) for i in range(count)]


def _spans_decades(case: Case, points: pd.DataFrame) -> bool:
    """Whether the objective of the drawn systems is better read on a log axis."""
    values = case.ok.loc[case.ok["system"].isin(points["system"]), case.objective]
    return bool(values.min() > 0 and values.max() > LOG_RATIO * values.min())


def _mark_missing(axes: Axes, values: pd.Series[Any], ticks: list[Any], look: style.Look, row: int) -> None:
    """A cross at the foot of the panel, in the system's colour, where its point does not fit or failed."""
    foot = axes.get_xaxis_transform()
    for value in values:
        axes.text(ticks.index(value), 0.02 + 0.09 * row, "×", color=look.color, transform=foot, ha="center", fontsize=9)


def _share_metric_limits(panels: Any, num_metrics: int, bands: int) -> None:
    """One y-range per metric, so that columns compare at a glance; each its own where one would flatten the others."""
    for row in range(num_metrics):
        same = [a for band in range(bands) for a in panels[band * num_metrics + row] if a.get_visible()]
        moving = [a for a in same if not _is_zero(a)]
        spans = sorted(float(np.ptp(a.get_ylim())) for a in moving)
        if not moving or (len(spans) > 1 and spans[-1] > WIDE_SPAN * spans[-2]):
            for axes in same:
                if axes not in moving:
                    axes.set_ylim(-0.12, 1)
                    axes.set_yticks([0], ["0"])
            continue
        low, high = min(a.get_ylim()[0] for a in moving), max(a.get_ylim()[1] for a in moving)
        for axes in same:
            axes.set_ylim(low, high)
            if axes is not same[0] and axes.get_subplotspec().colspan.start > 0:
                axes.tick_params(labelleft=False)


def _is_zero(axes: Axes) -> bool:
    """Whether all that is drawn is 0: an axis about it would show numbers that nothing has."""
    return not any(np.any(np.asarray(line.get_ydata(), dtype=float)) for line in axes.lines)


def _handle(system: str, look: style.Look) -> Line2D:
    face = look.color if look.filled else "white"
    return Line2D(
        [],
        [],
        color=look.color,
        ls="-" if look.filled else "--",
        marker=look.marker,
        ms=5.5,
        mfc=face,
        mec=look.color,
        lw=1.3,
        label=system,
    )


def _title(case: Case, lines: dict[str, dict[str, pd.DataFrame]]) -> str:
    points = best_by_system(case)
    points = points[points["admissible"] & ~points["system"].map(is_bound_only).astype(bool)]
    if points.empty:
        return "How each system answers to the swept parameters; none keeps the recall threshold"
    spans = [_spans(lines, str(system), case.objective) for system in points["system"]]
    lead = max(range(len(spans)), key=lambda i: (len(spans[i]), -i))
    name = points["system"].iloc[lead]
    if not spans[lead]:
        return f"{name} does not answer to any swept parameter"
    widest = max(spans[lead], key=lambda p: spans[lead][p])
    if spans[lead][widest] < 1.005:
        return f"None of the swept parameters moves {name}'s {style.short(case.objective)}"
    return (
        f"Around its best point {name} answers most to {style.short(widest)}: "
        f"×{style.number(spans[lead][widest])} in {style.short(case.objective)}"
    )


def _spans(lines: dict[str, dict[str, pd.DataFrame]], system: str, objective: str) -> dict[str, float]:
    """Largest over smallest objective along each parameter that the system heeds."""
    spans = {}
    for parameter, by_system in lines.items():
        rows = by_system[system]
        values = rows.loc[rows["status"] == "ok", objective].dropna()
        if len(values) > 1 and values.min() > 0:
            spans[parameter] = float(values.max() / values.min())
    return spans
