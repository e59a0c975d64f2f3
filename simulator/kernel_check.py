"""Compare the cost model with a table of measured kernel times (`oasis-sim calibrate --check TABLE.parquet`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator import cost, kernel_tables
from simulator.kernel_tables import ATTENTION_COLUMNS, GEMM_COLUMNS, read_columns, table_columns
from simulator.specs.hardware import HardwareSpec
from simulator.specs.model import ModelSpec
from traces.errors import InputError

NUM_WORST_ROWS = 10


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Of predicted / measured − 1 over rows."""

    num_rows: int
    median_abs_error: float | None
    p90_abs_error: float | None
    bias: float | None
    """Mean signed error."""


@dataclass(frozen=True, slots=True)
class TableCheck:
    """How well the cost model of one GPU predicts a table."""

    kernel: str
    """gemm or decode_attention."""
    hardware: str
    overall: ErrorSummary
    beyond_l2: ErrorSummary
    """Rows whose KV (attention) or operands (GEMM) exceed twice the L2: below it repeated launches run warm."""
    num_from_table: int
    """Rows answered by the profile's measured tables; the others by its roofline."""
    worst: tuple[dict[str, Any], ...]
    """Rows with the largest errors: shape, measured_s, predicted_s, error."""

    def flat(self) -> dict[str, Any]:
        """One JSON object; the overall figures at its top level."""
        keys = ("num_rows", "median_abs_error", "p90_abs_error", "bias")
        return {
            "kernel": self.kernel,
            "hardware": self.hardware,
            **{key: getattr(self.overall, key) for key in keys},
            "num_from_table": self.num_from_table,
            "beyond_l2": {key: getattr(self.beyond_l2, key) for key in keys},
            "worst": list(self.worst),
        }


def check_table(path: str | Path, hardware: HardwareSpec) -> TableCheck:
    """Predict every row of a decode-attention or GEMM table in the format of the shipped ones.

    Raises InputError for a file that is neither.
    """
    file = Path(path)
    names = table_columns(file)
    for kernel, needed, predict in (
        ("gemm", GEMM_COLUMNS, _predict_gemm),
        ("decode_attention", ATTENTION_COLUMNS, _predict_attention),
    ):
        if set(needed) <= set(names):
            columns = read_columns(file, needed)
            predicted_s, num_bytes, from_table = predict(hardware, columns)
            return _compare(kernel, hardware, columns, predicted_s, num_bytes, from_table)
    raise InputError(
        f"{file}: neither a GEMM table ({', '.join(GEMM_COLUMNS)}) nor a decode-attention table "
        f"({', '.join(ATTENTION_COLUMNS)}); it has {', '.join(names)}"
    )


Float = NDArray[np.float64]


def _predict_gemm(hardware: HardwareSpec, columns: dict[str, Float]) -> tuple[Float, Float, int]:
    shapes = _int_rows(columns, GEMM_COLUMNS)
    predicted = [cost.gemm_s(hardware, *shape) for shape in shapes]
    table = hardware.kernels.table
    reached = 0 if table is None else sum(kernel_tables.gemm_s(table, *shape) is not None for shape in shapes)
    m, n, k = (columns[name] for name in GEMM_COLUMNS)
    return np.array(predicted), 2 * (n * k + m * k + m * n), reached


def _predict_attention(hardware: HardwareSpec, columns: dict[str, Float]) -> tuple[Float, Float, int]:
    shapes = _int_rows(columns, ATTENTION_COLUMNS)
    predicted, reached = [], 0
    table = hardware.kernels.table
    for batch, isl, step, num_q_heads, num_kv_heads, head_dim in shapes:
        model = _one_layer(num_q_heads, num_kv_heads, head_dim)
        kv_len = isl + step
        predicted.append(cost.attention_s(hardware, model, batch, kv_len, 1, 2, dense_table=True))
        shape = (batch, kv_len, num_q_heads, num_kv_heads, head_dim)
        reached += table is not None and kernel_tables.decode_attention_s(table, *shape) is not None
    kv_tokens = columns["batch_size"] * (columns["isl"] + columns["step"])
    return np.array(predicted), kv_tokens * columns["num_key_value_heads"] * columns["head_dim"] * 4, reached


@lru_cache(maxsize=1024)
def _one_layer(num_q_heads: int, num_kv_heads: int, head_dim: int) -> ModelSpec:
    """The attention of one layer; what attention does not read is 1."""
    if num_q_heads % num_kv_heads:
        raise InputError(f"num_heads {num_q_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    return ModelSpec(
        name="table row",
        attention="MHA" if num_q_heads == num_kv_heads else "GQA",
        num_layers=1,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden=1,
        intermediate=1,
        vocab=1,
        max_position=2**31,
        source="a row of a kernel table",
    )


def _int_rows(columns: dict[str, Float], names: tuple[str, ...]) -> list[tuple[int, ...]]:
    stacked = np.stack([columns[name] for name in names], axis=1)
    return [tuple(row) for row in stacked.astype(np.int64).tolist()]


def _compare(
    kernel: str, hardware: HardwareSpec, columns: dict[str, Float], predicted_s: Float, num_bytes: Float, reached: int
) -> TableCheck:
    measured_s = columns["latency_ms"] / 1e3
    error = predicted_s / measured_s - 1
    shape = [name for name in columns if name != "latency_ms"]
    worst = [
        {
            **{name: int(columns[name][row]) for name in shape},
            "measured_s": float(measured_s[row]),
            "predicted_s": float(predicted_s[row]),
            "error": float(error[row]),
        }
        for row in np.argsort(-np.abs(error), kind="stable")[:NUM_WORST_ROWS]
    ]
    large = num_bytes > 2 * hardware.gpu.l2_bytes.value
    return TableCheck(kernel, hardware.name, summarise(error), summarise(error[large]), reached, tuple(worst))


def summarise(error: Float) -> ErrorSummary:
    """Figures of signed relative errors; null without rows."""
    if not len(error):
        return ErrorSummary(0, None, None, None)
    magnitude = np.abs(error)
    return ErrorSummary(
        len(error), float(np.median(magnitude)), float(np.quantile(magnitude, 0.9)), float(error.mean())
    )
