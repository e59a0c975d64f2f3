"""Serving runs: latency, throughput and promises kept against the arrival rate, and how latencies are distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.kept_rates import KEPT, RATE, kept_rates, overload_line
from analysis.load import Run
from analysis.selection import NotDrawn
from analysis.serving_files import PointFile, not_drawn, point_files, some_settings

LINE_STYLES = ("-", (0, (5, 2)), (0, (1, 1.5)))
"""Settings in one picture of distributions; more cannot be told apart."""
LINE_WIDTHS = (2.2, 1.5, 1.2)
"""The first is below the others and shows between their dashes."""


def is_serving(run: Run) -> bool:
    return "slo_attainment" in run.results


def drawings(run: Run) -> dict[str, Callable[[], Figure]]:
    from analysis.handover_plots import MODE, draw_handover
    from analysis.serving_usage import draw_load, draw_pools

    draws = {"rates": draw_rates, "latency": draw_latencies, "load": draw_load, "pools": draw_pools}
    if MODE in run.results:
        draws["handover"] = draw_handover
    return {f"serving-{name}": partial(draw, run) for name, draw in draws.items()}


@style.styled
def draw_rates(run: Run) -> Figure:
    """Quantiles of TTFT and TPOT, throughput and SLO attainment over the rate, a line per system.

    Raises `NotDrawn` without two rates of one system.
    """
    rows = run.results[run.results["status"] == "ok"]
    if RATE not in rows or rows.groupby("system")[RATE].nunique().max() < 2:
        raise NotDrawn(f"no system ran at two values of {RATE}")
    others = _swept_besides(rows)
    if others:
        raise NotDrawn(f"points differ in {', '.join(others)} besides the rate")
    systems = list(dict.fromkeys(rows["system"]))
    looks = style.system_looks(systems)
    figure = Figure(figsize=(style.WIDTH_IN, 6.2), dpi=style.DPI)
    (ttft, tpot), (throughput, kept) = figure.subplots(2, 2, sharex=True)
    for system in systems:
        line, look = rows[rows["system"] == system].sort_values(RATE), looks[system]
        over = line["overloaded"].eq(True)
        for axes, columns, scale in (
            (ttft, ("ttft_p50_s", "ttft_p99_s"), 1.0),
            (tpot, ("tpot_p50_s", "tpot_p99_s"), 1e3),
            (throughput, ("throughput_tokens_per_s",), 1.0),
            (kept, ("slo_attainment",), 100.0),
        ):
            for column, dashes in zip(columns, ("-", (0, (4, 2))), strict=False):
                axes.plot(line[RATE], line[column] * scale, color=look.color, lw=1.3, ls=dashes)
                for points, fill in ((line[~over], look.color), (line[over], "white")):
                    axes.plot(
                        points[RATE], points[column] * scale, ls="", marker=look.marker, ms=4.5, mfc=fill,
                        mec=look.color,
                    )  # fmt: skip
    ttft.set_yscale("log")
    style.plain_log(ttft.yaxis)
    for axes, title in (
        (ttft, "time to first token (s)"),
        (tpot, "time per output token (ms)"),
        (throughput, "output tokens per second"),
        (kept, "requests within the SLO (%)"),
    ):
        axes.set_title(title, loc="left")
        axes.grid(True)
        if axes is not ttft:
            axes.set_ylim(bottom=0)
    kept.set_ylim(0, 103)
    for axes in (throughput, kept):
        axes.set_xlabel("arrivals per second")
        axes.set_xlim(left=0)
    handles = [Line2D([], [], color=looks[s].color, marker=looks[s].marker, ms=4, lw=1.3, label=s) for s in systems]
    handles += [
        Line2D([], [], color=style.QUIET, lw=1.3, label="median"),
        Line2D([], [], color=style.QUIET, lw=1.3, ls=(0, (4, 2)), label="99th percentile"),
    ]
    style.frame_figure(figure, _title(rows), subtitle(run), _notes(run, rows), handles, 5)
    return figure


@style.styled
def draw_latencies(run: Run) -> Figure:
    """Cumulative distributions of TTFT and TPOT over requests: a colour per system, a line style per setting.

    Raises `NotDrawn` without request files.
    """
    files = point_files(run, "requests", ("status", "ttft_s", "tpot_s"))
    if not files:
        raise NotDrawn("no request files beside the results")
    settings, left_out = some_settings(files, len(LINE_STYLES))
    looks = style.system_looks(list(dict.fromkeys(file.system for file in files)))
    figure = Figure(figsize=(style.WIDTH_IN, 4.4), dpi=style.DPI)
    panels = figure.subplots(1, 2, sharey=True)
    for file in files:
        if file.setting not in settings:
            continue
        order = settings.index(file.setting)
        dashes, width = LINE_STYLES[order], LINE_WIDTHS[order]
        for axes, column, scale in zip(panels, ("ttft_s", "tpot_s"), (1.0, 1e3), strict=True):
            finished = file.table.loc[file.table["status"] == "ok", column]
            values = np.sort(finished.dropna().to_numpy()) * scale
            share = np.arange(1, len(values) + 1) / max(1, len(values)) * 100
            axes.step(values, share, where="post", color=looks[file.system].color, ls=dashes, lw=width)
    panels[0].set_xscale("log")
    style.plain_log(panels[0].xaxis)
    panels[0].set_xlabel("time to first token (s)")
    panels[1].set_xlabel("time per output token (ms)")
    panels[0].set_ylabel("requests (%)")
    for axes in panels:
        axes.grid(True)
        axes.set_ylim(0, 101)
    handles = [Line2D([], [], color=look.color, lw=1.6, label=system) for system, look in looks.items()]
    if settings != [""]:
        shown = zip(settings, LINE_STYLES, strict=False)
        handles += [Line2D([], [], color=style.QUIET, ls=dashes, lw=1.2, label=text) for text, dashes in shown]
    notes = [*coinciding([file for file in files if file.setting in settings]), *not_drawn(left_out)]
    style.frame_figure(figure, "How latencies are distributed over requests", subtitle(run), notes, handles, 5)
    return figure


def coinciding(files: Sequence[PointFile]) -> list[str]:
    """Notes on settings of one system whose lines cannot be told apart, in either panel."""
    notes = []
    for name, label in (("ttft_s", "Time to first token"), ("tpot_s", "Time per output token")):
        groups: dict[tuple[str, ...], list[str]] = {}
        for file in files:
            times = file.table.loc[file.table["status"] == "ok", name]
            figures = [f"{times.quantile(share):.3g}" for share in (0.1, 0.5, 0.9, 0.99)]
            groups.setdefault((file.system, *figures), []).append(file.setting)
        notes += [
            f"{label}: lines coincide of {key[0]} at {'; '.join(settings)}."
            for key, settings in groups.items()
            if len(settings) > 1
        ]
    return notes


def _swept_besides(rows: pd.DataFrame) -> list[str]:
    """Parameters other than the rate of which one system has several values."""
    columns = [
        c for c in rows.columns if c not in ("system", RATE) and ("." in c or c in ("model", "hardware", "trace"))
    ]
    return [c for c in columns if rows.groupby("system")[c].nunique().max() > 1]


def as_rows(rows: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in rows.to_dict("records")]


def _title(rows: pd.DataFrame) -> str:
    """Which system keeps its promises to the highest rate, or that all rates were too high."""
    if rows["overloaded"].eq(True).all():
        return overload_line(as_rows(rows)) or ""
    reached = kept_rates(as_rows(rows))
    highest = max((rate for rate in reached.values() if rate is not None), default=None)
    if highest is None:
        return f"No system keeps the SLO for {KEPT:.0%} of requests from the lowest rate on"
    best = [system for system, rate in reached.items() if rate == highest]
    names = "every system" if 1 < len(best) == len(reached) else " and ".join(best)
    keep = "keeps" if len(best) == 1 or names == "every system" else "keep"
    return f"{names} {keep} the SLO for {KEPT:.0%} of requests up to {highest:g} arrivals per second"


def subtitle(run: Run) -> str:
    """Model, GPUs, requests and promises of a run."""
    serving, first = run.config.get("serving") or {}, run.results.iloc[0]
    requests = serving.get("requests")
    what = Path(str(requests)).name if requests else f"{serving.get('lengths')} lengths"
    if not requests and serving.get("prompt_tokens") and serving.get("output_tokens"):
        what = f"{serving['prompt_tokens']:,} prompt and {serving['output_tokens']:,} output tokens"
    slo = f"SLO {serving.get('slo_ttft_s')} s to the first token, {serving.get('slo_tpot_s')} s per token"
    gpus = f"{first['placement.num_gpus']:g} x " if first["placement.num_gpus"] > 1 else ""
    return f"{first['model']} on {gpus}{first['hardware']} · {what} · {slo}"


def _notes(run: Run, rows: pd.DataFrame) -> list[str]:
    notes = []
    if rows["overloaded"].eq(True).any():
        notes.append(
            "Hollow: overloaded. What came was not served while it came, so the point is one burst, not a rate: its "
            "quantiles and its share within the SLO depend on how many requests came."
        )
    refused = int(rows["num_refused"].max())
    if refused:
        notes.append(f"Up to {refused:,} requests of a point can never fit; they count as outside the SLO.")
    failed = len(run.results) - len(rows)
    if failed:
        notes.append(f"{failed} point(s) did not run and are not drawn.")
    return notes
