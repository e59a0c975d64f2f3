"""Runs groups of points here or in worker processes and hands their rows back as they finish."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

from traces.errors import InputError

Point = TypeVar("Point")
Row = dict[str, Any]


def num_usable_cores() -> int:
    """Cores that this process may use (a container may allow fewer than the machine has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def checked_num_jobs(num_jobs: int | None) -> int:
    """Processes to use; null: one per usable core. Raises InputError below 1."""
    if num_jobs is not None and num_jobs < 1:
        raise InputError(f"--jobs must be at least 1, got {num_jobs}")
    return num_jobs or num_usable_cores()


def run_groups(
    run_point: Callable[[Point], Row], groups: Sequence[Sequence[Point]], num_jobs: int
) -> Iterator[tuple[int, list[Row]]]:
    """Yield (index of the group, its rows in order) in order of completion.

    The points of a group run one after another in one process, so that they share what it keeps in memory.
    `run_point` must be importable by name: workers are spawned, never forked. An exception of a point ends the run
    with that exception; so does Ctrl-C. In both cases the workers are ended first. Raises `InputError` for
    `num_jobs` below 1.
    """
    if num_jobs < 1:
        raise InputError(f"--jobs must be at least 1, got {num_jobs}")
    num_jobs = min(num_jobs, len(groups))
    if num_jobs <= 1:
        for index, group in enumerate(groups):
            yield index, [run_point(point) for point in group]
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(num_jobs, multiprocessing.get_context("spawn"), initializer=_start_worker)
    try:
        futures = {pool.submit(_run_group, run_point, group): index for index, group in enumerate(groups)}
        for future in as_completed(futures):
            yield futures[future], future.result()
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        raise


def _run_group(run_point: Callable[[Point], Row], group: Sequence[Point]) -> list[Row]:
    return [run_point(point) for point in group]


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and die with it: a killed parent would leave workers waiting for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "started outside a worker process"

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
