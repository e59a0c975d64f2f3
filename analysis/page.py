"""The report page: what was run, the best point and why, the pictures, the table, where it all comes from."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd
import yaml

from analysis import style
from analysis.falling_recall import recall_that_falls
from analysis.load import Run
from analysis.selection import (
    Case,
    NotDrawn,
    best_buildable,
    best_by_system,
    is_admissible,
    is_bound_only,
    left_out,
    matching,
    nearest_point,
    swept_parameters,
)

MAX_TABLE_ROWS = 1000
CAP = "policy.fetch_cap"
TABLE_METRICS = (
    ("throughput_tokens_per_s", "tok/s", 1.0),
    ("tpot_mean_s", "TPOT (ms)", 1e3),
    ("exposed_transfer_s", "exposed (ms)", 1e3),
    ("recall", "recall", 1.0),
    ("hit_rate", "hit rate", 1.0),
    ("churn", "churn", 1.0),
    ("h2d_bytes_per_token", "H2D (MB/token)", 1e-6),
    ("hbm_bytes_peak", "HBM (GB)", 1e-9),
)
"""Column, heading with unit, factor from the stored unit."""

CSS = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:1000px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em;margin-bottom:.2em} h2{font-size:1.15em;margin-top:2em;border-bottom:1px solid #ddd}
img{max-width:100%;border:1px solid #eee;margin:.6em 0} .quiet{color:#666} .best{background:#fff1e8}
table{border-collapse:collapse;font-size:12.5px;display:block;overflow-x:auto}
td,th{padding:.2em .6em;text-align:right;border-bottom:1px solid #eee;white-space:nowrap}
td:first-child,th:first-child{text-align:left} .off{color:#999} pre{background:#f6f6f6;padding:.8em;overflow-x:auto}
.answer{font-size:1.08em;border-left:4px solid #D55E00;padding:.1em .9em}
"""


@dataclass(frozen=True)
class Picture:
    """One drawn plot: file name without suffix, and its bytes by format; `png` is always there."""

    name: str
    renderings: dict[str, bytes]


@dataclass(frozen=True)
class Section:
    """A case with its pictures, and the plots that it could not fill with the reason of each."""

    label: str
    case: Case
    pictures: list[Picture]
    skipped: list[tuple[str, str]]


def render(run: Run, sections: list[Section], dropped_cases: int = 0) -> str:
    """The whole page as HTML without any outside reference."""
    body = []
    selectors = _selectors(run)
    for section in sections:
        body += _section(section, selectors)
    if dropped_cases:
        body.append(
            f"<p>{dropped_cases} further combination(s) of model, GPU, trace and context are not drawn; "
            "run them apart to see them.</p>"
        )
    return document(run, body)


def document(run: Run, body: list[str]) -> str:
    """`body` between what was run and where it comes from."""
    name = escape(run.folder.resolve().name)
    body = [f"<h1>{name}</h1>", f'<p class="quiet">{escape(_what_was_run(run))}</p>', *body]
    body += ["<h2>Provenance</h2>", _definition_table(run.manifest)]
    resolved = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
    body.append(f"<details><summary>Resolved configuration</summary><pre>{escape(resolved)}</pre></details>")
    head = f'<meta charset="utf-8"><title>{name}</title><style>{CSS}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def _selectors(run: Run) -> dict[str, str]:
    """By system, of a run whose manifest says the policies that its systems resolve to."""
    policies = run.manifest.get("policies")
    if not isinstance(policies, dict):
        return {}
    return {
        system: policy["selector"]
        for system, policy in policies.items()
        if isinstance(policy, dict) and isinstance(policy.get("selector"), str)
    }


