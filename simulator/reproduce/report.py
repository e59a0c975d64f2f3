"""The whole table evaluated: rows with their errors, what each input does to them, and what misses would need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.catalog import load_hardware
from simulator.decode_step_table import compare as decode_steps
from simulator.reproduce.evaluate import Evaluation
from simulator.reproduce.sensitivity import Effect, effects, solve
from simulator.reproduce.table import Experiment, Row
from traces.errors import InputError

TARGET = 0.10
"""Relative error that a predicted row may have."""


@dataclass(frozen=True, slots=True)
class RowResult:
    row: Row
    simulated: float | None
    error: float | None
    """Relative to the published figure; None at another setting than the published one."""
    status: str
    """fitted, met, missed, other setting, not simulated."""
    problem: str | None = None
    """Why there is no figure."""


@dataclass(frozen=True, slots=True)
class Need:
    """Value of an input that would make a missed row true, and what the other rows then come to."""

    setting: str
    input: str
    value: float | None
    others: dict[str, float]
    """Relative error of the experiment's other published rows, by setting."""


@dataclass(frozen=True, slots=True)
class Result:
    experiment: Experiment
    rows: list[RowResult]
    effects: list[Effect]
    needs: list[Need]
    batches: dict[str, int]
    """Requests in flight of each point that was simulated."""


def reproduce(experiment: Experiment, overrides: Mapping[str, Any]) -> Result:
    """Evaluate one experiment; `overrides` (dotted keys) make it another setting, whose rows have no published figure.

    Raises InputError for an override that no point can take.
    """
    evaluation = Evaluation(experiment, {}, overrides)
    rows = [_evaluate(evaluation, row) for row in experiment.rows]
    base = {result.row.setting: result.simulated for result in rows if result.simulated is not None}
    moved = list(effects(experiment, base, overrides))
    needs = [_need(experiment, result.row) for result in rows if result.status == "missed" and result.row.solve]
    return Result(experiment, rows, moved, needs, evaluation.batches())


def decode_step_rows() -> list[dict[str, Any]]:
    """Measured decode steps of Qwen3-8B's geometry on an H200 beside the step model (`simulator.decode_step_table`)."""
    return [
        {
            "setting": f"batch {row.batch_size}, context {row.context_tokens}, {row.stack}"
            + (f", {row.fetched_blocks} of 128 blocks" if row.fetched_blocks else ""),
            "published": row.step_us,
            "simulated": simulated_us,
            "error": error,
            "fitted": False,
            "experiment": "decode-step-h200",
            "unit": "us",
            "status": "met" if abs(error) <= TARGET else "missed",
            "problem": None,
        }
        for row, simulated_us, error in decode_steps(load_hardware("h200-sxm"))
    ]


def row_document(experiment: Experiment, result: RowResult) -> dict[str, Any]:
    """One row as JSON: setting, published, simulated, error, fitted, and what explains them."""
    other = result.status == "other setting"
    return {
        "setting": result.row.setting,
        "published": None if other else result.row.published,
        "simulated": result.simulated,
        "error": result.error,
        "fitted": result.row.fitted and not other,
        "experiment": experiment.name,
        "unit": result.row.unit,
        "status": result.status,
        "problem": result.problem,
    }


def _evaluate(evaluation: Evaluation, row: Row) -> RowResult:
    if row.not_simulated is not None:
        return RowResult(row, None, None, "not simulated", row.not_simulated)
    try:
        simulated = evaluation.value(row)
    except InputError as error:
        if not evaluation.overrides:
            raise
        return RowResult(row, None, None, "not simulated", str(error))
    assert simulated is not None
    if evaluation.overrides:
        return RowResult(row, simulated, None, "other setting")
    error_of = simulated / row.published - 1.0
    if row.fitted:
        return RowResult(row, simulated, error_of, "fitted")
    return RowResult(row, simulated, error_of, "met" if abs(error_of) <= TARGET else "missed")


def _need(experiment: Experiment, row: Row) -> Need:
    assert row.solve is not None
    value = solve(experiment, row, row.solve)
    others = {}
    if value is not None:
        typed = round(value) if isinstance(experiment.inputs[row.solve].value, int) else value
        evaluation = Evaluation(experiment, {row.solve: typed})
        for other in experiment.rows:
            if other.simulated is not None and other is not row:
                found = evaluation.value(other)
                assert found is not None
                others[other.setting] = found / other.published - 1.0
    return Need(row.setting, row.solve, value, others)


def predicted_met(rows: Sequence[RowResult]) -> tuple[int, int]:
    """(met, predicted): rows within the target, and rows that no input was derived from."""
    predicted = [row for row in rows if row.status in ("met", "missed")]
    return sum(row.status == "met" for row in predicted), len(predicted)
