"""Sweep heat map: throughput over fetch cap x block size, one panel per lookahead k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke

from analysis import style
from analysis.selection import (
    Case,
    NotDrawn,
    best_buildable,
    best_by_system,
    is_admissible,
    is_bound_only,
    matching,
    sorted_values,
    swept_parameters,
)

CAP, BLOCK, LOOKAHEAD = "policy.fetch_cap", "policy.block_size_tokens", "policy.lookahead_k"
CMAP = "cividis"
PANELS_PER_ROW = 3


@dataclass(frozen=True)
class Grid:
    """One system's cells: a row of results per (k, cap, block), the other swept parameters at its best point."""

    system: str
    point: pd.Series[Any]
    admissible: bool
    """Whether `point` keeps the recall threshold; else it is the nearest."""
    rows: pd.DataFrame
    caps: list[Any]
    blocks: list[Any]
    lookaheads: list[Any]

    def cell(self, k: Any, cap: Any, block: Any) -> pd.Series[Any] | None:
        found = self.rows[(self.rows[CAP] == cap) & (self.rows[BLOCK] == block)]
        found = found if k is None else found[found[LOOKAHEAD] == k]
        return None if found.empty else found.iloc[0]


def grid_candidates(case: Case) -> list[str]:
    """Systems whose results vary in both fetch cap and block size."""
    names = []
    for system, rows in case.rows.groupby("system", sort=False):
        if rows[CAP].dropna().nunique() > 1 and rows[BLOCK].dropna().nunique() > 1:
            names.append(str(system))
    return names


def grid_systems(case: Case) -> list[str]:
    """The candidates best first: those that can be built before bounds, admissible before not. Raises `NotDrawn`."""
    candidates = grid_candidates(case)
    if not candidates:
        still = [style.short(c) for c in (CAP, BLOCK) if case.rows[c].dropna().nunique() < 2]
        why = " and ".join(still) + " not varied" if still else "no system has both fetch cap and block size varied"
        raise NotDrawn(why)
    ranked = best_by_system(case)
    ranked = ranked[ranked["system"].isin(candidates)]
    if ranked.empty:
        raise NotDrawn(f"no point of {', '.join(candidates)} ran")
    ranked = ranked.assign(bound=ranked["system"].map(is_bound_only))
    ranked = ranked.sort_values(["bound", "admissible"], ascending=[True, False], kind="stable")
    return [str(system) for system in ranked["system"]]


def make_grid(case: Case, system: str | None = None) -> Grid:
    """Cells of a system, by default the best that has them. Raises `NotDrawn`."""
    name = grid_systems(case)[0] if system is None else system
    ranked = best_by_system(case)
    chosen = ranked[ranked["system"] == name].iloc[0]
    point = case.rows.loc[chosen["row"]]
    rows = matching(case.rows, point, {CAP, BLOCK, LOOKAHEAD})
    rows = rows.assign(admissible=is_admissible(rows))
    lookaheads = sorted_values(rows[LOOKAHEAD]) or [None]
    caps, blocks = sorted_values(rows[CAP]), sorted_values(rows[BLOCK])
    return Grid(name, point, bool(chosen["admissible"]), rows, caps, blocks, lookaheads)


