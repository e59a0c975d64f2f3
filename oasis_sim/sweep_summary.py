"""The summary that `oasis-sim sweep` prints: best of each system, the best point and why, what its neighbours cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from oasis_sim.explain import Row, binding, exposure, label, recall_verdict, settings, value
from oasis_sim.output import console, milliseconds, number
from oasis_sim.request import Request
from oasis_sim.run_card import trace_line
from simulator.objective import best_by_system, best_row, is_admissible, nearest_row, neighbours, swept_parameters
from simulator.specs.experiment import ExperimentSpec

NEVER_COLUMNS = {"system", "mapping", "trace_group", "seed"}
"""The system has its own column; the others follow from the trace and the model or change nothing by themselves."""


def print_summary(rows: Sequence[Row], request: Request, folder: Path, wall_s: float) -> None:
    out = console()
    counts = {status: sum(row["status"] == status for row in rows) for status in ("ok", "does_not_fit", "failed")}
    left_out = [f"{counts[status]} {text}" for status, text in _LEFT_OUT.items() if counts[status]]
    out.print(f"[bold]{len(rows)} points[/bold] in {wall_s:.1f} s" + (f" ({', '.join(left_out)})" if left_out else ""))
    _print_constants(out, rows)
    out.print(_system_table(rows, request.maximize))
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
        pad_edge=False,
        padding=(0, 2, 0, 0),
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
    )


def _system_table(rows: Sequence[Row], maximize: str) -> Table:
    parameters = [name for name in swept_parameters(rows) if name not in NEVER_COLUMNS]
    table = _table("Best point of each system")
    table.add_column("", no_wrap=True)
    table.add_column("system", no_wrap=True)
    for name in parameters:
        table.add_column(label(name), justify="right", overflow="fold")
    for title in ("tokens/s", "TPOT", "exposed", "recall", "needs"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    best = best_row(rows, maximize)
    for row in best_by_system(rows, maximize):
        if row["status"] != "ok":
            given = [value(row, name) for name in parameters]
            table.add_row(
                "", row["system"], *given, "–", "–", "–", "–", "–", row["status"].replace("_", " "), style="dim"
            )
            continue
        table.add_row(
            "★" if row is best else "",
            row["system"],
            *(value(row, name) for name in parameters),
            number(row["throughput_tokens_per_s"]),
            milliseconds(row["tpot_mean_s"]),
            milliseconds(row["exposed_transfer_s"]),
            "–" if row["recall"] is None else f"{row['recall']:.3f}",
            "–" if row["min_recall"] is None else f"{row['min_recall']:.3f}",
            str(row["bound"]),
            style="bold green" if row is best else "" if is_admissible(row) else "dim",
        )
    return table


def _print_best(out: Console, rows: Sequence[Row], best: Row, point: ExperimentSpec) -> None:
    swept = [name for name in swept_parameters(rows) if name not in NEVER_COLUMNS]
    out.print(f"[bold]Best: {best['system']}[/bold], {settings(best, swept)}".rstrip(", "))
    origin = (
        "as set" if point.objective.min_recall is not None else "uncapped on-demand retrieval − 0.01, an assumption"
    )
    for line in (binding(best), exposure(best), f"{recall_verdict(best)} (threshold: {origin})"):
        out.print(f"  {line}")
    beside = neighbours(rows, best)
    if beside:
        out.print(_neighbour_table(best, [(item.parameter, item.row) for item in beside]))


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
