"""Serving runs over time: how many requests wait and run, and what the memory pools hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis import style
from analysis.load import Run
from analysis.selection import NotDrawn
from analysis.serving_files import PointFile, not_drawn, point_files, some_settings
from analysis.serving_plots import subtitle

MOST_SETTINGS = 3
MOST_SYSTEMS = 4
"""Panels side by side that can be read."""
COLUMNS = ("role", "start_s", "seconds", "waiting", "prefilling", "decoding", "hbm_capacity_bytes")
IN_HBM = {
    "full_kv_bytes": ("whole KV", "#333333"),
    "sparse_kv_bytes": ("working sets", "#0072B2"),
    "compressed_keys_bytes": ("compressed keys", "#E69F00"),
    "draft_kv_bytes": ("draft KV", "#009E73"),
    "logits_bytes": ("logits", "#CC79A7"),
}
OUTSIDE = {"host_kv_bytes": ("host memory", "#56B4E9"), "remote_kv_bytes": ("beyond the host", "#D55E00")}
MOST_INTERVALS = 150
"""Of a line: more cannot be seen."""


@style.styled
def draw_load(run: Run) -> Figure:
    """Requests that decode, and those that wait or prefill, over time: a row per setting, a line per system.

    Raises `NotDrawn` without usage files.
    """
    files = _files(run)
    settings, left_out = some_settings(files, MOST_SETTINGS)
    looks = style.system_looks(list(dict.fromkeys(file.system for file in files)))
    figure = Figure(figsize=(style.WIDTH_IN, 1.5 + 1.7 * len(settings)), dpi=style.DPI)
    panels = figure.subplots(len(settings), 2, squeeze=False)
    for (running, queued), setting in zip(panels, settings, strict=True):
        for file in files:
            if file.setting == setting:
                color = looks[file.system].color
                _steps(running, file.table, ["decoding"], color)
                _steps(queued, file.table, ["waiting", "prefilling"], color)
        running.set_title("decoding" + (f" · {setting}" if setting else ""), loc="left")
        queued.set_title("waiting or in prefill" + (f" · {setting}" if setting else ""), loc="left")
        running.set_ylabel("requests")
        for axes in (running, queued):
            axes.grid(True)
            axes.set_ylim(bottom=0)
            axes.set_xlim(left=0)
    for axes in panels[-1]:
        axes.set_xlabel("seconds since the start")
    handles = [Line2D([], [], color=look.color, lw=1.6, label=system) for system, look in looks.items()]
    last = [file for file in files if file.setting == settings[0]]
    peaks = ", ".join(f"{file.system} {_of_decoding(file)['decoding'].max():.0f}" for file in last)
    notes = [f"Means over 1/{MOST_INTERVALS} of the run."]
    notes += not_drawn(left_out)
    title = f"Requests decoding at once, at most{_at(settings[0])}: {peaks}"
    style.frame_figure(figure, title, subtitle(run), notes, handles, 5)
    return figure


@style.styled
def draw_pools(run: Run) -> Figure:
    """What the pools of a GPU hold over time, HBM stacked, the rest below: a column per system, at its setting
    with the most requests within the SLO a second.

    Raises `NotDrawn` without usage files.
    """
    files = _files(run)
    best = [file for file in files if file.is_best_of_system]
    shown = best[:MOST_SYSTEMS]
    alike = len({file.setting for file in shown}) == 1
    tables = {file.system: _of_decoding(file) for file in shown}
    outside = [name for name in OUTSIDE if any(table[name].max() > 0 for table in tables.values())]
    rows = 2 if outside else 1
    figure = Figure(figsize=(style.WIDTH_IN, 1.5 + 2.2 * rows), dpi=style.DPI)
    panels = figure.subplots(rows, len(tables), squeeze=False, sharex="col", sharey="row")
    for column, ((system, table), file) in enumerate(zip(tables.items(), shown, strict=True)):
        _stacked(panels[0, column], table)
        panels[0, column].set_title(system + ("" if alike or not file.setting else f" · {file.setting}"), loc="left")
        if outside:
            for name in outside:
                _steps(panels[1, column], table, [name], OUTSIDE[name][1], 1e-9)
            panels[1, column].grid(True)
        panels[-1, column].set_xlabel("seconds since the start")
    for row, label in zip(panels, ("HBM (GB a GPU)", "outside HBM (GB a GPU)"), strict=False):
        row[0].set_ylabel(label)
        row[0].set_ylim(bottom=0)
    held = [name for name in IN_HBM if any(table[name].max() > 1e-3 * _capacity(table) for table in tables.values())]
    handles: list[Artist] = [Patch(color=IN_HBM[name][1], label=IN_HBM[name][0]) for name in held]
    handles += [Line2D([], [], color=OUTSIDE[name][1], lw=1.6, label=OUTSIDE[name][0]) for name in outside]
    handles.append(Line2D([], [], color=style.ALARM, lw=1.0, ls=(0, (4, 2)), label="all that weights leave"))
    notes = ["Means over short intervals. Prefix caches use what is free and are not drawn."]
    if len(shown) < len(best):
        notes.append(f"{len(best) - len(shown)} more system(s) are not drawn.")
    if any(file.table["role"].eq("prefill").any() for file in shown):
        notes.append("Pools of the replicas that decode; prefill is elsewhere.")
    filled = {
        system: float(table[list(IN_HBM)].sum(axis=1).max()) / _capacity(table) for system, table in tables.items()
    }
    shares = ", ".join(f"{system} {share:.0%}" for system, share in filled.items())
    title = f"Peak use of HBM beside the weights{_at_best(shown, alike) if len(files) > len(best) else ''}: {shares}"
    style.frame_figure(figure, title, subtitle(run), notes, handles, 6)
    return figure


def _files(run: Run) -> list[PointFile]:
    files = point_files(run, "usage", (*COLUMNS, *IN_HBM, *OUTSIDE))
    if not files:
        raise NotDrawn("no usage files beside the results")
    return files


def _at(setting: str) -> str:
    return f" ({setting})" if setting else ""


def _at_best(shown: Sequence[PointFile], alike: bool) -> str:
    """Which of several settings is drawn; where they differ each column names its own."""
    return f" at the best goodput{_at(shown[0].setting)}" if alike else ", each system at its best goodput"


def _of_decoding(file: PointFile) -> pd.DataFrame:
    return file.table[file.table["role"] != "prefill"]


def _steps(axes: Axes, table: pd.DataFrame, columns: list[str], color: str, scale: float = 1.0) -> None:
    """Sum of the columns over all roles, as means over at most MOST_INTERVALS parts of the run."""
    values, ends = table[columns].sum(axis=1) * scale, table["start_s"] + table["seconds"]
    edges = np.linspace(0.0, ends.max(), MOST_INTERVALS + 1)
    integral = np.zeros(len(edges))
    for _, role in table.groupby("role"):
        reached = np.append(0.0, (values * table["seconds"])[role.index].cumsum())
        integral += np.interp(edges, np.append(0.0, ends[role.index]), reached)
    axes.stairs(np.diff(integral) / np.diff(edges), edges, color=color, lw=1.1, baseline=None)


def _stacked(axes: Axes, table: pd.DataFrame) -> None:
    edges = np.append(table["start_s"].to_numpy(), (table["start_s"] + table["seconds"]).iloc[-1])
    below = np.zeros(len(table))
    for name, (_, color) in IN_HBM.items():
        above = below + table[name].to_numpy() / 1e9
        axes.stairs(above, edges, baseline=below, fill=True, color=color, lw=0)
        below = above
    axes.axhline(_capacity(table) / 1e9, color=style.ALARM, lw=1.0, ls=(0, (4, 2)))
    axes.set_xlim(0, edges[-1])
    axes.grid(True)


def _capacity(table: pd.DataFrame) -> float:
    return float(table["hbm_capacity_bytes"].iloc[0])
