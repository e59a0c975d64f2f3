from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from simulator.executors import num_usable_cores, run_groups
from tests.simulator.fake_points import crash, process, refuse_three, square
from traces.errors import InputError

GROUPS = [[0, 1], [2], [3, 4, 5], [6]]
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("num_jobs", [1, 2, 9])
def test_every_group_comes_back_once_with_its_rows_in_order(num_jobs: int) -> None:
    done = dict(run_groups(square, GROUPS, num_jobs))
    assert sorted(done) == [0, 1, 2, 3]
    for index, group in enumerate(GROUPS):
        assert done[index] == [{"number": n, "square": n**2} for n in group]


def test_a_group_runs_in_one_worker_process() -> None:
    for _, rows in run_groups(process, GROUPS, 2):
        processes = {row["process"] for row in rows}
        assert len(processes) == 1
        assert os.getpid() not in processes


def test_one_job_runs_here() -> None:
    assert {row["process"] for _, rows in run_groups(process, GROUPS, 1) for row in rows} == {os.getpid()}


def test_no_group_needs_no_worker() -> None:
    assert list(run_groups(square, [], 4)) == []


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_an_error_of_a_point_reaches_the_caller_and_ends_the_workers(num_jobs: int) -> None:
    with pytest.raises(InputError, match="3 cannot be simulated"):
        list(run_groups(refuse_three, GROUPS, num_jobs))
    with pytest.raises(ZeroDivisionError, match="point"):
        list(run_groups(crash, GROUPS, num_jobs))
    deadline = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("num_jobs", [0, -3])
def test_jobs_below_one_are_refused(num_jobs: int) -> None:
    with pytest.raises(InputError, match=f"at least 1, got {num_jobs}"):
        list(run_groups(square, GROUPS, num_jobs))


def test_usable_cores_are_at_least_one_and_no_more_than_there_are() -> None:
    assert 1 <= num_usable_cores() <= (os.cpu_count() or 1)


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to see the workers")
def test_workers_die_with_a_killed_parent() -> None:
    code = (
        "from simulator.executors import run_groups\n"
        "from tests.simulator.fake_points import sleep_for_ever\n"
        "if __name__ == '__main__':\n"
        "    list(run_groups(sleep_for_ever, [[1], [2]], 2))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    deadline = time.monotonic() + 20
    while len(workers := _children(parent.pid)) < 3 and time.monotonic() < deadline:  # two and the resource tracker
        time.sleep(0.05)
    time.sleep(1.0)  # the workers' watch thread starts with their first import
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while any(_is_running(worker) for worker in workers) and time.monotonic() < deadline + 10:
        time.sleep(0.05)
    assert workers
    assert not any(_is_running(worker) for worker in workers)


def _is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
