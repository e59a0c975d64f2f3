"""The report page of serving runs: who keeps the promises to which rate, the pictures, a table of all points."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import pandas as pd

from analysis import page, style
from analysis.kept_rates import KEPT, RATE, kept_rates, overload_line
from analysis.load import Run
from analysis.selection import swept_parameters
from analysis.serving_files import best_points, short
from analysis.serving_plots import as_rows, subtitle

MOST_NAMED = 6
TABLE_METRICS = (
    ("slo_attainment", "in SLO (%)", 100.0),
    ("goodput_requests_per_s", "goodput (requests/s)", 1.0),
    ("offered_tokens_per_s", "offered tok/s", 1.0),
    ("throughput_tokens_per_s", "tok/s", 1.0),
    ("served_share", "kept up (%)", 100.0),
    ("drain_s", "drained for (s)", 1.0),
    ("ttft_p50_s", "TTFT p50 (s)", 1.0),
    ("ttft_p99_s", "p99 (s)", 1.0),
    ("tpot_p50_s", "TPOT p50 (ms)", 1e3),
    ("tpot_p99_s", "p99 (ms)", 1e3),
    ("itl_p99_s", "ITL p99 (ms)", 1e3),
    ("e2e_p99_s", "E2E p99 (s)", 1.0),
    ("queue_p99_s", "queue p99 (s)", 1.0),
    ("batch_mean", "batch, mean", 1.0),
    ("num_preemptions", "preemptions", 1.0),
    ("num_refused", "refused", 1.0),
    ("recall", "recall", 1.0),
    ("kv_pool_utilization_peak", "KV pool, peak (%)", 100.0),
    ("host_bytes_peak", "host (GB)", 1e-9),
)
"""Column, heading with unit, factor from the stored unit."""


def render(run: Run, pictures: Sequence[page.Picture], skipped: Sequence[tuple[str, str]]) -> str:
    """The whole page as HTML without any outside reference."""
    answer, *rest = explain(run)
    body = [f'<p class="quiet">{escape(subtitle(run))}</p>', f'<p class="answer"><b>{escape(answer)}</b></p>']
    body += [f"<p>{escape(' '.join(rest))}</p>"] if rest else []
    body += page.embedded(pictures, skipped)
    body.append("<h3>All points</h3>" + _table(run))
    return page.document(run, body)


def explain(run: Run) -> list[str]:
    """Sentences: the point with the most requests within the SLO, what binds it, how far each system goes."""
    ok = run.results[run.results["status"] == "ok"]
    if ok.empty:
        return ["No point ran: " + "; ".join(sorted({str(error) for error in run.results["error"]})) + "."]
    best = best_points(ok)
    first = ok.loc[best[0]]
    overload = overload_line(as_rows(ok))
    lines = [overload] if overload is not None and ok["overloaded"].eq(True).all() else []
    lines.append(
        f"Most requests within the SLO: {_named(run, ok, best)}, {style.number(first['goodput_requests_per_s'])} a "
        f"second ({style.percent(first['slo_attainment'])} of those that came)."
    )
    if overload is not None and not lines[0].startswith(overload):
        lines.append(overload)
    bound = style.BOUND_NAMES.get(str(first["bound"]), "")
    if bound:
        lines.append(f"What binds {'it' if len(best) == 1 else 'the first'}: {bound} ({first['bound_detail']}).")
    if RATE in ok and ok[RATE].nunique() > 1:
        lines.append(_rates(ok))
    if ok["num_preemptions"].any():
        lines.append(
            "The SLO looks at TTFT and the mean TPOT of a request: a preemption is spread over all of its tokens; the "
            "stop itself is in E2E."
        )
    refused = ok.iloc[int(ok["num_refused"].to_numpy().argmax())]
    if refused["num_refused"]:
        lines.append(f"{refused['num_refused']:,.0f} requests can never fit under {_described(run, refused)}, the "
                     f"first is {refused['first_refused']}.")  # fmt: skip
    failed = run.results[run.results["status"] != "ok"]
    if len(failed):
        lines.append(
            f"{len(failed)} point(s) did not run: " + "; ".join(sorted(set(failed["error"].astype(str)))) + "."
        )
    return lines


def _rates(ok: pd.DataFrame) -> str:
    """Per system the highest rate up to which it keeps the SLO at every rate that ran."""
    reached = (
        f"{system} at none" if rate is None else f"{system} up to {rate:g}"
        for system, rate in kept_rates(as_rows(ok)).items()
    )
    return (
        f"{KEPT:.0%} of requests are within the SLO and the rate is kept up with, in arrivals per second: "
        f"{', '.join(reached)}."
    )


def _named(run: Run, ok: pd.DataFrame, indices: Sequence[Any]) -> str:
    names = [_described(run, ok.loc[index]) for index in indices[:MOST_NAMED]]
    if len(indices) == 1:
        return names[0]
    more = f"; and {len(indices) - MOST_NAMED} more" if len(indices) > MOST_NAMED else ""
    return f"{len(indices)} points alike ({'; '.join(names)}{more})"


def _described(run: Run, point: pd.Series[Any]) -> str:
    varied = [c for c in swept_parameters(run.results) if c != "system" and pd.notna(point[c])]
    given = ", ".join(f"{short(c)} {style.value_text(point[c])}" for c in varied)
    return str(point["system"]) + (f" at {given}" if given else "")


def _table(run: Run) -> str:
    rows = run.results.head(page.MAX_TABLE_ROWS)
    swept = [c for c in swept_parameters(run.results) if c != "system"]
    metrics = [metric for metric in TABLE_METRICS if metric[0] in rows]
    headings = ["system", *map(short, swept), *(heading for _, heading, _ in metrics), "bound", "status"]
    lines = ["<table><tr>" + "".join(f"<th>{escape(h)}</th>" for h in headings) + "</tr>"]
    ok = rows[rows["status"] == "ok"]
    best = [] if ok.empty else best_points(ok)
    for index, row in rows.iterrows():
        cells = [str(row["system"]), *(style.value_text(row[c]) for c in swept)]
        cells += [
            style.value_text(row[c]) if c.startswith("num_") else style.number(row[c] * factor)
            for c, _, factor in metrics
        ]
        status = (
            ("overloaded" if row["overloaded"] in (True,) else "ok")
            if row["status"] == "ok"
            else style.STATUS_TEXT[str(row["status"])]
        )
        cells += [str(row["bound"]) if isinstance(row["bound"], str) else "–", status]
        kind = "best" if index in best else "" if row["status"] == "ok" else "off"
        lines.append(f'<tr class="{kind}">' + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>")
    return "\n".join(lines) + "</table>"
