"""How far predictions are from measurements: errors, bias, decision fidelity. Pure functions of result rows.

A row is one point that ran on the GPU: its parameters, `predicted_tpot_s`, `measured_tpot_s` (median of the repeats),
`repeat_spread` (interquartile range of the repeats / median), `transfer_over_compute` (link time alone / compute
stream alone), `byte_mismatches`.
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
CELL = ("workload.batch_size", "workload.context_tokens")


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
    """Rows of each (batch, context) cell with enough policies to choose among."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in CELL), []).append(row)
    return [group for group in groups.values() if len(group) >= MIN_CELL_POLICIES]


def errors_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts and errors of a set of rows; figures are None where there is nothing to compute them from."""
    if not rows:
        return {"num_points": 0, "median_abs_error": None, "p95_abs_error": None, "bias": None, "regret": None,
                "kendall_tau": None, "repeat_spread": None, "byte_mismatches": 0}  # fmt: skip
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
        "regret": float(np.mean([regret(cell) for cell in judged])) if judged else None,
        "kendall_tau": float(np.mean(taus)) if taus else None,
        "repeat_spread": float(np.median([row["repeat_spread"] for row in rows])),
        "byte_mismatches": int(sum(row["byte_mismatches"] for row in rows)),
    }


def is_contended(row: Mapping[str, Any]) -> bool:
    return bool(CONTENDED[0] <= row["transfer_over_compute"] <= CONTENDED[1])


def summarise(rows: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a validation run: provenance, errors, and the same for contended points."""
    contended = [row for row in rows if is_contended(row)]
    return {**provenance, **errors_of(rows), "contended": errors_of(contended)}
