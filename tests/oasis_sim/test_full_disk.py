"""A disk that fills up while a run folder is written: one line that names the file and says what is kept."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from simulator.point_lines import read_points
from tests.oasis_sim.conftest import Oasis

FEW = ["--system", "dense", "--batch-size", "1,2", "--jobs", "1", "--quiet", "--out", "run"]
SERVED = ["--system", "dense", "--model", "Qwen3-0.6B", "--set", "serving.num_requests=4", "--quiet", "--out", "run"]


WRITE_TABLE = pq.write_table


def _full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _assert_one_line(err: str, file: str, kept: str) -> None:
    assert err == f"error: {file}: cannot be written (No space left on device){kept}\n"


@pytest.fixture
def full_after(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`full_after(suffix)`: files whose name ends so (before `.part` or `.partial`) find the disk full."""

    def arrange(suffix: str) -> None:
        names = (suffix, f"{suffix}.part", f"{suffix}.partial")
        for owner, name in ((Path, "write_bytes"), (Path, "write_text"), (pq, "write_table")):
            plain = getattr(owner, name)

            def write(*arguments: Any, plain: Any = plain, **options: Any) -> Any:
                if any(isinstance(given, Path) and given.name.endswith(names) for given in arguments[:2]):
                    _full()
                return plain(*arguments, **options)

            monkeypatch.setattr(owner, name, write)

    return arrange


def test_a_sweep_whose_table_does_not_fit_keeps_its_points(
    oasis: Oasis, tiny_trace: Path, tmp_path: Path, full_after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_after("results.parquet")
    done = oasis("sweep", "--trace", str(tiny_trace), *FEW)
    assert (done.code, done.out) == (2, "")
    _assert_one_line(done.err, "run/results.parquet", "; 2 of 2 points stay in run; repeat the command to go on")
    assert len(read_points(tmp_path / "run" / "points.jsonl")[0]) == 2
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"config.yaml", "manifest.json", "points.jsonl"}
    monkeypatch.setattr(pq, "write_table", WRITE_TABLE)
    assert oasis("sweep", "--trace", str(tiny_trace), *FEW).code == 0


def test_a_point_that_does_not_fit_is_torn_and_the_folder_goes_on(
    oasis: Oasis, tiny_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def full_for_points(handle: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}").endswith("points.jsonl"):
            _full()
        fsync(handle)

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full_for_points)
        done = oasis("sweep", "--trace", str(tiny_trace), *FEW)
    assert done.code == 2
    _assert_one_line(done.err, "run/points.jsonl", "; 0 of 2 points stay in run; repeat the command to go on")
    assert oasis("sweep", "--trace", str(tiny_trace), *FEW).code == 0


@pytest.mark.parametrize(
    ("arguments", "file", "kept"),
    [
        (["sweep", *FEW], "config.yaml", ""),
        (["sweep", *FEW], "manifest.json", ""),
        (
            ["run", "--batch-size", "5", "--out", "run"],
            "results.parquet",
            "; 1 of 1 points stay in run; repeat the command to go on",
        ),
        (
            ["run", "--batch-size", "5", "--timeline", "2", "--out", "run", "--quiet"],
            "timeline.json",
            "; 1 of 1 points stay in run; repeat the command to go on",
        ),
        (["run", *SERVED], "usage.parquet", ""),
        (
            ["compare", *["--systems", "dense,quest", *FEW[2:]]],
            "plots/comparison.png",
            "; all points stay in run; repeat the command to go on",
        ),
    ],
)
def test_every_file_of_a_run_folder(
    oasis: Oasis, tiny_trace: Path, full_after: Any, arguments: list[str], file: str, kept: str
) -> None:
    full_after(Path(file).name)
    done = oasis(arguments[0], "--trace", str(tiny_trace), *arguments[1:])
    assert (done.code, done.out) == (2, "")
    _assert_one_line(done.err, f"run/{file}", kept)


@pytest.mark.parametrize("method", ["write_table", "close"])
@pytest.mark.parametrize("verb", ["run", "sweep"])
def test_requests_of_a_serving_run(
    oasis: Oasis, tiny_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, method: str
) -> None:
    monkeypatch.setattr(pq.ParquetWriter, method, lambda self, *_: _full() if self.is_open else None)
    several = ["--set", "seed=1,2", "--set", "serving.rate_per_s=1", "--jobs", "1"] if verb == "sweep" else []
    done = oasis(verb, "--trace", str(tiny_trace), *SERVED, *several)
    assert done.code == 2
    assert done.err.startswith("error: run/requests")
    kept = "; 0 of 2 points stay in run; repeat the command to go on" if verb == "sweep" else ""
    assert done.err.endswith(f".parquet: cannot be written (No space left on device){kept}\n")
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("file", ["report.html", "plots/breakdown.png"])
def test_pictures_and_page(oasis: Oasis, tiny_trace: Path, tmp_path: Path, full_after: Any, file: str) -> None:
    assert oasis("sweep", "--trace", str(tiny_trace), *FEW).code == 0
    full_after(Path(file).name)
    done = oasis("plot", "run")
    assert (done.code, done.out) == (2, "")
    _assert_one_line(done.err, f"run/{file}", "; the points stay in run")
    assert not list(tmp_path.rglob("*.partial"))
