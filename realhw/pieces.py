"""A decode run in pieces: short graphs that the CPU launches one by one, enqueueing copies between them.

What the CPU does inside a run cannot be part of a graph. A graph that waits for it (a kernel that polls a flag) stops
the GPU: the copies that would set the flag queue behind work of the graph itself. Here nothing on the GPU ever waits
for something that is not yet enqueued.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from realhw.device import new_event, num_nodes
from realhw.schedule import Engine, Host, Schedule


class PieceSchedule(Schedule):
    """As `Schedule`, on a GPU: a piece ends where its engine signals, another engine's begins, or the CPU acts."""

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(device, ("C", "B", "H", "D"))
        self._actions: list[Callable[[], None]] = []
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._open: tuple[Engine, torch.cuda.CUDAGraph] | None = None
        self._current: Engine | None = None

    @contextmanager
    def on(self, engine: Engine) -> Iterator[None]:
        """Launch on an engine's stream, into a new piece."""
        outer = self._current
        self._end_piece()
        with torch.cuda.stream(self._streams[engine]):
            self._current = engine
            self._begin_piece()
            yield
            self._end_piece()
        self._current = outer
        self._begin_piece()

    def _begin_piece(self) -> None:
        if self._current is not None:
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            graph.capture_begin(pool=self._pools[self._current])
            self._open = self._current, graph

    def _end_piece(self) -> None:
        """Launch what was captured since the piece began, if anything, at this place of the run."""
        if self._open is None:
            return
        engine, graph = self._open
        self._open = None
        graph.capture_end()
        if num_nodes(graph) == 0:
            return
        graph.instantiate()
        self._graphs.append(graph)
        self._actions.append(partial(_launch, graph, self._streams[engine]))

    def signal(self, engine: Engine, name: Hashable) -> None:
        """Ends the piece: everything launched on the engine so far is what waiters of `name` wait for."""
        self._end_piece()
        event = new_event()
        self._signals[name] = event
        self._actions.append(partial(event.record, self._streams[engine]))
        self._begin_piece()

    def wait(self, engine: Engine, name: Hashable) -> None:
        """The engine's open piece and later ones wait for the signal; one that was never given is not waited for."""
        event = self._signals.get(name)
        if event is not None:
            self._actions.append(partial(self._streams[engine].wait_event, event))

    def host(self, engine: Engine, act: Host) -> None:
        """Ends the piece: the CPU acts here, and may enqueue on the engine's stream."""
        self._end_piece()
        self._actions.append(partial(act, self._streams[engine]))
        self._begin_piece()

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """The body as pieces; returns what launches them in turn."""
        self._actions, self._graphs = [], []
        self._signals.clear()
        self._marks.clear()
        # What pieces of one engine need for themselves they may share: they never run beside each other.
        self._pools = {engine: torch.cuda.graph_pool_handle() for engine in self._engines}
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            try:
                body()
            finally:
                if self._open is not None:
                    self._open[1].capture_end()
                self._open = self._current = None
        actions = self._actions

        def replay() -> None:
            for action in actions:
                action()

        return replay


def _launch(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        graph.replay()