@style.styled
def draw_heatmap(case: Case, system: str | None = None) -> Figure:
    """Annotated cells of a system: objective and recall; hatched below the threshold; its best cell framed.

    Without `system` it is the best one. Raises `NotDrawn` where no system has both axes varied.
    """
    grid = make_grid(case, system)
    values = grid.rows.loc[grid.rows["status"] == "ok", case.objective].dropna()
    norm = Normalize(values.min(), values.max() if values.max() > values.min() else values.min() * 1.01 + 1e-12)
    panel_rows = -(-len(grid.lookaheads) // PANELS_PER_ROW)
    columns = -(-len(grid.lookaheads) // panel_rows)
    panel_height = max(1.6, 0.46 * len(grid.caps) + 0.75)
    figure = Figure(figsize=(style.WIDTH_IN, 1.35 + panel_height * panel_rows), dpi=style.DPI)
    panels = figure.subplots(panel_rows, columns, squeeze=False, sharex=True, sharey=True)
    cmap = matplotlib.colormaps[CMAP]
    for index, axes in enumerate(panels.flat):
        if index >= len(grid.lookaheads):
            axes.set_visible(False)
            continue
        _draw_panel(axes, grid, grid.lookaheads[index], case.objective, cmap, norm)
        axes.tick_params(labelbottom=True)
        if index + columns >= len(grid.lookaheads):
            axes.set_xlabel(style.label(BLOCK))
        if index % columns == 0:
            axes.set_ylabel(style.label(CAP))
    bar = figure.colorbar(ScalarMappable(norm, cmap), ax=list(panels.flat), fraction=0.035, pad=0.015, aspect=28)
    bar.set_label(style.label(case.objective))
    bar.ax.yaxis.set_major_formatter(lambda v, _: style.number(v))
    bar.outline.set_visible(False)
    handles = [
        Patch(
            facecolor="white",
            edgecolor=style.ALARM,
            lw=2.2,
            label="best" if grid.admissible else "nearest to the threshold",
        ),
        Patch(facecolor="white", edgecolor=style.QUIET, hatch="////", label="recall below the threshold"),
    ]
    if (grid.rows["status"] != "ok").any():
        handles.append(Patch(facecolor="#eeeeee", edgecolor=style.FAINT, label="does not fit, or failed"))
    style.frame_figure(figure, _title(grid, case), case.subtitle, _notes(grid, case), handles, 3)
    return figure


def _draw_panel(axes: Axes, grid: Grid, k: Any, objective: str, cmap: Colormap, norm: Normalize) -> None:
    axes.set_xlim(-0.5, len(grid.blocks) - 0.5)
    axes.set_ylim(-0.5, len(grid.caps) - 0.5)
    data = np.full((len(grid.caps), len(grid.blocks)), np.nan)
    for y, cap in enumerate(grid.caps):
        for x, block in enumerate(grid.blocks):
            cell = grid.cell(k, cap, block)
            if cell is not None and cell["status"] == "ok" and pd.notna(cell[objective]):
                data[y, x] = cell[objective]
                _draw_cell(axes, x, y, cell, objective, cmap, norm)
            else:
                _draw_empty(axes, x, y, cell)
    image = axes.imshow(data, cmap=cmap, norm=norm, aspect="auto", origin="lower", zorder=1)
    image.set_gid(f"k={k}")
    if (grid.point[LOOKAHEAD] == k) or k is None:
        at = grid.blocks.index(grid.point[BLOCK]), grid.caps.index(grid.point[CAP])
        axes.add_patch(
            Rectangle((at[0] - 0.47, at[1] - 0.46), 0.94, 0.92, fill=False, ec=style.ALARM, lw=2.6, zorder=6)
        )
    axes.set_xticks(range(len(grid.blocks)), [style.value_text(b) for b in grid.blocks])
    axes.set_yticks(range(len(grid.caps)), [style.value_text(c) for c in grid.caps])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if k is not None:
        axes.set_title(f"lookahead k = {style.value_text(k)}", loc="left")


def _draw_cell(
    axes: Axes, x: int, y: int, cell: pd.Series[Any], objective: str, cmap: Colormap, norm: Normalize
) -> None:
    red, green, blue, _ = cmap(norm(cell[objective]))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
    ink = "white" if dark else "#111111"
    if not cell["admissible"]:
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch="///", ec=ink, lw=0, alpha=0.4, zorder=2))
    halo = [withStroke(linewidth=2.2, foreground=(red, green, blue))]
    axes.text(
        x,
        y + 0.15,
        style.number(cell[objective]),
        ha="center",
        va="center",
        color=ink,
        fontsize=8,
        zorder=5,
        path_effects=halo,
    )
    recall = f"r {cell['recall']:.3f}" if pd.notna(cell["recall"]) else "r –"
    axes.text(x, y - 0.22, recall, ha="center", va="center", color=ink, fontsize=6.3, zorder=5, path_effects=halo)


def _draw_empty(axes: Axes, x: int, y: int, cell: pd.Series[Any] | None) -> None:
    text = (
        "not run" if cell is None else {"does_not_fit": "does\nnot fit", "ok": "no value"}.get(cell["status"], "failed")
    )
    axes.add_patch(Rectangle((x - 0.48, y - 0.47), 0.96, 0.94, fc="#eeeeee", ec=style.FAINT, lw=0.5, zorder=2))
    axes.text(x, y, text, ha="center", va="center", color=style.QUIET, fontsize=6.5, zorder=5)


def _title(grid: Grid, case: Case) -> str:
    point = grid.point
    where = f"fetch cap {style.value_text(point[CAP])}, block {style.value_text(point[BLOCK])}"
    if pd.notna(point[LOOKAHEAD]):
        where += f", k = {style.value_text(point[LOOKAHEAD])}"
    if not grid.admissible:
        return f"{grid.system}: no cell keeps the recall threshold; nearest is {where}"
    value = (
        f"{style.number(point[case.objective])} tok/s"
        if case.objective.startswith("throughput")
        else style.number(point[case.objective])
    )
    return f"{grid.system} does best at {where}: {value}, recall {point['recall']:.3f}"


def _notes(grid: Grid, case: Case) -> list[str]:
    fixed = [
        f"{style.short(c)} {style.value_text(grid.point[c])}"
        for c in swept_parameters(case.rows)
        if c not in (CAP, BLOCK, LOOKAHEAD, "system") and pd.notna(grid.point[c])
    ]
    notes = ["r: recall." + (f" Held at the best point's: {', '.join(fixed)}." if fixed else "")]
    lead = best_buildable(case)
    if lead is not None and lead["system"] != grid.system:
        notes.append(f"Over all systems the best is {lead['system']}, {style.number(lead[case.objective])} tok/s.")
    return notes
