"""Streams, dependencies and time marks of a decode graph; on a CPU the same calls run in program order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from realhw.device import new_event, new_stream

Engine = Literal["C", "B", "H", "D"]
Host = Callable[[torch.cuda.Stream | None], None]
"""What the CPU does within a run, with the stream that it may enqueue on (none on a CPU)."""
PRIORITY: dict[Engine, int] = {"C": 0, "B": -3, "H": -5, "D": -4}
"""Side work is short and something waits for it: its thread blocks go first."""


class Schedule:
    """Work on engine streams, ordered by named signals."""

    def __init__(self, device: torch.device | str, engines: tuple[Engine, ...] = ("C", "B", "H", "D")) -> None:
        self.on_gpu = torch.device(device).type == "cuda"
        self._engines = engines
        self._streams: dict[Engine, torch.cuda.Stream] = {}
        if self.on_gpu:
            self._streams = {engine: new_stream(PRIORITY[engine]) for engine in engines}
        self._signals: dict[Hashable, torch.cuda.Event] = {}
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._used: dict[Engine, bool] = defaultdict(bool)
        self.mark_parts = False

    @contextmanager
    def on(self, engine: Engine) -> Iterator[None]:
        """Launch on an engine's stream."""
        if not self.on_gpu:
            yield
            return
        with torch.cuda.stream(self._streams[engine]):
            yield

    def signal(self, engine: Engine, name: Hashable) -> None:
        """Everything launched on the engine so far is what waiters of `name` wait for."""
        if self.on_gpu:
            event = new_event()
            event.record(self._streams[engine])
            self._signals[name] = event

    def wait(self, engine: Engine, name: Hashable) -> None:
        """Later launches on the engine wait for the signal; one that was never given is not waited for."""
        event = self._signals.get(name)
        if event is not None:
            self._streams[engine].wait_event(event)

    def mark(self, label: str) -> None:
        """A time stamp on C."""
        if self.on_gpu:
            event = new_event(timing=True, external=True)
            event.record(self._streams["C"])
            self._marks.append((label, event))

    def mark_part(self, label: str) -> None:
        """A time stamp inside a step, where parts are timed."""
        if self.mark_parts:
            self.mark(label)

    def host(self, engine: Engine, act: Host) -> None:
        """The CPU acts here, alone. A graph cannot hold that: `realhw.pieces` can."""
        if self._streams:
            torch.cuda.synchronize()
        act(self._streams.get(engine))
        if self._streams:
            torch.cuda.synchronize()

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """The body as one graph; returns its replay. On a CPU the body itself."""
        if not self.on_gpu:
            return body
        graph = torch.cuda.CUDAGraph()
        self._signals.clear()
        self._marks.clear()
        main = self._streams["C"]
        with torch.cuda.graph(graph, stream=main):
            fork = new_event()
            fork.record(main)
            for engine in self._engines[1:]:
                self._streams[engine].wait_event(fork)
            body()
            for engine in self._engines[1:]:
                self.signal(engine, ("end", engine))
                self.wait("C", ("end", engine))

        return graph.replay

    def marks_s(self) -> list[tuple[str, float]]:
        """Label and seconds since the first mark, of the last replay."""
        torch.cuda.synchronize()
        first = self._marks[0][1]
        return [(label, first.elapsed_time(event) * 1e-3) for label, event in self._marks]
