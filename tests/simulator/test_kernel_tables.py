"""Kernel tables: exact where measured, right on held-out rows, silent outside, fast; the check against a table."""

from __future__ import annotations

import hashlib
import timeit
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from simulator.catalog import load_hardware
from simulator.kernel_check import check_table
from simulator.kernel_tables import (
    ATTENTION_COLUMNS,
    GEMM_COLUMNS,
    TABLES,
    attention_table,
    decode_attention_s,
    gemm_s,
    gemm_table,
    read_columns,
)
from traces.errors import InputError

Float = NDArray[np.float64]
L2_BYTES = 50e6


def held_out(columns: list[Float]) -> NDArray[np.bool_]:
    """A fifth of the rows, by a hash of their shape."""
    rows = np.stack(columns, axis=1).astype(int).tolist()
    return np.array([hashlib.sha256(repr(row).encode()).digest()[0] % 5 == 0 for row in rows])


def attention_rows(table: str) -> tuple[list[Float], Float]:
    """batch, kv_len, query heads, KV heads, head_dim; seconds."""
    c = read_columns(TABLES / f"{table}_decode_attention_bf16.parquet", ATTENTION_COLUMNS)
    shape = [c["batch_size"], c["isl"] + c["step"], c["num_heads"], c["num_key_value_heads"], c["head_dim"]]
    return shape, c["latency_ms"] / 1e3


@pytest.mark.parametrize("table", ["h100_sxm", "h200_sxm"])
def test_attention_on_rows_never_interpolated_from(table: str) -> None:
    """GQA with KV beyond twice the L2, by table or, outside its reach, roofline. The aim is 5 % and 15 %."""
    shape, measured_s = attention_rows(table)
    out = held_out(shape)
    model = attention_table(*(column[~out] for column in shape), measured_s[~out])
    kernels = load_hardware(table.replace("_", "-")).kernels
    error, reached = [], []
    for row, seconds in zip(np.stack(shape, axis=1)[out].tolist(), measured_s[out], strict=True):
        batch, kv_len, q_heads, kv_heads, head_dim = row
        kv_bytes = batch * kv_len * kv_heads * head_dim * 4
        if q_heads == kv_heads or kv_bytes <= 2 * L2_BYTES:
            continue
        predicted = model[int(kv_heads), int(head_dim)].at(batch, kv_len, q_heads)
        reached.append(predicted is not None)
        if predicted is None:
            predicted = kernels.attention_t0_s.value + kv_bytes / kernels.attention_bytes_per_s.value
        error.append(predicted / seconds - 1)
    assert len(error) > 250
    assert np.mean(reached) > 0.9
    magnitude = np.abs(error)
    assert np.median(magnitude) <= 0.025
    assert np.quantile(magnitude, 0.9) <= 0.10
    assert abs(np.mean(error)) <= 0.03


@pytest.mark.parametrize("table", ["h100_sxm", "h200_sxm"])
def test_gemm_on_rows_never_interpolated_from(table: str) -> None:
    c = read_columns(TABLES / f"{table}_gemm_bf16.parquet", GEMM_COLUMNS)
    shape, measured_s = [c[name] for name in GEMM_COLUMNS], c["latency_ms"] / 1e3
    out = held_out(shape)
    model = gemm_table(*(column[~out] for column in shape), measured_s[~out])
    predicted = [model.at(*row) for row in np.stack(shape, axis=1)[out].tolist()]
    reached = np.array([p is not None for p in predicted])
    assert reached.mean() > 0.99
    error = np.array([p for p in predicted if p is not None]) / measured_s[out][reached] - 1
    assert np.median(np.abs(error)) <= 0.04
    assert np.quantile(np.abs(error), 0.9) <= 0.13
    assert abs(error.mean()) <= 0.01


def test_measured_shapes_come_back_exactly() -> None:
    shape, measured_s = attention_rows("h200_sxm")
    for index in range(0, len(measured_s), 500):
        row = [int(column[index]) for column in shape]
        assert decode_attention_s("h200_sxm", *row) == pytest.approx(measured_s[index], rel=1e-12)
    c = read_columns(TABLES / "h200_sxm_gemm_bf16.parquet", GEMM_COLUMNS)
    for index in range(0, len(c["m"]), 1000):
        row = [int(c[name][index]) for name in GEMM_COLUMNS]
        assert gemm_s("h200_sxm", *row) == pytest.approx(c["latency_ms"][index] / 1e3, rel=1e-12)


def test_attention_grows_with_batch_and_context() -> None:
    by_context = [decode_attention_s("h100_sxm", 16, kv_len, 32, 8, 128) for kv_len in range(2048, 32_769, 1024)]
    by_batch = [decode_attention_s("h100_sxm", batch, 8192, 32, 8, 128) for batch in range(1, 65)]
    for seconds in (by_context, by_batch):
        known = [s for s in seconds if s is not None]
        assert len(known) == len(seconds)
        assert known == sorted(known)


