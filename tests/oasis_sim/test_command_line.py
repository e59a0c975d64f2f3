"""Verbs end to end on a small trace, and every way to end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from simulator.metrics import BREAKDOWN, COLUMNS, METRICS
from tests.oasis_sim.conftest import Oasis
from traces.reader import open_trace

LIGHT = {"click", "oasis_sim", "rich", "shellingham", "typer", "typing_extensions", "annotated_doc", "colorama"}
"""Top-level modules that asking for help may import beside the standard library."""


def test_help_imports_only_the_command_line_library(oasis_process: Oasis, environment: dict[str, str]) -> None:
    code = (
        "import sys\nbefore = set(sys.modules)\nfrom oasis_sim.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as ended:\n    assert ended.code == 0\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    imported = set(done.stdout.splitlines()[-1].split())
    assert "typer" in imported
    third_party = {name for name in imported - set(sys.stdlib_module_names) if not name.startswith("_")}
    assert third_party <= LIGHT


def test_run_needs_neither_pandas_nor_matplotlib_nor_torch(
    environment: dict[str, str], tiny_trace: Path, tmp_path: Path
) -> None:
    code = (
        "import sys\nfrom oasis_sim.cli import main\n"
        f"try:\n    main(['run', '--trace', {str(tiny_trace)!r}, '--json'])\n"
        "except SystemExit as ended:\n    assert ended.code == 0\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    imported = set(done.stdout.splitlines()[-1].split())
    assert "numba" in imported
    assert imported & {"pandas", "matplotlib", "torch", "transformers"} == set()


@pytest.mark.parametrize("verb", ["run", "sweep", "record", "plot", "catalog", "trace"])
def test_every_verb_explains_itself(oasis: Oasis, verb: str) -> None:
    done = oasis(verb, "--help")
    assert done.code == 0
    assert done.out.startswith(f"Usage: oasis-sim {verb}")


def test_run_prints_one_flat_row_and_writes_its_folder(oasis: Oasis, tiny_trace: Path, tmp_path: Path) -> None:
    done = oasis("run", "--trace", str(tiny_trace), "--fetch-cap", "0.25", "--set", "policy.gather_ctas=32", "--json")
    assert done.code == 0, done.err
    row = done.document
    assert set(COLUMNS) <= set(row)
    assert not any(isinstance(value, dict | list) for value in row.values())
    assert (row["policy.fetch_cap"], row["policy.gather_ctas"], row["status"]) == (0.25, 32, "ok")
    assert sum(row[name] for name in BREAKDOWN) == pytest.approx(row["tpot_mean_s"], abs=1e-9)
    (folder,) = (tmp_path / "runs").iterdir()
    assert row["out"] == f"runs/{folder.name}"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert folder.name == f"run-{manifest['experiment_hash'][:8]}"
    assert manifest["state"] == "finished"
    assert [len(hashes) for hashes in manifest["content_hashes"].values()] == [1, 1, 1]
    assert manifest["content_hashes"]["traces"][str(tiny_trace)] == open_trace(tiny_trace).content_hash
    assert manifest["policies"]["oasiskv"]["kv_budget_tokens"] == 128
    assert pq.read_table(folder / "results.parquet")["recall"].to_pylist() == [row["recall"]]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["policy"] == {"fetch_cap": 0.25, "gather_ctas": 32}


def test_run_from_its_own_config_is_the_same_point(oasis: Oasis, tiny_trace: Path, tmp_path: Path) -> None:
    first = oasis("run", "--trace", str(tiny_trace), "--lookahead", "2", "--json").document
    again = oasis("run", f"{first['out']}/config.yaml", "--json").document
    assert again == first


def test_a_row_from_the_cache_shows_the_keys_that_this_run_sets(oasis: Oasis, tiny_trace: Path) -> None:
    arguments = ("run", "--trace", str(tiny_trace), "--fetch-cap", "0.3", "--json", "--out")
    plain = oasis(*arguments, "plain").document
    named = oasis(*arguments, "named", "--set", "policy.transport=gather").document  # the default, so the same point
    again = oasis(*arguments, "again").document
    assert named["policy.transport"] == "gather"
    assert {key: named[key] for key in plain if key != "out"} == {key: plain[key] for key in plain if key != "out"}
    assert again.keys() == plain.keys()


def test_run_says_what_binds_and_where_time_goes(oasis: Oasis, tiny_trace: Path) -> None:
    done = oasis("run", "--trace", str(tiny_trace), "--system", "retrieval", "--numa", "far")
    assert done.code == 0, done.err
    assert "tokens/s, TPOT" in done.out
    assert "bound by" in done.out
    assert "exposed wait" in done.out
    assert "an assumption" in done.out
    assert max(map(len, done.out.splitlines()[:-1])) <= 100  # the last line is a command, to copy whole


GRID = ["--system", "dense,quest,retrieval,oasiskv", "--fetch-cap", "0.1,1", "--block-size", "16,32"]
GRID += ["--lookahead", "1,2", "--batch-size", "32"]


def test_sweep_lists_rows_best_and_folder(oasis: Oasis, tiny_trace: Path, tmp_path: Path) -> None:
    done = oasis("sweep", "--trace", str(tiny_trace), *GRID, "--numa", "local,far", "--jobs", "1", "--json")
    assert done.code == 0, done.err
    document = done.document
    rows, best = document["rows"], document["best"]
    # dense 1, quest 2 blocks, retrieval 2 caps x 2 blocks x 2 sides, oasiskv that x 2 lookaheads
    assert [sum(row["system"] == name for row in rows) for name in ("dense", "quest", "retrieval", "oasiskv")] == [
        1,
        2,
        8,
        16,
    ]
    assert len({row["point_key"] for row in rows}) == len(rows)
    dense = rows[0]
    assert dense["policy.block_size_tokens"] is dense["policy.fetch_cap"] is dense["placement.host_numa"] is None
    admissible = [row for row in rows if row["recall"] >= row["min_recall"]]
    assert best["throughput_tokens_per_s"] == max(row["throughput_tokens_per_s"] for row in admissible)
    assert document["nearest"] is None
    table = pq.read_table(tmp_path / document["out"] / "results.parquet")
    for name in COLUMNS:
        assert table[name].to_pylist() == [row[name] for row in rows], name


def test_the_threshold_is_uncapped_on_demand_recall_minus_one_percent(oasis: Oasis, tiny_trace: Path) -> None:
    rows = oasis("sweep", "--trace", str(tiny_trace), *GRID, "--numa", "local", "--jobs", "1", "--json").document[
        "rows"
    ]
    for size in (16, 32):
        here = [row for row in rows if row["policy.block_size_tokens"] == size]
        (reference,) = [row for row in here if (row["system"], row["policy.fetch_cap"]) == ("retrieval", 1.0)]
        assert {row["min_recall"] for row in here} == {reference["recall"] - 0.01}


def test_best_respects_min_recall_and_is_null_when_nothing_reaches_it(oasis: Oasis, tiny_trace: Path) -> None:
    arguments = ("sweep", "--trace", str(tiny_trace), *SMALL)
    loose = oasis(*arguments, "--min-recall", "0", "--json").document
    assert loose["best"]["throughput_tokens_per_s"] == max(row["throughput_tokens_per_s"] for row in loose["rows"])
    strict = oasis(*arguments, "--min-recall", "0.999", "--json")
    assert strict.code == 0
    assert strict.document["best"] is None
    assert strict.document["nearest"]["recall"] == max(row["recall"] for row in strict.document["rows"])
    assert "No point has enough recall" in oasis(*arguments, "--min-recall", "0.999").out


def test_the_summary_names_the_best_point_why_and_what_is_next(oasis: Oasis, tiny_trace: Path) -> None:
    done = oasis("sweep", "--trace", str(tiny_trace), *GRID, "--numa", "local", "--jobs", "1")
    assert done.code == 0, done.err
    for text in (
        "Best point of each system",
        "★",
        "bound by",
        "enough",
        "an assumption",
        "One change away",
        "oasis-sim plot runs/",
    ):
        assert text in done.out
    assert max(map(len, done.out.splitlines())) <= 100
    assert done.err == "simulating 15 points\n"


def test_a_sweep_of_which_nothing_fits_exits_2_and_records_it(oasis: Oasis, tiny_trace: Path, tmp_path: Path) -> None:
    arguments = (
        "sweep",
        "--trace",
        str(tiny_trace),
        "--system",
        "quest",
        "--block-size",
        "16",
        "--jobs",
        "1",
        "--json",
    )
    nothing = oasis(*arguments, "--batch-size", "1000000,2000000")
    assert nothing.code == 2
    assert [row["status"] for row in nothing.document["rows"]] == ["does_not_fit"] * 2
    assert nothing.document["best"] is None
    some = oasis(*arguments, "--batch-size", "1,1000000")
    assert some.code == 0
    assert [row["status"] for row in some.document["rows"]] == ["ok", "does_not_fit"]


SMALL = ["--system", "quest,oasiskv", "--fetch-cap", "0.1,1", "--block-size", "16", "--lookahead", "1"]
SMALL += ["--numa", "local", "--batch-size", "32", "--jobs", "1"]

EXAMPLE = """
system: [retrieval, oasiskv]
workload: {batch_size: [8, 64]}
policy:
  block_size_tokens: 16
  fetch_cap: [0.1, 1]
  lookahead_k: 2