def explain_best(case: Case, selectors: Mapping[str, str]) -> list[str]:
    """Sentences: the best point, what binds it, what it costs against the alternatives. selectors: by system."""
    best = best_buildable(case)
    if best is None:
        near = nearest_point(case.rows, case.objective)
        if near is None:
            return ["No point ran: " + "; ".join(left_out(case)) + "."]
        if pd.isna(near["recall"]):
            return [
                f"No point has a known recall. Of the others the best is {_describe(case, near)}, {_value(case, near)}."
            ]
        gap = f"recall {near['recall']:.3f} where {near['min_recall']:.3f} is asked"
        return [f"No point keeps the recall threshold. The nearest is {_describe(case, near)}, {gap}."]
    lines = [f"Best: {_describe(case, best)}, {_value(case, best)}{_recall_text(best)}."]
    bound = style.BOUND_NAMES.get(str(best["bound"]), "")
    detail = f" ({best['bound_detail']})" if isinstance(best["bound_detail"], str) and best["bound_detail"] else ""
    if bound:
        lines.append(f"What binds it: {bound}{detail}.")
    if pd.notna(best["tpot_mean_s"]) and pd.notna(best["t_exposed_wait_s"]):
        share = best["t_exposed_wait_s"] / best["tpot_mean_s"]
        waits = f"it waits {style.percent(share)} for transfers" if share > 0 else "it waits for no transfer"
        wait = f"Of a step of {style.number(best['tpot_mean_s'] * 1e3)} ms {waits}"
        hidden = f" and hides {style.percent(best['hidden_fraction'])} of the link's time"
        lines.append(wait + (hidden if pd.notna(best["hidden_fraction"]) else "") + ".")
    over_caps: list[Any] = matching(case.rows, best, {CAP}).dropna(subset=[CAP, "recall"]).to_dict("records")
    if falls := recall_that_falls(over_caps, selectors):
        lines.append(f"{falls[0].upper()}{falls[1:]}.")
    lines += _alternatives(case, best)
    return lines


def _alternatives(case: Case, best: pd.Series[Any]) -> list[str]:
    lines = []
    ranked = best_by_system(case)
    others = ranked[(ranked["system"] != best["system"]) & ranked["admissible"]]
    shown = [
        f"{row['system']}{' (a bound, cannot be built)' if is_bound_only(str(row['system'])) else ''} "
        f"{style.number(row[case.objective] / best[case.objective])}×"
        for _, row in others.iterrows()
    ]
    if shown:
        lines.append(f"Against it, each at its own best: {', '.join(shown)}.")
    short = [str(s) for s in ranked.loc[~ranked["admissible"], "system"]]
    if short:
        lines.append(f"No point keeps the recall threshold: {', '.join(short)}.")
    faster = case.ok[(case.ok[case.objective] > best[case.objective]) & ~is_admissible(case.ok)]
    if len(faster):
        top = faster.loc[faster[case.objective].idxmax()]
        recall = f"recall {top['recall']:.3f}" if pd.notna(top["recall"]) else "unknown recall"
        lines.append(
            f"{len(faster)} point(s) are faster below the threshold; the fastest is {_describe(case, top)}, "
            f"{_value(case, top)} at {recall}."
        )
    if missing := left_out(case):
        lines.append("Without a result: " + ", ".join(missing) + ".")
    return lines


def _describe(case: Case, point: pd.Series[Any]) -> str:
    chosen = [
        f"{style.short(c)} {style.value_text(point[c])}"
        for c in swept_parameters(case.rows)
        if c != "system" and pd.notna(point[c])
    ]
    return str(point["system"]) + (f" with {', '.join(chosen)}" if chosen else "")


def _value(case: Case, point: pd.Series[Any]) -> str:
    unit = " tok/s" if case.objective == "throughput_tokens_per_s" else f" {style.label(case.objective)}"
    return f"{style.number(point[case.objective] * style.display_scale(case.objective))}{unit}"


def _recall_text(point: pd.Series[Any]) -> str:
    if pd.isna(point["recall"]):
        return ""
    asked = f" (at least {point['min_recall']:.3f} asked)" if pd.notna(point["min_recall"]) else ""
    return f" at recall {point['recall']:.3f}{asked}"


