"""Roofline over memory tiers: throughput against tokens per GB of KV moved, one ceiling per tier.

A system that moves b bytes of KV per token over a tier lies at x = 1/b. If nothing but that tier bound it, it would
reach 1 / (fixed + b / bandwidth) tok/s, where `fixed` is the time a token's share of the weights keeps the tier busy.
Source of the multi-level form: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import matplotlib.transforms as transforms
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from analysis import style
from analysis.selection import Case, NotDrawn, best_buildable, best_by_system, is_bound_only, left_out

GB = 1e9
MAX_TWO_LINE_LABELS = 8


@dataclass(frozen=True)
class Tier:
    """A memory tier or link of the plot, with its result columns."""

    name: str
    bytes_column: str
    ceiling_column: str
    color: str
    linestyle: str
    carries_weights: bool = False


TIERS = (
    Tier("HBM", "kv_bytes_read_per_token", "hbm_ceiling_tokens_per_s", "#555555", "-", carries_weights=True),
    Tier("host link", "h2d_bytes_per_token", "h2d_ceiling_tokens_per_s", "#B8481C", "--"),
    Tier("remote link", "remote_bytes_per_token", "remote_ceiling_tokens_per_s", "#7B3F98", "-."),
)


@dataclass(frozen=True)
class Ceiling:
    """What a tier alone would allow: `fixed_s` per token for other traffic, then bytes at `bytes_per_s`."""

    bytes_per_s: float
    fixed_s: float = 0.0
    complete: bool = True
    """False where the points cannot tell the bandwidth from the other traffic: `bytes_per_s` is what is left for KV."""

    def tokens_per_s(self, bytes_per_token: Any) -> Any:
        return 1.0 / (self.fixed_s + np.asarray(bytes_per_token, dtype=float) / self.bytes_per_s)


def fit_ceiling(rows: pd.DataFrame, tier: Tier, batch_size: float) -> Ceiling | None:
    """The ceiling that the points of a case state for a tier, at one batch size; None where no point uses it.

    Solves 1/ceiling = shared/batch + bytes/bandwidth (what a batch shares, the weights, is read once). Where the points
    lie on no such plane (block size or placement change a link's speed), or are too few, the largest bytes x ceiling
    among them is the bandwidth: exact for links, which carry nothing but KV.
    """
    moved, ceiling, batch = (rows[c] for c in (tier.bytes_column, tier.ceiling_column, "workload.batch_size"))
    valid = (moved > 0) & (ceiling > 0) & (batch > 0)
    if not valid.any():
        return None
    moved_bytes, seconds = moved[valid].to_numpy(dtype=float), 1.0 / ceiling[valid].to_numpy(dtype=float)
    design = np.column_stack([moved_bytes, 1.0 / batch[valid].to_numpy(dtype=float)])
    scale = design.max(axis=0)
    solution, _, rank, _ = np.linalg.lstsq(design / scale, seconds, rcond=None)
    slope, shared_s = solution / scale
    residual = np.abs(design @ (slope, shared_s) - seconds) / seconds
    if rank == 2 and slope > 0 and residual.max() < 1e-3 and shared_s * design[:, 1].max() > -1e-6 * seconds.max():
        fixed_s = shared_s / batch_size
        return Ceiling(1.0 / slope, fixed_s if fixed_s > 1e-6 * seconds.min() else 0.0)
    return Ceiling(float((moved_bytes / seconds).max()), complete=not tier.carries_weights)


def tier_ceilings(rows: pd.DataFrame, batch_size: float) -> list[tuple[Tier, Ceiling]]:
    """Ceilings of the tiers in use at a batch size."""
    found = [(tier, fit_ceiling(rows, tier, batch_size)) for tier in TIERS]
    return [(tier, ceiling) for tier, ceiling in found if ceiling is not None]


@style.styled
def draw_roofline(case: Case) -> Figure:
    """Each system's best point on every tier that it uses. Raises `NotDrawn` without bytes or ceilings."""
    points = best_by_system(case)
    lead = best_buildable(case)
    reference = points.iloc[0] if lead is None else lead
    batch = reference["workload.batch_size"]
    same_gpus = case.ok["placement.num_gpus"] == reference["placement.num_gpus"]
    ceilings = tier_ceilings(case.ok[same_gpus], batch)
    if not ceilings:
        raise NotDrawn("no point has both bytes per token and a ceiling for HBM or a link")
    looks = style.system_looks(case.systems)
    two_lines = len(points) <= MAX_TWO_LINE_LABELS
    body_in = max(3.9, 0.2 * len(points))
    figure = Figure(figsize=(style.WIDTH_IN, body_in + 1.5), dpi=style.DPI)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log")
    tiers = [tier for tier, _ in ceilings]
    used = [_tier_points(point, tiers) for _, point in points.iterrows()]
    xs = [x for per_tier in used for x, _ in per_tier.values()]
    if not xs:
        raise NotDrawn("no best point moves a byte of KV")
    low, high = min(xs) / 1.8, max(xs) * 1.6
    for (_, point), per_tier in zip(points.iterrows(), used, strict=True):
        _draw_system(axes, point, per_tier, looks[str(point["system"])], case.objective, high)
    grid = np.geomspace(low, high, 200)
    for tier, ceiling in ceilings:
        axes.plot(
            grid, ceiling.tokens_per_s(GB / grid), tier.linestyle, color=tier.color, lw=1.6, zorder=2, gid=tier.name
        )
    values = [*points[case.objective], *(own for per_tier in used for _, own in per_tier.values() if own == own)]
    axes.set_xlim(low, high)
    axes.set_ylim(min(values) / 1.5, max(values) * 1.5)
    axes.grid(True, which="major")
    axes.set_xlabel("tokens per GB of KV moved over the tier (1 / bytes per token)")
    axes.set_ylabel(style.label(case.objective))
    axes.yaxis.set_major_formatter(lambda v, _: style.number(v))
    axes.xaxis.set_major_formatter(lambda v, _: style.value_text(float(v)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_locator(NullLocator())
    _label_systems(axes, points, looks, case.objective, used, (0.32 if two_lines else 0.17) / body_in, two_lines)
    handles = [
        Line2D([], [], color=t.color, ls=t.linestyle, lw=1.6, label=_ceiling_label(t, c, batch)) for t, c in ceilings
    ]
    notes = [
        "A system's markers lie at one height, one per tier it uses; the short bar above a marker is what that tier "
        "alone would allow this very point (its batch, block size and placement).",
    ]
    if not points["admissible"].all():
        notes.append("* no point of the system keeps the recall threshold; its nearest is shown.")
    if missing := left_out(case):
        notes.append("Not drawn: " + ", ".join(missing) + ".")
    style.frame_figure(figure, _title(lead, tiers, case.objective), case.subtitle, notes, handles, 2)
    return figure


def _tier_points(point: pd.Series[Any], tiers: list[Tier]) -> dict[str, tuple[float, float]]:
    """Tier name to (tokens per GB, the point's own ceiling) for the tiers over which the point moves KV."""
    return {
        tier.name: (GB / point[tier.bytes_column], point[tier.ceiling_column])
        for tier in tiers
        if pd.notna(point[tier.bytes_column]) and point[tier.bytes_column] > 0
    }


def _draw_system(
    axes: Axes,
    point: pd.Series[Any],
    per_tier: dict[str, tuple[float, float]],
    look: style.Look,
    objective: str,
    edge: float,
) -> None:
    y = float(point[objective])
    colors = {tier.name: tier.color for tier in TIERS}
    positions = [x for x, _ in per_tier.values()]
    if not positions:
        return
    axes.plot(positions, [y] * len(positions), color=look.color, lw=1.0, alpha=0.55, zorder=3)
    axes.plot([max(positions), edge], [y, y], color=look.color, lw=0.9, ls=(0, (1, 2)), zorder=2)
    for name, (x, own) in per_tier.items():
        if own == own:
            axes.plot([x, x], [y, own], color=colors[name], lw=0.7, alpha=0.6, zorder=2)
            axes.plot([x], [own], marker="_", ms=11, mew=1.8, color=colors[name], zorder=4, ls="none")
        face = look.color if look.filled else "white"
        axes.plot(
            [x],
            [y],
            marker=look.marker,
            ms=8,
            mfc=face,
            mec=look.color,
            mew=1.4,
            ls="none",
            zorder=5,
            gid=f"{point['system']}|{name}",
        )


def _label_systems(
    axes: Axes,
    points: pd.DataFrame,
    looks: dict[str, style.Look],
    objective: str,
    used: list[dict[str, tuple[float, float]]],
    gap: float,
    two_lines: bool,
) -> None:
    """Names beside the right edge, kept apart, each led to its row of markers."""
    low, high = np.log(axes.get_ylim())
    targets = [float((np.log(y) - low) / (high - low)) for y in points[objective]]
    places = style.spread(targets, gap=gap, low=0.03, high=0.97)
    blended = transforms.blended_transform_factory(axes.transAxes, axes.transAxes)
    batches = points["workload.batch_size"]
    for (_, point), per_tier, target, place in zip(points.iterrows(), used, targets, places, strict=True):
        look = looks[str(point["system"])]
        axes.plot(
            [1.005, 1.03, 1.045], [target, place, place], color=look.color, lw=0.9, transform=blended, clip_on=False
        )
        star = "" if point["admissible"] else " *"
        shares = [
            f"{style.percent(point[objective] / own)} of {name}" for name, (_, own) in per_tier.items() if own == own
        ]
        batch = f" · batch {style.value_text(point['workload.batch_size'])}" if batches.nunique() > 1 else ""
        bound_only = " (a bound)" if is_bound_only(str(point["system"])) else ""
        text = (
            f"{point['system']}{star}{bound_only}{batch}\n{style.number(point[objective])} tok/s · {', '.join(shares)}"
        )
        if not two_lines:
            text = f"{point['system']}{star}{bound_only}{batch}  {style.number(point[objective])} tok/s"
        axes.text(1.052, place, text, transform=blended, va="center", fontsize=7.5, color=style.INK, linespacing=1.2)


def _ceiling_label(tier: Tier, ceiling: Ceiling, batch: Any) -> str:
    weights = f", weights read once per batch of {style.value_text(batch)}" if ceiling.fixed_s > 0 else ""
    if not ceiling.complete:
        weights = " left for KV beside the weights"
    return f"{tier.name} ceiling, {style.bytes_per_s(ceiling.bytes_per_s)}{weights}"


def _title(lead: pd.Series[Any] | None, tiers: list[Tier], objective: str) -> str:
    if lead is None:
        return "No system keeps the recall threshold; the nearest points against their ceilings"
    shares = [
        f"{style.percent(lead[objective] / lead[tier.ceiling_column])} of its {tier.name}"
        for tier in tiers
        if pd.notna(lead[tier.ceiling_column]) and lead[tier.ceiling_column] > 0
    ]
    reach = f"{', '.join(shares)} ceiling" if shares else "no ceiling is known for it"
    return f"{lead['system']} reaches {style.number(lead[objective])} tok/s: {reach}"
