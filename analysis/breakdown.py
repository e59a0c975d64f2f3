"""Where a decode step goes: stacked bars of the compute stream's time per system, the exposed wait set apart."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import style
from analysis.selection import Case, NotDrawn, best_by_system, is_bound_only, left_out
from simulator.metrics import BREAKDOWN

WAIT = "t_exposed_wait_s"

PARTS: dict[str, tuple[str, str, str]] = {
    "t_qkv_s": ("QKV", "#0B3C5D", ""),
    "t_ffn_s": ("O + FFN", "#2F77AD", ""),
    "t_lm_head_s": ("LM head", "#9CC4E4", ""),
    "t_attention_s": ("attention", "#1B7A5A", ""),
    "t_score_s": ("scoring", "#7CC7A5", ""),
    "t_plan_s": ("wait for plan", "#C9E8D9", "..."),
    "t_gather_s": ("gather", "#B9A44C", ""),
    "t_draft_s": ("draft head", "#8E6BAE", ""),
    "t_sampling_s": ("sampling", "#D3BFE3", ""),
    "t_allreduce_s": ("all-reduce", "#F0E442", ""),
    "t_software_s": ("software", "#8A8A8A", ""),
    "t_other_s": ("other", "#CFCFCF", ""),
    WAIT: ("exposed wait for a transfer", style.ALARM, "////"),
}
"""Label, colour and hatch of each component, in stacking order; the wait comes last so that it is the bar's end."""


@style.styled
def draw_breakdown(case: Case) -> Figure:
    """Best point of each system: ms of a step at the left, share of it at the right.

    Raises `NotDrawn` where no point that ran has a breakdown.
    """
    points = best_by_system(case)
    points = points[points[list(BREAKDOWN)].notna().any(axis=1)].reset_index(drop=True)
    if points.empty:
        raise NotDrawn("no point that ran has a latency breakdown")
    points = points.iloc[::-1].reset_index(drop=True)
    seconds = points[list(BREAKDOWN)].fillna(0.0)
    totals = seconds.sum(axis=1)
    present = [part for part in PARTS if (seconds[part] > 0).any()]
    columns = min(5, len(present))
    height = 1.95 + 0.42 * len(points)
    figure = Figure(figsize=(style.WIDTH_IN, height), dpi=style.DPI)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.35, 1))
    _stack(left, seconds[present] * 1e3)
    _stack(right, seconds[present].div(totals.where(totals > 0), axis=0).fillna(0.0) * 100)
    for y, (total, (_, point)) in enumerate(zip(totals, points.iterrows(), strict=True)):
        text = f" {style.number(total * 1e3)} ms · batch {style.value_text(point['workload.batch_size'])}"
        left.text(total * 1e3, y, text, va="center", fontsize=7.5, color=style.INK)
        share = point[WAIT] / total if total > 0 and pd.notna(point[WAIT]) else 0.0
        note = f" {style.percent(share)} wait" if share > 0 else " no wait"
        right.text(100, y, note, va="center", fontsize=7.5, color=style.ALARM if share > 0.05 else style.QUIET)
    left.set_ylim(-0.6, len(points) - 0.4)
    left.set_xlim(0, totals.max() * 1e3 * 1.42)
    right.set_xlim(0, 122)
    right.set_xticks([0, 25, 50, 75, 100])
    left.set_yticks(
        range(len(points)),
        [f"{s}{'' if a else ' *'}" for s, a in zip(points["system"], points["admissible"], strict=True)],
    )
    left.set_xlabel("mean time of a step (ms)")
    right.set_xlabel("share of the step (%)")
    for axes in (left, right):
        axes.grid(True, axis="x")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    handles = [Patch(facecolor=PARTS[p][1], hatch=PARTS[p][2], edgecolor="white", label=PARTS[p][0]) for p in present]
    notes = [f"Best admissible point of each system, ordered by {style.label(case.objective)}, best on top."]
    if not points["admissible"].all():
        notes.append("* no point of the system keeps the recall threshold; its nearest is shown.")
    if missing := left_out(case):
        notes.append("Not drawn: " + ", ".join(missing) + ".")
    style.frame_figure(figure, _title(points, totals), case.subtitle, notes, handles, columns)
    return figure


def _stack(axes: Axes, values: pd.DataFrame) -> None:
    start = pd.Series(0.0, index=values.index)
    for part in values.columns:
        _, color, hatch = PARTS[part]
        bars = axes.barh(
            values.index, values[part], left=start, height=0.66, color=color, hatch=hatch, edgecolor="white", lw=0.5
        )
        bars.set_label(part)
        start = start + values[part]


def _title(points: pd.DataFrame, totals: pd.Series[float]) -> str:
    waits = (points[WAIT].fillna(0.0) / totals.where(totals > 0)).fillna(0.0)
    worst = int(waits.to_numpy().argmax())
    movers = points.index[(points["h2d_bytes_per_token"] > 0) & ~points["system"].map(is_bound_only).astype(bool)]
    lead = movers[-1] if len(movers) else points.index[-1]
    if waits[worst] < 0.005:
        who = "No system's step waits" if len(points) > 1 else f"{points['system'].iloc[0]}'s step does not wait"
        return f"{who} noticeably for a transfer"
    worst_text = f"{points['system'][worst]} waits {style.percent(waits[worst])} of a step for transfers"
    if worst == lead or len(points) == 1:
        return worst_text
    return f"{worst_text}, {points['system'][lead]} {_wait_text(waits[lead])}"


def _wait_text(share: Any) -> str:
    return style.percent(share) if share >= 0.005 else "almost none"
