"""How far predictions are from measurements: errors, bias, decision fidelity. Pure functions of result rows.

A row is one point that ran on the GPU: its parameters, `predicted_tpot_s`, `measured_tpot_s` (median of the repeats),
`repeat_spread` (interquartile range of the repeats / median), `transfer_over_compute` (link time alone / compute
stream alone), `byte_mismatches`, `again` (its policy has another row in its cell).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

CONTENDED = (0.5, 2.0)
"""Transfer/compute ratio within which a point is contended: neither side hides the other."""
MIN_CELL_POLICIES = 6
"""Policies that a (batch, context) cell needs before decisions in it are judged."""
CELL = ("model", "trace", "workload.batch_size", "workload.context_tokens")


def signed_errors(rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """predicted / measured − 1, [N]."""
    return np.array([row["predicted_tpot_s"] / row["measured_tpot_s"] - 1 for row in rows])


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's τ-b between two rankings of the same items; None where either is constant.

    Source: Kendall, Biometrika 33 (1945): (C − D) / sqrt((n0 − n1)(n0 − n2)).
    """
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    upper = np.triu_indices(len(a), k=1)
    da, db = np.sign(a[:, None] - a[None, :])[upper], np.sign(b[:, None] - b[None, :])[upper]
    pairs_a, pairs_b = np.count_nonzero(da), np.count_nonzero(db)
    if not pairs_a or not pairs_b:
        return None
    return float((da * db).sum() / math.sqrt(pairs_a * pairs_b))


def regret(rows: Sequence[Mapping[str, Any]]) -> float:
    """How much slower the predicted best is than the measured best, as a share: 0 when the choice was right."""
    chosen = min(rows, key=lambda row: row["predicted_tpot_s"])
    return float(chosen["measured_tpot_s"] / min(row["measured_tpot_s"] for row in rows) - 1)


def cells(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Rows of each (batch, context) cell of a model and a trace with enough policies to choose among, each once."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in (row for row in rows if not row["again"]):
        groups.setdefault(tuple(row[key] for key in CELL), []).append(row)
    return [group for group in groups.values() if len(group) >= MIN_CELL_POLICIES]


def errors_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts and errors of a set of rows; figures are None where there is nothing to compute them from."""
    if not rows:
        return {"num_points": 0, "median_abs_error": None, "p95_abs_error": None, "bias": None,
                "p50_median_abs_error": None, "p99_median_abs_error": None, "regret": None, "kendall_tau": None,
                "repeat_spread": None, "byte_mismatches": 0}  # fmt: skip
    errors = signed_errors(rows)
    judged = cells(rows)
    taus = [
        tau
        for cell in judged
        if (tau := kendall_tau([r["predicted_tpot_s"] for r in cell], [r["measured_tpot_s"] for r in cell])) is not None
    ]
    return {
        "num_points": len(rows),
        "median_abs_error": float(np.median(np.abs(errors))),
        "p95_abs_error": float(np.quantile(np.abs(errors), 0.95)),
        "bias": float(errors.mean()),
        "p50_median_abs_error": _median_abs_error(rows, "p50"),
        "p99_median_abs_error": _median_abs_error(rows, "p99"),
        "regret": float(np.mean([regret(cell) for cell in judged])) if judged else None,
        "kendall_tau": float(np.mean(taus)) if taus else None,
        "repeat_spread": float(np.median([row["repeat_spread"] for row in rows])),
        "byte_mismatches": int(sum(row["byte_mismatches"] for row in rows)),
    }


IN_LINE = ("dense", "quest", "retrieval")
"""Systems whose parts follow each other on one stream, so that time marks between them change little."""
COMPONENTS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "draft": (("t_draft_s",), ("draft",)),
    "sampling": (("t_sampling_s",), ("sampling",)),
    "qkv and append": (("t_qkv_s",), ("qkv", "append")),
    "selection": (("t_score_s", "t_plan_s"), ("score+topk", "plan")),
    "waiting": (("t_exposed_wait_s", "t_gather_s"), ("wait",)),
    "attention": (("t_attention_s",), ("attention",)),
    "feed-forward": (("t_ffn_s",), ("ffn",)),
    "lm_head": (("t_lm_head_s",), ("lm_head",)),
}
"""Parts of a step: what the simulator sums, and the parts between time marks on the compute stream."""
ONCE = ("draft", "sampling", "lm_head")
"""Marked once a step, the others once a layer."""


def component_errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per component (predicted − measured) / measured step, over the points whose parts were timed.

    A step with time marks is longer by what the marks cost: `marked_over_unmarked`. Each mark's equal share of that is
    taken off the part that it ends.
    """
    timed = [row for row in rows if row.get("measured_parts_s")]
    if not timed:
        return {}
    found: dict[str, dict[str, Any]] = {}
    for name, (ours, theirs) in COMPONENTS.items():
        errors = []
        for row in timed:
            parts = _without_marks(row)
            measured = sum(parts.get(part, 0.0) for part in theirs)
            predicted = sum(row["predicted_parts_s"][part] for part in ours)
            errors.append((predicted - measured) / row["measured_tpot_s"])
        found[name] = {
            "num_points": len(timed),
            "median_abs_error_of_tpot": float(np.median(np.abs(errors))),
            "bias_of_tpot": float(np.mean(errors)),
        }
    marked = [sum(row["measured_parts_s"].values()) / row["measured_tpot_s"] for row in timed]
    found["marked_over_unmarked"] = {"num_points": len(timed), "median": float(np.median(marked))}
    return found


def _without_marks(row: Mapping[str, Any]) -> dict[str, float]:
    """Measured parts of one step, less the cost of their marks."""
    parts = row["measured_parts_s"]
    marks = {part: 1 if part in ONCE else row["num_layers"] for part in parts}
    mark_s = (sum(parts.values()) - row["measured_tpot_s"]) / sum(marks.values())
    return {part: seconds - mark_s * marks[part] for part, seconds in parts.items()}


def _median_abs_error(rows: Sequence[Mapping[str, Any]], of: str) -> float:
    return float(np.median([abs(row[f"predicted_{of}_s"] / row[f"measured_{of}_s"] - 1) for row in rows]))


def is_contended(row: Mapping[str, Any]) -> bool:
    return bool(CONTENDED[0] <= row["transfer_over_compute"] <= CONTENDED[1])


def summarise(rows: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a validation run: provenance, errors, the same for contended points and by system, components."""
    contended = [row for row in rows if is_contended(row)]
    systems = sorted({row["system"] for row in rows})
    return {
        **provenance,
        **errors_of(rows),
        "contended": errors_of(contended),
        "by_system": {name: errors_of([row for row in rows if row["system"] == name]) for name in systems},
        "components": component_errors([row for row in rows if row["system"] in IN_LINE]),
    }
