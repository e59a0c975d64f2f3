"""Progress on stderr: of a sweep its points, of a serving run its requests; done, elapsed and left."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_STARTING = "starting (the first run compiles its kernels)"


def _bar(unit: str, quiet: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{unit},"),
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=Console(stderr=True),
        disable=quiet or not sys.stderr.isatty(),
        transient=True,
    )


class PointProgress:
    """A bar on a terminal; when stderr is a file or a pipe, one line as the sweep starts. Held in `with`."""

    def __init__(self, num_points: int, num_done: int, quiet: bool) -> None:
        self._quiet, self._num_points, self._num_done = quiet, num_points, num_done
        self._bar = _bar("points", quiet)

    def __enter__(self) -> Self:
        if not self._quiet and not sys.stderr.isatty():
            resumed = f", {self._num_done} of them from an earlier run" if self._num_done else ""
            print(f"simulating {self._num_points} points{resumed}", file=sys.stderr)
        self._bar.start()
        self._task = self._bar.add_task(_STARTING, total=self._num_points, completed=self._num_done)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def advance(self, rows: Sequence[dict[str, Any]]) -> None:
        self._bar.update(self._task, description="simulating", advance=len(rows))


class RequestProgress:
    """The same for the requests of one serving run."""

    EVERY = 64
    """Requests between two updates: a run may finish thousands a second."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._bar = quiet, _bar("requests", quiet)
        self.served = "no request had been served"

    def __enter__(self) -> Self:
        if not self._quiet and not sys.stderr.isatty():
            print("serving requests", file=sys.stderr)
        self._bar.start()
        self._task = self._bar.add_task(_STARTING, total=None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def update(self, num_done: int, num_requests: int) -> None:
        self.served = f"{num_done:,} of {num_requests:,} requests had been served"
        if num_done % self.EVERY == 0:
            self._bar.update(self._task, description="serving", completed=num_done, total=num_requests)


class StepProgress:
    """The same for the steps of a timeline."""

    def __init__(self, num_steps: int, quiet: bool) -> None:
        self._quiet, self._num_steps, self._bar = quiet, num_steps, _bar("steps", quiet)

    def __enter__(self) -> Self:
        if not self._quiet and not sys.stderr.isatty():
            print(f"timeline of {self._num_steps:,} steps", file=sys.stderr)
        self._bar.start()
        self._task = self._bar.add_task("timeline", total=self._num_steps)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def update(self, num_done: int) -> None:
        self._bar.update(self._task, completed=num_done)
