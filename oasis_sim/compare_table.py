"""The table that `oasis-sim compare` prints, for a reader who has not met these systems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.padding import Padding
from rich.table import Table

from oasis_sim.explain import Row, binding, exposure, label, recall_verdict, settings, value
from oasis_sim.output import console, milliseconds, number
from oasis_sim.request import Request
from oasis_sim.run_card import trace_line
from simulator.objective import is_admissible, score, swept_parameters
from simulator.systems import get_system

BASELINE = "dense"
_OWN_COLUMNS = ("system", "mapping", "trace_group", "seed", "workload.batch_size")


def print_comparison(
    rows: Sequence[Row],
    chosen: Sequence[Row],
    best: Row | None,
    left_out: Mapping[str, str],
    request: Request,
    folder: Path,
    pictures: Sequence[Path],
) -> None:
    """One line per system at its best point, best first; then what the best one is, and who is not in the table."""
    out = console()
    first = next((row for row in rows if row["status"] == "ok" and row.get("mapping")), rows[0])
    out.print(f"[bold]{first['model']} on {first['hardware']}[/bold], {trace_line(first)}")
    tried = [name for name in swept_parameters(rows) if name not in _OWN_COLUMNS or name == "workload.batch_size"]
    fixed = [name for name in ("workload.context_tokens", "policy.kv_budget_tokens") if name not in tried]
    choice = f"at the best of its {', '.join(map(label, tried))}" if tried else "as it is: nothing to choose from"
    out.print(f"{settings(first, fixed)}; each system {choice}", style="dim")
    out.print()
    out.print(_table(rows, chosen, best, request.maximize))
    out.print()
    if best is None:
        out.print("[bold red]No system keeps enough recall here.[/bold red]")
    else:
        out.print(f"[bold]Best: {best['system']}[/bold], {get_system(best['system']).description}")
        for line in (binding(best), exposure(best), recall_verdict(best)):
            out.print(Padding(line, (0, 0, 0, 2), expand=False))
    notes = [
        "Recall: share of the attention mass that attention reads. Grey: it keeps too little of it, so it is no choice."
    ]
    if "workload.batch_size" in tried:
        notes.append("Batches differ: each system takes its best one. --batch-size N holds all to the same.")
    if best is not None and get_system(best["system"]).policy.get("residency") == "drop":
        notes.append(
            f"{best['system']} drops KV for good. Its recall is that of this trace's own queries; it says nothing of "
            "a later question on what was dropped."
        )
    for line in (*notes, *(f"{system} is left out: {reason}" for system, reason in left_out.items())):
        out.print(line, style="dim")
    shown = "".join(f"; picture: {path}" for path in pictures)
    out.print(f"All {len(rows)} points: [bold]{folder}[/bold]{shown}")


def _table(rows: Sequence[Row], chosen: Sequence[Row], best: Row | None, maximize: str) -> Table:
    ran = sorted((row for row in chosen if row["status"] == "ok"), key=lambda row: -(score(row, maximize) or 0.0))
    baseline = next((row for row in ran if row["system"] == BASELINE), None)
    shown = [
        name
        for name in swept_parameters(rows)
        if name not in _OWN_COLUMNS and any(row[name] is not None for row in ran)
    ]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("system", no_wrap=True)
    for title in ("tokens/s", "×\ndense", "TPOT\nms", "recall", "batch", "HBM\nGB", "host\nGB", "link\nMB/token"):
        if title != "×\ndense" or baseline is not None:
            table.add_column(title, justify="right", no_wrap=True)
    table.add_column("bound\nby", no_wrap=True)
    table.add_column("its own settings")
    for row in ran:
        times = [] if baseline is None else [f"{row['throughput_tokens_per_s'] / _speed(baseline):.2f}"]
        table.add_row(
            "★" if row is best else "",
            row["system"],
            number(row["throughput_tokens_per_s"]),
            *times,
            milliseconds(row["tpot_mean_s"]).removesuffix(" ms"),
            "–" if row["recall"] is None else f"{row['recall']:.3f}",
            value(row, "workload.batch_size"),
            f"{row['hbm_bytes_peak'] / 1e9:,.0f}",
            f"{row['host_bytes_peak'] / 1e9:,.0f}" if row["host_bytes_peak"] else "–",
            f"{row['h2d_bytes_per_token'] / 1e6:.1f}" if row["h2d_bytes_per_token"] else "–",
            _BOUNDS.get(row["bound"], row["bound"]),
            ", ".join(f"{_SHORT.get(name, label(name))} {value(row, name)}" for name in shown if row[name] is not None),
            style="bold green" if row is best else "" if is_admissible(row) else "dim",
        )
    for row in chosen:
        if row["status"] != "ok":
            fits = "does not fit" if row["status"] == "does_not_fit" else "failed"
            table.add_row("", row["system"], fits, style="dim")
    return table


_SHORT = {"policy.fetch_cap": "cap", "policy.lookahead_k": "k", "policy.block_size_tokens": "block"}
_BOUNDS = {"h2d": "link", "remote": "remote", "capacity": "memory", "software": "CPU", "hbm": "HBM"}


def _speed(row: Row) -> float:
    return float(row["throughput_tokens_per_s"])
