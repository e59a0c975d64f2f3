"""The card that `oasis-sim run` prints."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oasis_sim.explain import Row, binding, exposure, recall_verdict, settings
from oasis_sim.output import console, gigabytes, megabytes, milliseconds, number, share
from simulator.metrics import BREAKDOWN
from simulator.specs.experiment import ExperimentSpec

BAR_CELLS = 40
SHOWN_PARAMETERS = [
    "workload.batch_size",
    "workload.context_tokens",
    "policy.kv_budget_tokens",
    "policy.block_size_tokens",
    "policy.fetch_cap",
    "policy.lookahead_k",
    "placement.host_numa",
]


def print_card(row: Row, point: ExperimentSpec, folder: Path, again: str) -> None:
    """One point for a person: what it is, how fast, what binds, where its time goes, what it occupies."""
    out = console()
    out.print(f"[bold]{row['system']}[/bold] · {row['model']} · {row['hardware']} · {trace_line(row)}")
    out.print(settings(row, SHOWN_PARAMETERS), style="dim")
    out.print()
    out.print(
        f"[bold green]{number(row['throughput_tokens_per_s'], 'tokens/s')}[/bold green], TPOT "
        f"{milliseconds(row['tpot_mean_s'])} (p50 {milliseconds(row['tpot_p50_s'])}, "
        f"p99 {milliseconds(row['tpot_p99_s'])})"
    )
    threshold = "" if point.objective.min_recall is not None else " (uncapped on-demand − 0.01, an assumption)"
    for line in (binding(row), exposure(row), recall_verdict(row) + threshold):
        out.print(Padding(line, (0, 0, 0, 2), expand=False))
    out.print(
        f"  hit rate {share(row['hit_rate'])}, overlap {share(row['overlap'])}, churn {share(row['churn'])} of K a step"
    )
    out.print(
        f"  per token: {megabytes(row['h2d_bytes_per_token'])} in, {megabytes(row['d2h_bytes_per_token'])} out; "
        f"HBM {gigabytes(row['hbm_bytes_peak'])}, host {gigabytes(row['host_bytes_peak'])}; "
        f"largest batch {number(row['max_batch_size'])}"
    )
    if row["draft_overhead_s"]:
        out.print(f"  {speculation(row)}")
    out.print()
    out.print(breakdown_table(row))
    out.print(f"written to {folder}; next: [bold]{escape(again)}[/bold]", soft_wrap=True)


def speculation(row: Row) -> str:
    """What drafts gain and what they cost."""
    cost = f"drafting and its rows add {milliseconds(row['draft_overhead_s'])} of kernels to a step"
    if not row.get("policy.verify_drafts"):
        return cost
    step = milliseconds(row["iteration_s"])
    return f"{number(row['tokens_per_iteration'])} tokens per iteration of {step}; {cost}"


def trace_line(row: Row) -> str:
    group = f"/{row['trace_group']}" if row.get("trace_group") else ""
    mapping = f" (mapping {row['mapping']})" if row.get("mapping") else ""
    return f"{row['trace']}{group}{mapping}"


def breakdown_table(row: Row) -> Table:
    """Where a step's time goes, largest first; parts of zero are left out."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    parts = sorted(((row[name] or 0.0, name) for name in BREAKDOWN), reverse=True)
    for seconds, name in parts:
        if seconds <= 0.0:
            continue
        fraction = seconds / row["tpot_mean_s"]
        bar = Text("█" * max(1, round(fraction * BAR_CELLS)), style="red" if name == "t_exposed_wait_s" else "cyan")
        title = name.removeprefix("t_").removesuffix("_s").replace("_", " ")
        table.add_row(f"  {title}", milliseconds(seconds), share(fraction), bar)
    return table
