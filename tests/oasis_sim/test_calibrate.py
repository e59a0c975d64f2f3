"""`oasis-sim calibrate` where there is no GPU: the check against a table, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oasis_sim.verbs import calibrate
from simulator import catalog, cost
from traces.errors import InputError


@pytest.fixture
def gemm_table(tmp_path: Path) -> Path:
    """Times that are exactly 10 % above the cost model's."""
    hardware = catalog.load_hardware("a100-sxm")
    shapes = [(m, n, k) for m in (16, 64) for n in (4096, 8192) for k in (4096, 8192)]
    m, n, k = (np.array(column) for column in zip(*shapes, strict=True))
    latency = [1.1e3 * cost.gemm_s(hardware, *shape) for shape in shapes]
    path = tmp_path / "gemm.parquet"
    pq.write_table(pa.table({"m": m, "n": n, "k": k, "latency_ms": latency}), path)
    return path


def test_check_reports_the_error_of_a_known_table(gemm_table, capsys):
    assert calibrate.check(str(gemm_table), "a100-sxm", as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_rows"] == 8
    assert found["median_abs_error"] == pytest.approx(1 - 1 / 1.1)
    assert found["bias"] == pytest.approx(1 / 1.1 - 1)


def test_check_prints_a_table_for_people(gemm_table, capsys):
    calibrate.check(str(gemm_table), "a100-sxm", as_json=False)
    printed = capsys.readouterr().out
    assert "bias -9.1 %" in printed
    assert "worst rows" in printed


@pytest.mark.parametrize(
    ("out", "problem"), [(None, "--out"), ("profile.txt", ".yaml"), ("missing/p.yaml", "does not exist")]
)
def test_where_the_profile_goes_is_checked_first(out, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=problem):
        calibrate.calibrate(out, None, None, 2, None, as_json=False)


def test_a_profile_is_never_overwritten(tmp_path):
    (tmp_path / "p.yaml").write_text("measured: once\n")
    with pytest.raises(InputError, match="exists already"):
        calibrate.calibrate(str(tmp_path / "p.yaml"), None, None, 2, None, as_json=False)
