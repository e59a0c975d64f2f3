"""What `oasis-sim run` and `sweep` print about serving runs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from analysis.kept_rates import overload_line
from oasis_sim.explain import Row, binding, label, settings, value
from oasis_sim.output import console, gigabytes, milliseconds, number, share
from oasis_sim.run_card import breakdown_table, trace_line
from simulator.objective import swept_parameters
from simulator.specs.experiment import ExperimentSpec

SHOWN_PARAMETERS = [
    "placement.tensor_parallel",
    "placement.num_gpus",
    "policy.kv_budget_tokens",
    "policy.block_size_tokens",
    "policy.fetch_cap",
    "policy.lookahead_k",
]
LATENCIES = {
    "ttft": "time to first token",
    "second_token": "time to second token",
    "tpot": "time per output token",
    "itl": "between two tokens",
    "e2e": "end to end",
    "queue": "queue",
    "handover": "prefilled to decoding",
}
ONLY_APART = ("second_token", "handover")
"""Shown where prefill is on other hosts."""
NEVER_COLUMNS = {"system", "mapping", "trace_group"}


def print_card(row: Row, point: ExperimentSpec, folder: Path, again: str) -> None:
    """One serving run for a person: who was served how fast, what binds, what it occupies."""
    out = console()
    serving = point.serving
    assert serving is not None, "not a serving run"
    out.print(f"[bold]{row['system']}[/bold] · {row['model']} · {row['hardware']} · {trace_line(row)}")
    out.print(settings(row, SHOWN_PARAMETERS), style="dim")
    out.print(
        f"{source(point)}, {serving.scheduler}, {serving.max_num_batched_tokens:,} tokens an iteration", style="dim"
    )
    out.print()
    out.print(
        f"[bold green]{number(row['throughput_tokens_per_s'], 'tokens/s')}[/bold green], "
        f"{number(row['requests_per_s'], 'requests/s')} over {number(row['duration_s'], 's')}; within "
        f"{serving.slo_ttft_s:g} s to the first token and {serving.slo_tpot_s * 1e3:g} ms per token: "
        f"{share(row['slo_attainment'])}, goodput {number(row['goodput_requests_per_s'], 'requests/s')}",
        soft_wrap=True,
    )
    overload = overload_line([row])
    if overload is not None:
        out.print(f"[bold yellow]{overload}[/bold yellow]", soft_wrap=True)
    out.print()
    out.print(latency_table(row))
    out.print()
    out.print(f"  {binding(row)}", soft_wrap=True)
    out.print(
        f"  batch {number(row['batch_mean'])} on average, {number(row['batch_peak'])} at most; in the system "
        f"{number(row['in_system_mean'])}; {number(row['num_iterations'])} iterations of "
        f"{milliseconds(row['iteration_mean_s'])}"
    )
    out.print(
        f"  HBM {gigabytes(row['hbm_bytes_peak'])} a GPU at most (KV pool {share(row['kv_pool_utilization_peak'])} "
        f"full), host {gigabytes(row['host_bytes_peak'])}; {number(row['num_preemptions'])} preemptions, "
        f"{number(row['recomputed_tokens'])} tokens prefilled again",
        soft_wrap=True,
    )
    if row["prefix_hit_share"] is not None:
        out.print(
            f"  prefix cache: {share(row['prefix_hit_share'])} of prompt blocks hit "
            f"({share(row['prefix_host_hit_share'])} on the host), {number(row['prefix_reused_tokens'])} tokens not "
            f"prefilled, {gigabytes(row['prefix_loaded_bytes'])} loaded",
            soft_wrap=True,
        )
    if row["network_bytes_per_request"] is not None:
        out.print(
            f"  prefill side: GPUs busy {share(row['prefill_gpu_utilization'])}, without memory for "
            f"{seconds(row['prefill_blocked_s'])}, {gigabytes(row['prefill_staging_bytes_peak'])} staged at most; "
            f"network: {gigabytes(row['admission_network_bytes'])} before decoding, "
            f"{gigabytes(row['network_bytes_per_request'])} a request, busy {share(row['network_utilization'])}, "
            f"peak {gigabytes(row['network_peak_bytes_per_s'])}/s in 0.1 s",
            soft_wrap=True,
        )
    if row["num_refused"]:
        out.print(
            f"  [yellow]{number(row['num_refused'])} requests can never fit and were refused[/yellow], "
            f"the first: {row['first_refused']}"
        )
    out.print()
    out.print("Where an iteration's time goes:")
    out.print(breakdown_table({**row, "tpot_mean_s": row["iteration_mean_s"]}))
    out.print(
        f"written to {shlex.quote(str(folder))} (requests.parquet: every request); next: [bold]{escape(again)}[/bold]",
        soft_wrap=True,
    )


def source(point: ExperimentSpec, swept: Sequence[str] = ()) -> str:
    """Where the requests come from, in words, without what a sweep varies."""
    serving = point.serving
    assert serving is not None, "not a serving run"
    what = Path(serving.requests).name if serving.requests is not None else f"{serving.lengths} lengths"
    if serving.requests is None and serving.prompt_tokens and serving.output_tokens:
        what = f"{serving.prompt_tokens:,} prompt and {serving.output_tokens:,} output tokens"
    rate = f" at {serving.rate_per_s:g}/s" if serving.rate_per_s and "serving.rate_per_s" not in swept else ""
    return f"requests of {what}, arrivals {serving.arrival_process}{rate}"


def latency_table(row: Row) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("  latency", "mean", "p50", "p90", "p99"):
        table.add_column(title, justify="left" if title.strip() == "latency" else "right")
    for name, title in LATENCIES.items():
        if name in ONLY_APART and row["handover_mean_s"] is None:
            continue
        table.add_row(f"  {title}", *(seconds(row[f"{name}_{column}_s"]) for column in ("mean", "p50", "p90", "p99")))
    return table


def seconds(value_s: float | None) -> str:
    return milliseconds(value_s) if value_s is None or value_s < 1.0 else f"{value_s:,.2f} s"


def print_table(out: Console, rows: Sequence[Row]) -> None:
    """One line per point of a sweep, and below it which of them were asked for more than they can serve."""
    for left_out in _LEFT_OUT:
        table = serving_table(rows, left_out)
        if Measurement.get(out, out.options.update(max_width=1000), table).maximum <= out.width:
            break
    out.print(table)
    overload = overload_line([row for row in rows if row["status"] == "ok"])
    if overload is not None:
        out.print(f"[bold yellow]{overload}[/bold yellow]", soft_wrap=True)


_LEFT_OUT: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset({"ITL p99"}),
    frozenset({"ITL p99", "batch"}),
    frozenset({"ITL p99", "batch", "TPOT p99"}),
    frozenset({"ITL p99", "batch", "TPOT p99", "preempt.", "TTFT p50"}),
    frozenset({"ITL p99", "batch", "TPOT p99", "preempt.", "TTFT p50", "offered"}),
    frozenset({"ITL p99", "batch", "TPOT p99", "preempt.", "TTFT p50", "offered", "kept up"}),
    frozenset({"ITL p99", "batch", "TPOT p99", "preempt.", "TTFT p50", "offered", "kept up", "TTFT p99"}),
)
"""What a narrow terminal does without, step by step."""


def serving_table(rows: Sequence[Row], left_out: Collection[str] = ()) -> Table:
    """What differs, and the figures that a service is judged by; of prefill elsewhere what crosses and what it costs
    before the second token."""
    ok = [row for row in rows if row["status"] == "ok"]
    results: dict[str, Callable[[Row], str]] = {
        "offered": lambda row: number(row["offered_tokens_per_s"]),
        "tokens/s": lambda row: number(row["throughput_tokens_per_s"]),
        "kept up": lambda row: share(row["served_share"]),
        "in SLO": lambda row: share(row["slo_attainment"]),
        "TTFT p50": lambda row: seconds(row["ttft_p50_s"]),
        "TTFT p99": lambda row: seconds(row["ttft_p99_s"]),
        "TPOT p50": lambda row: seconds(row["tpot_p50_s"]),
        "TPOT p99": lambda row: seconds(row["tpot_p99_s"]),
        "ITL p99": lambda row: seconds(row["itl_p99_s"]),
        "batch": lambda row: number(row["batch_mean"]),
        "preempt.": lambda row: number(row["num_preemptions"]),
    }
    if any(row["network_bytes_per_request"] is not None for row in ok):
        results |= {
            "sent first": lambda row: gigabytes(row["admission_network_bytes"]),
            "sent all": lambda row: gigabytes(row["network_bytes_per_request"]),
            "handover p50": lambda row: seconds(row["handover_p50_s"]),
            "2nd token": lambda row: seconds(row["second_token_p50_s"]),
        }
    if all(row["served_share"] is None for row in ok):
        left_out = {*left_out, "offered", "kept up"}
    results = {title: text for title, text in results.items() if title not in left_out}
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    swept = [name for name in swept_parameters(rows) if name not in NEVER_COLUMNS]
    table.add_column("system", no_wrap=True)
    for title in (*map(label, swept), *results):
        table.add_column(title.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for row in rows:
        parameters = [value(row, name) for name in swept]
        if row["status"] != "ok":
            table.add_row(row["system"], *parameters, row["status"].replace("_", " "), style="dim")
            continue
        table.add_row(row["system"], *parameters, *(text(row) for text in results.values()))
    return table