def _what_was_run(run: Run) -> str:
    rows = run.results
    counts = rows["status"].value_counts()
    plural = style.STATUS_TEXT | {"does_not_fit": "do not fit"}
    states = ", ".join(f"{n} {(plural if n > 1 else style.STATUS_TEXT)[str(s)]}" for s, n in counts.items())
    swept = swept_parameters(rows)
    axes = "; ".join(
        f"{style.short(c)} {', '.join(style.value_text(v) for v in rows[c].dropna().unique())}" for c in swept
    )
    return f"{len(rows)} points ({states}). " + (f"Varied: {axes}." if axes else "Nothing is varied.")


def _section(section: Section, selectors: Mapping[str, str]) -> list[str]:
    case = section.case
    parts = [f"<h2>{escape(section.label)}</h2>"] if section.label else []
    parts.append(f'<p class="quiet">{escape(case.subtitle)}</p>')
    first, *rest = explain_best(case, selectors)
    parts.append(f'<p class="answer"><b>{escape(first)}</b></p>')
    parts += [f"<p>{escape(' '.join(rest))}</p>"] if rest else []
    parts += embedded(section.pictures, section.skipped)
    parts += _tables(case)
    return parts


def embedded(pictures: Sequence[Picture], skipped: Sequence[tuple[str, str]]) -> list[str]:
    """Pictures as they were written, and what was not drawn with the reason of each."""
    parts = []
    for picture in pictures:
        data = base64.b64encode(picture.renderings["png"]).decode()
        parts.append(f'<img alt="{escape(picture.name)}" src="data:image/png;base64,{data}">')
    if skipped:
        items = "".join(f"<li>{escape(name)}: {escape(reason)}</li>" for name, reason in skipped)
        parts.append(f"<p>Not drawn:</p><ul>{items}</ul>")
    return parts


def _tables(case: Case) -> list[str]:
    parts = []
    lead = best_buildable(case)
    try:
        ranked = best_by_system(case)
        parts.append("<h3>Each system at its best</h3>" + _table(case, case.rows.loc[ranked["row"]], lead))
    except NotDrawn:
        parts.append("<p>No point ran.</p>")
    if len(case.rows) > 1:
        shown = case.rows.head(MAX_TABLE_ROWS)
        count = f"{len(case.rows)}" if len(shown) == len(case.rows) else f"first {len(shown)} of {len(case.rows)}"
        parts.append(f"<details><summary>All points ({count})</summary>{_table(case, shown, lead)}</details>")
    return parts


def _table(case: Case, rows: pd.DataFrame, lead: pd.Series[Any] | None) -> str:
    swept = [c for c in swept_parameters(case.rows) if c != "system"]
    if "workload.batch_size" not in swept:
        swept = ["workload.batch_size", *swept]
    headings = ["system", *(style.short(c) for c in swept), *(h for _, h, _ in TABLE_METRICS), "bound", "status"]
    lines = ["<table><tr>" + "".join(f"<th>{escape(h)}</th>" for h in headings) + "</tr>"]
    for (index, row), admissible in zip(rows.iterrows(), is_admissible(rows), strict=True):
        cells = [str(row["system"]), *(style.value_text(row[c]) for c in swept)]
        cells += [style.number(row[c] * factor) for c, _, factor in TABLE_METRICS]
        cells += [str(row["bound"]) if isinstance(row["bound"], str) else "–", _status(row, bool(admissible))]
        kind = "best" if lead is not None and index == lead.name else "" if admissible else "off"
        lines.append(f'<tr class="{kind}">' + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>")
    return "\n".join(lines) + "</table>"


def _status(row: pd.Series[Any], admissible: bool) -> str:
    if row["status"] == "ok":
        return "ok" if admissible else "below the recall threshold" if pd.notna(row["recall"]) else "recall unknown"
    reason = f": {row['error']}" if isinstance(row["error"], str) and row["error"] else ""
    return style.STATUS_TEXT[str(row["status"])] + reason


def _definition_table(values: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    rows = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(text(v))}</td></tr>" for k, v in values.items())
    return f"<table>{rows}</table>"