def test_outside_the_table_there_is_no_answer() -> None:
    assert decode_attention_s("h100_sxm", 16, 4096, 9, 3, 64) is None  # no table has 3 KV heads
    assert decode_attention_s("h100_sxm", 16, 1_000_000, 32, 8, 128) is None
    assert decode_attention_s("h100_sxm", 4096, 32, 32, 8, 128) is None
    assert gemm_s("h100_sxm", 32, 151_936, 4096) is None  # the lm_head is wider than the table
    assert gemm_s("h100_sxm", 100_000, 4096, 4096) is None
    with pytest.raises(InputError, match="no gemm table 'v100'; there are h100_sxm, h200_sxm"):
        gemm_s("v100", 1, 64, 64)


def test_a_warm_call_is_fast() -> None:
    model = gemm_table(
        *(np.array(x, dtype=float) for x in ([32, 32, 64, 64], [64, 128, 64, 128], [64] * 4)), np.ones(4)
    )
    assert model.at(48, 96, 64) is not None
    assert min(timeit.repeat(lambda: model.at(48, 96, 64), number=200, repeat=5)) / 200 < 50e-6
    gemm_s("h100_sxm", 32, 6144, 4096)
    assert min(timeit.repeat(lambda: gemm_s("h100_sxm", 32, 6144, 4096), number=200, repeat=5)) / 200 < 5e-6


def test_interpolation_reproduces_a_linear_kernel() -> None:
    """Seconds that are linear in batch x KV length, with a third of the grid missing, come back without error."""
    batch, kv_len = (x.ravel().astype(float) for x in np.meshgrid([1, 2, 4, 8, 16], [64, 128, 256, 512, 1024]))
    seconds = 5e-6 + 1e-9 * batch * kv_len
    keep = np.arange(len(batch)) % 3 != 1
    ones = np.ones(int(keep.sum()))
    table = attention_table(batch[keep], kv_len[keep], 8 * ones, 2 * ones, 64 * ones, seconds[keep])
    for b, s in ((3, 100), (1, 700), (12, 512)):
        assert table[2, 64].at(b, s, 8) == pytest.approx(5e-6 + 1e-9 * b * s, rel=1e-9)


def write(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_check_of_a_table_against_a_roofline(tmp_path: Path) -> None:
    profile = load_hardware("a100-sxm")
    kernels = profile.kernels
    kv_len, batch = np.array([4096, 8192, 16_384]), np.array([16, 16, 16])
    num_bytes = batch * kv_len * 8 * 128 * 4
    model_s = kernels.attention_t0_s.value + num_bytes / kernels.attention_bytes_per_s.value
    factor = np.array([1.0, 1.1, 0.5])
    path = write(
        tmp_path / "t.parquet", batch_size=batch, isl=[1, 1, 1], step=kv_len - 1, num_heads=[32] * 3,
        num_key_value_heads=[8] * 3, head_dim=[128] * 3, latency_ms=model_s * factor * 1e3,
    )  # fmt: skip
    check = check_table(path, profile)
    assert (check.kernel, check.hardware, check.num_from_table) == ("decode_attention", "a100-sxm", 0)
    errors = 1 / factor - 1
    flat = check.flat()
    assert flat["num_rows"] == 3
    assert flat["median_abs_error"] == pytest.approx(np.median(np.abs(errors)))
    assert flat["p90_abs_error"] == pytest.approx(np.quantile(np.abs(errors), 0.9))
    assert flat["bias"] == pytest.approx(errors.mean())
    assert flat["worst"][0]["step"] == 16_383
    assert flat["worst"][0]["error"] == pytest.approx(1.0)


def test_check_uses_the_profiles_table_where_it_reaches(tmp_path: Path) -> None:
    wide = write(tmp_path / "g.parquet", m=[32, 32], n=[6144, 151_936], k=[4096, 4096], latency_ms=[0.02, 0.5])
    check = check_table(wide, load_hardware("h100-sxm"))
    assert (check.kernel, check.overall.num_rows, check.num_from_table) == ("gemm", 2, 1)
    assert check.beyond_l2.num_rows == 1


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"x": [1]}, "neither a GEMM table .* it has x"),
        ({"m": [1], "n": [2], "k": [3]}, "missing column 'latency_ms'; it has m, n, k"),
        ({"m": [1], "n": [2], "k": [3], "latency_ms": [float("nan")]}, r"latency_ms\[0\] must be positive and finite"),
        ({"m": [1], "n": [0], "k": [3], "latency_ms": [1.0]}, r"n\[0\] must be positive and finite, got 0"),
        ({"m": [1], "n": ["a"], "k": [3], "latency_ms": [1.0]}, "column 'n' is not numeric"),
        ({"m": [], "n": [], "k": [], "latency_ms": []}, "the table has no rows"),
    ],
)
def test_unusable_tables_are_refused_in_one_line(
    tmp_path: Path, columns: dict[str, list[object]], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_table(write(tmp_path / "t.parquet", **columns), load_hardware("l40s"))
    assert "\n" not in str(caught.value)


def test_not_a_parquet_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a readable parquet table"):
        check_table(tmp_path / "absent.parquet", load_hardware("l40s"))
    (tmp_path / "t.parquet").write_text("no", encoding="utf-8")
    with pytest.raises(InputError, match="not a readable parquet table"):
        check_table(tmp_path / "t.parquet", load_hardware("l40s"))
