"""Every way to end: streams that are full, closed, unread or narrow; Ctrl-C and SIGTERM at any moment."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oasis_sim.interruption import told_on_interruption
from tests.oasis_sim.conftest import Oasis

FEW = ["--system", "dense", "--batch-size", "1,2", "--jobs", "1", "--quiet"]
SHOWN = [["catalog", "models"], ["catalog", "systems", "--json"]]


def _shell(environment: dict[str, str], folder: Path, line: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`line` in bash, in which "$@" is `oasis-sim` with the arguments."""
    command = ["bash", "-o", "pipefail", "-c", line, "bash", sys.executable, "-m", "oasis_sim", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("arguments", SHOWN, ids=" ".join)
def test_a_full_standard_output_is_one_line(environment: dict[str, str], tmp_path: Path, arguments: list[str]) -> None:
    done = _shell(environment, tmp_path, '"$@" > /dev/full', *arguments)
    message = "error: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, message)


@pytest.mark.parametrize("arguments", SHOWN, ids=" ".join)
@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_nothing(
    environment: dict[str, str], tmp_path: Path, arguments: list[str], closed: str
) -> None:
    done = _shell(environment, tmp_path, f'"$@" {closed}', *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert (">&-" in closed.replace("2>&-", "")) == (done.stdout == "")


def test_a_full_or_closed_standard_error_keeps_the_exit_code(environment: dict[str, str], tmp_path: Path) -> None:
    for stream in ("2>/dev/full", "2>&-"):
        done = _shell(environment, tmp_path, f'"$@" {stream}', "catalog", "nonsense")
        assert (done.returncode, done.stdout) == (2, "")


def test_a_full_standard_output_loses_no_result(environment: dict[str, str], tmp_path: Path, tiny_trace: Path) -> None:
    sweep = ["sweep", "--trace", str(tiny_trace), *FEW, "--out", "run"]
    done = _shell(environment, tmp_path, '"$@" > /dev/full', *sweep)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert (tmp_path / "run" / "results.parquet").exists()


@pytest.mark.parametrize(("batch_size", "code"), [("1,2", 0), ("100000", 2)])
def test_a_reader_that_leaves_changes_no_exit_code(
    environment: dict[str, str], tmp_path: Path, tiny_trace: Path, batch_size: str, code: int
) -> None:
    """Of a sweep whose points do not fit it is 2 with a reader or without."""
    sweep = ["sweep", "--trace", str(tiny_trace), *FEW, "--batch-size", batch_size]
    sweep.remove("1,2")
    sweep.remove("--batch-size")
    for line in ('"$@" | true', '"$@" > /dev/null'):
        done = _shell(environment, tmp_path, line, *sweep, "--out", "run")
        assert (done.returncode, done.stderr) == (code, ""), line


@pytest.mark.parametrize("verb", ["run", "compare", "sweep"])
def test_an_encoding_without_our_signs_shows_plain_ones(
    environment: dict[str, str], tmp_path: Path, tiny_trace: Path, verb: str
) -> None:
    arguments = [verb, "--trace", str(tiny_trace), "--batch-size", "2", "--system", "quest", "--out", "run"]
    if verb == "compare":
        arguments[arguments.index("--system")] = "--systems"
    done = _shell({**environment, "PYTHONIOENCODING": "ascii"}, tmp_path, '"$@"', *arguments)
    assert done.returncode == 0, done.stderr
    assert "written to run" in done.stdout or "run" in done.stdout
    assert done.stdout.isascii()
    assert verb != "run" or "###" in done.stdout


STOPPED = {
    "reproduce": ["reproduce", "--quiet"],
    "sweep": ["sweep", "--quiet"],
    "plot": ["plot", "run"],
    "trace check": ["trace", "check", "smollm2-135m-reasoning"],
    "trace synth": [
        "trace",
        "synth",
        "--from",
        "qwen3-8b-published",
        "--context",
        "65536",
        "--out",
        "t.zarr",
        "--quiet",
    ],
}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("name", STOPPED)
def test_a_signal_while_a_verb_starts_says_interrupted(
    environment: dict[str, str], tmp_path: Path, name: str, number: int, code: int
) -> None:
    """The verb's module is held for a minute as it is imported, so the signal always meets it there."""
    module = f"oasis_sim.verbs.{name.rpartition(' ')[2].replace('check', 'trace')}"
    script = (
        "import importlib.abc, sys, time\n"
        "class Held(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}:\n"
        "            open('held', 'w').close()\n"
        "            time.sleep(60)\n"
        "from oasis_sim.cli import main\n"
        "sys.meta_path.insert(0, Held())\n"
        "main(sys.argv[1:])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, *STOPPED[name]],
        cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    _wait_for(tmp_path / "held")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (code, "", "interrupted\n")


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_stopped_sweep_leaves_no_lock_and_says_one_line(
    oasis: Oasis, environment: dict[str, str], tmp_path: Path, tiny_trace: Path, jobs: str, number: int, code: int
) -> None:
    """Three signals at once are one; nothing of the worker processes is heard; the folder goes on."""
    sweep = ["sweep", "--trace", str(tiny_trace), "--system", "dense,quest", "--out", "run", "--quiet"]
    sweep += ["--block-size", "16", "--batch-size", ",".join(map(str, range(1, 121)))]
    environment = {**environment, "OASIS_SIM_CACHE": str(tmp_path / "cache")}  # nothing of another test's points
    process = subprocess.Popen(
        [sys.executable, "-m", "oasis_sim", *sweep, "--jobs", jobs],
        cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    _wait_for(tmp_path / "run" / "points.jsonl")
    time.sleep(0.1)
    for _ in range(3):
        process.send_signal(number)
        time.sleep(0.01)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, ""), err
    assert err.startswith("interrupted: ")
    assert err.endswith(" of 240 points stay in run; repeat the command to go on\n")
    assert err.count("\n") == 1
    assert not (tmp_path / "run" / ".lock").exists()
    assert oasis(*sweep, "--jobs", "1").code == 0


def test_one_line_only_where_two_layers_tell(oasis: Oasis, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> int:
        with told_on_interruption(lambda: "outer"), told_on_interruption(lambda: "inner"):
            raise KeyboardInterrupt

    monkeypatch.setattr("oasis_sim.verbs.catalog.catalog", stopped)
    for _ in range(2):
        done = oasis("catalog", "models")
        assert (done.code, done.err) == (130, "interrupted: inner\n")
