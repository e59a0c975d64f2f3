"""The report page of serving runs: who keeps the promises to which rate, the pictures, a table of all points."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import pandas as pd

from analysis import page, style
from analysis.load import Run
from analysis.selection import swept_parameters
from analysis.serving_files import RATE, short
from analysis.serving_plots import subtitle

KEPT = 0.9
"""Share of requests within the SLO from which a system is said to keep it. A convention."""
TABLE_METRICS = (
    ("slo_attainment", "in SLO (%)", 100.0),
    ("goodput_requests_per_s", "goodput (requests/s)", 1.0),
    ("throughput_tokens_per_s", "tok/s", 1.0),
    ("ttft_p50_s", "TTFT p50 (s)", 1.0),
    ("ttft_p99_s", "p99 (s)", 1.0),
    ("tpot_p50_s", "TPOT p50 (ms)", 1e3),
    ("tpot_p99_s", "p99 (ms)", 1e3),
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
    best = ok.iloc[int(ok["goodput_requests_per_s"].to_numpy().argmax())]
    lines = [
        f"Most requests within the SLO: {_described(run, best)}, {style.number(best['goodput_requests_per_s'])} a "
        f"second ({style.percent(best['slo_attainment'])} of those that came)."
    ]
    bound = style.BOUND_NAMES.get(str(best["bound"]), "")
    if bound:
        lines.append(f"What binds it: {bound} ({best['bound_detail']}).")
    if RATE in ok and ok[RATE].nunique() > 1:
        lines.append(_rates(ok))
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
    reached = []
    for system, rows in ok.groupby("system", sort=False):
        by_rate = rows.groupby(RATE)["slo_attainment"].max()
        missed = by_rate[by_rate < KEPT]
        keeps = by_rate.index if missed.empty else by_rate.index[by_rate.index < missed.index.min()]
        reached.append(f"{system} up to {keeps.max():g}" if len(keeps) else f"{system} at none")
    return f"{KEPT:.0%} of requests are within the SLO, in arrivals per second: {', '.join(reached)}."


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
    goodput = rows["goodput_requests_per_s"]
    best = goodput.idxmax() if goodput.notna().any() else None
    for index, row in rows.iterrows():
        cells = [str(row["system"]), *(style.value_text(row[c]) for c in swept)]
        cells += [
            style.value_text(row[c]) if c.startswith("num_") else style.number(row[c] * factor)
            for c, _, factor in metrics
        ]
        status = str(row["status"]) if row["status"] == "ok" else style.STATUS_TEXT[str(row["status"])]
        cells += [str(row["bound"]) if isinstance(row["bound"], str) else "–", status]
        kind = "best" if index == best else "" if row["status"] == "ok" else "off"
        lines.append(f'<tr class="{kind}">' + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>")
    return "\n".join(lines) + "</table>"