"""


def test_flags_override_the_file_and_any_key_of_a_file_may_be_a_list(
    oasis: Oasis, tiny_trace: Path, tmp_path: Path
) -> None:
    (tmp_path / "experiment.yaml").write_text(EXAMPLE)
    arguments = ("sweep", "experiment.yaml", "--trace", str(tiny_trace), "--batch-size", "16", "--jobs", "1", "--json")
    rows = oasis(*arguments).document["rows"]
    assert {row["workload.batch_size"] for row in rows} == {16}
    assert [(row["system"], row["policy.fetch_cap"]) for row in rows] == [
        ("retrieval", 0.1),
        ("retrieval", 1.0),
        ("oasiskv", 0.1),
        ("oasiskv", 1.0),
    ]


def test_a_sweeps_config_asks_for_the_same_sweep(oasis: Oasis, tiny_trace: Path, tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text(EXAMPLE)
    first = oasis(
        "sweep",
        "experiment.yaml",
        "--trace",
        str(tiny_trace),
        "--set",
        "policy.gather_ctas=32",
        "--jobs",
        "1",
        "--json",
    ).document
    again = oasis("sweep", f"{first['out']}/config.yaml", "--jobs", "1", "--json").document
    assert again == first


def test_results_do_not_depend_on_the_number_of_jobs(oasis: Oasis, tiny_trace: Path, tmp_path: Path) -> None:
    arguments = ("sweep", "--trace", str(tiny_trace), *GRID, "--numa", "local", "--json", "--quiet")
    one = oasis(*arguments, "--jobs", "1", "--out", "one").document
    two = oasis(*arguments, "--jobs", "2", "--out", "two").document
    assert one["rows"] == two["rows"]
    assert one["best"] == two["best"]
    assert (tmp_path / "one" / "results.parquet").read_bytes() == (tmp_path / "two" / "results.parquet").read_bytes()


def test_a_folder_of_another_sweep_is_refused(oasis: Oasis, tiny_trace: Path) -> None:
    arguments = ("sweep", "--trace", str(tiny_trace), "--system", "quest", "--out", "here", "--quiet")
    assert oasis(*arguments, "--block-size", "16").code == 0
    refused = oasis(*arguments, "--block-size", "32")
    assert refused.code == 2
    assert "here holds another experiment" in refused.err
    assert oasis(*arguments, "--block-size", "16").code == 0


LONG = ["--system", "prefetch-previous,oasiskv", "--block-size", "8,16", "--batch-size", "32", "--numa", "local"]
LONG += ["--quiet"]
"""60 points: long enough to be stopped in the middle."""


def _start(environment: dict[str, str], folder: Path, trace: Path, jobs: int) -> subprocess.Popen[str]:
    return _spawn(environment, folder, ["sweep", "--trace", str(trace), "--out", "run", "--jobs", str(jobs), *LONG])


def _spawn(environment: dict[str, str], folder: Path, arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "oasis_sim", *arguments],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )


def _wait_for_points(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    points = folder / "run" / "points.jsonl"
    while time.monotonic() < deadline:
        if points.exists() and points.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.02)
    raise AssertionError(f"no {count} points after 60 s")


def test_a_killed_sweep_resumes_to_the_same_table(
    oasis: Oasis, environment: dict[str, str], tiny_trace: Path, tmp_path: Path
) -> None:
    process = _start(environment, tmp_path, tiny_trace, jobs=1)
    _wait_for_points(tmp_path, 3)
    process.kill()
    process.communicate()
    points = tmp_path / "run" / "points.jsonl"
    kept = points.read_bytes().count(b"\n")
    assert not (tmp_path / "run" / "results.parquet").exists()
    with open(points, "ab") as handle:
        handle.write(b'{"point_key": "torn')
    arguments = ("sweep", "--trace", str(tiny_trace), *LONG, "--jobs", "1")
    assert oasis(*arguments, "--out", "run").code == 0
    assert oasis(*arguments, "--out", "whole").code == 0
    assert (tmp_path / "run" / "results.parquet").read_bytes() == (tmp_path / "whole" / "results.parquet").read_bytes()
    lines = points.read_bytes().splitlines()
    assert len(lines) == len({json.loads(line)["point_key"] for line in lines}) > kept


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_exits_130_and_keeps_finished_points(
    environment: dict[str, str], tiny_trace: Path, tmp_path: Path, jobs: int
) -> None:
    process = _start(environment, tmp_path, tiny_trace, jobs)
    _wait_for_points(tmp_path, 1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert err.startswith("interrupted: ")
    assert err.endswith(" of 60 points stay in run; repeat the command to go on\n")
    assert (tmp_path / "run" / "points.jsonl").read_bytes().count(b"\n") >= 1
    assert not (tmp_path / "run" / "results.parquet").exists()
    assert not (tmp_path / "run" / ".lock").exists()


SERVED = ["--system", "dense", "--model", "Qwen3-0.6B", "--quiet"]
SERVED += ["--set", "serving.arrivals=poisson", "--set", "serving.rate_per_s=1"]
SERVED += ["--set", "serving.prompt_tokens=900", "--set", "serving.output_tokens=4"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_in_a_serving_sweep_keeps_finished_points_and_it_goes_on(
    oasis: Oasis, environment: dict[str, str], tiny_trace: Path, tmp_path: Path, jobs: int
) -> None:
    """The first points are short, the last takes half a minute."""
    sweep = ["sweep", "--trace", str(tiny_trace), *SERVED, "--jobs", str(jobs), "--out", "run"]
    sweep += ["--set", "serving.num_requests=100,101,102,60000"]
    process = _spawn(environment, tmp_path, sweep)
    _wait_for_points(tmp_path, 3)
    time.sleep(0.5)  # a point is counted after it is written
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert err == "interrupted: 3 of 4 points stay in run; repeat the command to go on\n"
    points, requests = tmp_path / "run" / "points.jsonl", tmp_path / "run" / "requests"
    kept = points.read_bytes()
    assert kept.count(b"\n") == 3
    whole = {path.name: path.read_bytes() for path in requests.glob("*.parquet")}
    assert len(whole) == 3
    process = _spawn(environment, tmp_path, sweep)
    time.sleep(4)
    assert points.read_bytes() == kept
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err.split(";")[0]) == (130, "interrupted: 3 of 4 points stay in run")
    assert {path.name: path.read_bytes() for path in requests.glob("*.parquet")} == whole


def test_ctrl_c_in_a_serving_run_says_how_far_it_was(
    environment: dict[str, str], tiny_trace: Path, tmp_path: Path
) -> None:
    run = ["run", "--trace", str(tiny_trace), *SERVED, "--set", "serving.num_requests=1000000", "--out", "run"]
    process = _spawn(environment, tmp_path, run)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "requests.parquet.part").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert re.fullmatch(
        r"interrupted: [\d,]+ of 1,000,000 requests had been served; a run keeps nothing, repeat the command to start "
        r"anew\n", err,
    ), err  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_an_internal_error_exits_70_and_names_the_file_with_the_traceback(
    oasis: Oasis, tiny_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("a fault of the program")

    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("simulator.points.run_point", broken)
    done = oasis("run", "--trace", str(tiny_trace))
    assert done.code == 70
    assert done.err.count("\n") == 1
    assert done.err.startswith("error: internal: KeyError: 'a fault of the program' (traceback in ")
    (report,) = (tmp_path / "tmp").iterdir()
    assert str(report) in done.err
    assert "in broken" in report.read_text()
    assert not (tmp_path / "runs").exists()


def test_one_broken_point_does_not_end_a_sweep(oasis: Oasis, tiny_trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from simulator import points

    whole = points.run_point

    def broken_at_32(experiment: Any, **options: Any) -> Any:
        if experiment.policy["block_size_tokens"] == 32:
            raise ZeroDivisionError("block 32")
        return whole(experiment, **options)

    few = ["--system", "quest", "--block-size", "16,32", "--batch-size", "32"]
    arguments = ("sweep", "--trace", str(tiny_trace), *few, "--jobs", "1", "--json")
    with monkeypatch.context() as patched:
        patched.setattr("simulator.points.run_point", broken_at_32)
        broken = oasis(*arguments)
    assert broken.code == 0
    assert [row["status"] for row in broken.document["rows"]] == ["ok", "failed"]
    failed = broken.document["rows"][1]
    assert failed["error"].startswith("ZeroDivisionError: block 32 (broken_at_32, test_command_line.py:")
    assert failed["policy.block_size_tokens"] == 32
    assert all(failed[name] is None for name in METRICS)
    assert [row["status"] for row in oasis(*arguments).document["rows"]] == ["ok", "ok"]


@pytest.mark.parametrize("kind", ["models", "hardware", "systems"])
def test_catalog_lists_names(oasis: Oasis, kind: str) -> None:
    rows = oasis("catalog", kind, "--json").document["rows"]
    assert len(rows) >= 6
    assert all(row["name"] for row in rows)
    table = oasis("catalog", kind).out
    assert all(row["name"] in table for row in rows)
    assert max(map(len, table.splitlines())) <= 100


def test_trace_verbs(oasis: Oasis, tiny_trace: Path, tmp_path: Path) -> None:
    info = oasis("trace", "info", str(tiny_trace), "--json").document
    assert info["groups"]["reasoning"]["context_tokens"] == 1024
    assert "1,024 tokens" in oasis("trace", "info", str(tiny_trace)).out
    checked = oasis("trace", "check", str(tiny_trace))
    assert (checked.code, checked.out[:4]) == (0, "ok: ")
    packed = oasis("trace", "pack", str(tiny_trace.with_suffix("")), "copy.zip", "--json").document
    assert packed["bytes"] == (tmp_path / "copy.zip").stat().st_size
    assert (tmp_path / "copy.zip").read_bytes() == tiny_trace.read_bytes()


def test_plot_draws_a_sweep(oasis: Oasis, tiny_trace: Path, tmp_path: Path) -> None:
    folder = oasis("sweep", "--trace", str(tiny_trace), *GRID, "--numa", "local", "--jobs", "1", "--json").document[
        "out"
    ]
    done = oasis("plot", folder)
    assert done.code == 0, done.err
    assert f"{folder}/report.html" in done.out.splitlines()
    assert (tmp_path / folder / "plots" / "roofline.png").read_bytes().startswith(b"\x89PNG")


def test_record_without_torch_names_the_extra(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    (tmp_path / "prompt.txt").write_text("text")
    done = subprocess.run(
        [sys.executable, "-m", "oasis_sim", "record", "prompt.txt", "--model", "smollm2-135m", "--out", "trace"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: record needs torch: pip install '.[gpu]' in a clone\n"
