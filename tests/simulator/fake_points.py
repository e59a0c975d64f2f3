"""Points that need no trace, importable by name from worker processes."""

from __future__ import annotations

import os
import time
from typing import Any

from simulator.metrics import COLUMNS
from simulator.specs.experiment import ExperimentSpec
from traces.errors import InputError


def square(number: int) -> dict[str, Any]:
    """Slower for small numbers, so that completion order differs from grid order."""
    time.sleep(0.02 if number < 3 else 0.0)
    return {"number": number, "square": number**2}


def refuse_three(number: int) -> dict[str, Any]:
    if number == 3:
        raise InputError("3 cannot be simulated")
    return square(number)


def crash(number: int) -> dict[str, Any]:
    raise ZeroDivisionError(f"point {number}")


def process(number: int) -> dict[str, Any]:
    return {"number": number, "process": os.getpid()}


def sleep_for_ever(number: int) -> dict[str, Any]:
    time.sleep(600)
    return {"number": number}


def row_of(point: ExperimentSpec) -> dict[str, Any]:
    """A row whose results follow from its batch size and fetch cap alone."""
    time.sleep(0.01 if point.workload.batch_size == 1 else 0.0)
    batch, cap = point.workload.batch_size, point.policy.get("fetch_cap", 1.0)
    row = dict.fromkeys(COLUMNS) | {
        "point_key": f"{point.system}-{batch}-{cap}",
        "status": "ok",
        "system": point.system,
        "workload.batch_size": batch,
        "policy.fetch_cap": cap,
        "throughput_tokens_per_s": batch / (0.01 + 0.001 * cap),
        "recall": 0.8 + 0.1 * cap,
        "min_recall": 0.85,
    }
    if batch > 64:
        row |= {"status": "does_not_fit", "error": "hbm cannot hold the batch", "recall": None}
    return row
