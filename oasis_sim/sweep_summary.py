"""The summary that `oasis-sim sweep` prints: best of each system, the best point and why, what its neighbours cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table

from analysis.falling_recall import recall_that_falls
from oasis_sim.explain import Row, binding, exposure, label, recall_verdict, settings, value
from oasis_sim.output import console, milliseconds, number
from oasis_sim.request import Request
from oasis_sim.run_card import trace_line
from simulator.objective import (
    RECALL_MARGIN,
    best_by_system,
    best_row,
    grid_edges,
    is_admissible,
    nearest_row,
    neighbours,
    swept_parameters,
)
from simulator.specs.experiment import ExperimentSpec
from simulator.systems import SYSTEMS

NEVER_COLUMNS = {"system", "mapping", "trace_group", "seed"}
"""The system has its own column; the others follow from the trace and the model or change nothing by themselves."""


def print_summary(rows: Sequence[Row], request: Request, folder: Path, wall_s: float) -> None:
    out = console()
    counts = {status: sum(row["status"] == status for row in rows) for status in ("ok", "does_not_fit", "failed")}
    left_out = [f"{counts[status]} {text}" for status, text in _LEFT_OUT.items() if counts[status]]
    out.print(f"[bold]{len(rows)} points[/bold] in {wall_s:.1f} s" + (f" ({', '.join(left_out)})" if left_out else ""))
    _print_constants(out, rows)
    out.print()
    if request.points[0].serving is not None:
        from oasis_sim.serving_card import print_table, source

        out.print(source(request.points[0], swept_parameters(rows)), style="dim")
        print_table(out, rows)
        out.print(
            f"Table and points: [bold]{folder}[/bold] (results.parquet, requests/ with every request of each point)"
        )
        return
    out.print(_system_table(out, rows, request.maximize))
    out.print()
    best = best_row(rows, request.maximize)
    if best is not None:
        _print_best(out, rows, best, request.points[0])
    else:
        _print_nearest(out, rows, request.maximize)
    out.print(f"Table and points: [bold]{folder}[/bold] (results.parquet, points.jsonl, config.yaml, manifest.json)")
    out.print(f"Pictures: [bold]oasis-sim plot {folder}[/bold]")


_LEFT_OUT = {"does_not_fit": "do not fit", "failed": "failed"}


def _print_constants(out: Console, rows: Sequence[Row]) -> None:
    """What all points share, so that the table need not repeat it."""
    swept = set(swept_parameters(rows))
    first = next((row for row in rows if row["status"] == "ok" and row.get("mapping")), rows[0])
    names = [first[name] for name in ("model", "hardware") if name not in swept and first.get(name)]
    if "trace" not in swept:
        names.append(trace_line(first))
    shared = ["workload.batch_size", "workload.context_tokens", "policy.kv_budget_tokens"]
    out.print(" · ".join(names), style="dim")
    out.print(settings(first, [name for name in shared if name not in swept]), style="dim")


def _table(title: str) -> Table:
    return Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        title=title,
        title_justify="left",
        title_style="bold",
    )


def _system_table(out: Console, rows: Sequence[Row], maximize: str) -> Table:
    """The table with as many of its columns as the terminal is wide enough for."""
    for left_out in ((), ("TPOT",), ("TPOT", "exposed"), ("TPOT", "exposed", "needs")):
        table = _full_system_table(rows, maximize, left_out)
        if Measurement.get(out, out.options.update(max_width=1000), table).maximum <= out.width:
            break
    return table


def _full_system_table(rows: Sequence[Row], maximize: str, left_out: Sequence[str]) -> Table:
    best = best_row(rows, maximize)
    parameters = [name for name in swept_parameters(rows) if name not in NEVER_COLUMNS]
    results: dict[str, Callable[[Row], str]] = {
        "tok/s": lambda row: number(row["throughput_tokens_per_s"]),
        "TPOT": lambda row: _milliseconds(row["tpot_mean_s"]),
        "exposed": lambda row: _milliseconds(row["exposed_transfer_s"]),
        "recall": lambda row: _three_digits(row["recall"]),
        "needs": lambda row: _three_digits(row["min_recall"]),
        "bound": lambda row: str(row["bound"]),
    }
    shown = {title: text for title, text in results.items() if title not in left_out}
    table = _table("Best point of each system")
    table.add_column("", no_wrap=True)
    table.add_column("system", no_wrap=True)
    for name in parameters:
        table.add_column(_TWO_LINES.get(label(name), label(name)), justify="right", no_wrap=True)
    for title in shown:
        table.add_column(_TWO_LINES.get(title, title), justify="left" if title == "bound" else "right", no_wrap=True)
    for row in best_by_system(rows, maximize):
        ran = row["status"] == "ok"
        cells = [text(row) if ran else "–" for text in shown.values()]
        if not ran:
            cells[-1] = row["status"].replace("_", " ")
        table.add_row(
            "★" if row is best else "",
            row["system"],
            *(value(row, name) for name in parameters),
            *cells,
            style="bold green" if row is best else "" if ran and is_admissible(row) else "dim",
        )
    return table


_TWO_LINES = {
    "fetch cap": "fetch\ncap",
    "lookahead": "look-\nahead",
    "TPOT": "TPOT\nms",
    "exposed": "exposed\nms",
    "needs": "recall\nneeded",
}


def _milliseconds(value_s: float | None) -> str:
    return milliseconds(value_s).removesuffix(" ms")


def _three_digits(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


_NATURAL_LIMITS = {("policy.fetch_cap", 1.0), ("policy.lookahead_k", 1), ("workload.batch_size", 1)}


def _print_best(out: Console, rows: Sequence[Row], best: Row, point: ExperimentSpec) -> None:
    swept = [name for name in swept_parameters(rows) if name not in NEVER_COLUMNS]
    out.print(f"[bold]Best: {best['system']}[/bold], {settings(best, swept)}".rstrip(", "))
    origin = (
        "as set" if point.objective.min_recall is not None else "uncapped on-demand retrieval − 0.01, an assumption"
    )
    for line in (binding(best), exposure(best), f"{recall_verdict(best)} (threshold: {origin})"):
        out.print(Padding(line, (0, 0, 0, 2), expand=False))
    edges = {
        name: side for name, side in grid_edges(rows, best).items() if (name, best.get(name)) not in _NATURAL_LIMITS
    }
    if edges:
        at = ", ".join(f"{label(name)} {value(best, name)} ({side})" for name, side in edges.items())
        out.print(Padding(f"at the edge of the grid: {at}; beyond it may lie better", (0, 0, 0, 2), expand=False))
    for line in cautions(rows, best, threshold_is_set=point.objective.min_recall is not None):
        out.print(Padding(line, (0, 0, 0, 2), expand=False))
    beside = neighbours(rows, best)
    if beside:
        out.print()
        out.print(_neighbour_table(best, [(item.parameter, item.row) for item in beside]))
    out.print()


def cautions(rows: Sequence[Row], best: Row, threshold_is_set: bool) -> list[str]:
    """What a reader should know before believing that the best point is best."""
    lines = []
    others = [name for name in swept_parameters(rows) if name != "policy.fetch_cap"]
    along_caps = [
        row
        for row in rows
        if row["status"] == "ok"
        and row["recall"] is not None
        and all(row.get(name) == best.get(name) for name in others)
    ]
    recalls = [row["recall"] for row in along_caps]
    if len(recalls) > 1 and max(recalls) - min(recalls) < 2 * RECALL_MARGIN:
        lines.append(
            f"recall moves by only {max(recalls) - min(recalls):.3f} over its fetch caps: this trace hardly tells them "
            "apart, so fetching least wins; oasis-sim quality measures what it costs"
        )
    selectors = {name: system.policy.get("selector", "minmax") for name, system in SYSTEMS.items()}
    if falls := recall_that_falls(along_caps, selectors):
        lines.append(falls)
    if "policy.block_size_tokens" in swept_parameters(rows) and not threshold_is_set:
        lines.append("each block size has its own threshold; --min-recall holds all to one")
    return lines


def _neighbour_table(best: Row, beside: Sequence[tuple[str, Row]]) -> Table:
    table = _table("One change away from it")
    table.add_column("change", overflow="fold")
    for title in ("tokens/s", "Δ", "recall", "Δ"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for parameter, row in beside:
        change = f"{label(parameter)} {value(best, parameter)} → {value(row, parameter)}"
        if row["status"] != "ok":
            table.add_row(change, "–", "–", "–", "–", row["status"].replace("_", " "), style="dim")
            continue
        gain = row["throughput_tokens_per_s"] / best["throughput_tokens_per_s"] - 1.0
        recall, recall_change = row["recall"], None
        if recall is not None and best["recall"] is not None:
            recall_change = recall - best["recall"]
        table.add_row(
            change,
            number(row["throughput_tokens_per_s"]),
            f"{gain * 100:+.1f} %",
            "–" if recall is None else f"{recall:.3f}",
            "–" if recall_change is None else f"{recall_change:+.3f}",
            "" if is_admissible(row) else f"recall below {row['min_recall']:.3f}",
            style="" if is_admissible(row) else "dim",
        )
    return table


def _print_nearest(out: Console, rows: Sequence[Row], maximize: str) -> None:
    nearest = nearest_row(rows, maximize)
    if nearest is None:
        reason = next((row["error"] for row in rows if row["error"]), "no point ran")
        out.print(f"[bold red]No point ran.[/bold red] First reason: {reason}")
        return
    swept = [name for name in swept_parameters(rows) if name not in NEVER_COLUMNS]
    out.print("[bold red]No point has enough recall.[/bold red] Nearest:")
    out.print(f"  {nearest['system']}, {settings(nearest, swept)}: {recall_verdict(nearest)}")
