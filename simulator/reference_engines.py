"""The engines of the slow reference: one operation each, slowed by what else runs, and the queues before H2D and R."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from simulator.engine_rates import B, C, D, H
from simulator.topology import Share

Process = Generator[simpy.Event, Any, Any]
R = 4
"""The engine beyond the host (NIC, NVMe): nothing on the GPU slows it, so it is not in the table of rates."""
ENGINE_NAMES = ("compute", "side stream", "H2D", "D2H", "remote")


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One operation on one engine, for a timeline picture."""

    gpu: int
    engine: str
    kind: str
    step: int
    layer: int
    start_s: float
    end_s: float


class Engines:
    """Engines that slow each other: at most one operation each, re-timed whenever the active set changes."""

    def __init__(self, env: simpy.Environment, rates: NDArray[np.float64], share: Share) -> None:
        self.env, self.rates, self.share = env, rates, share
        self.on_link_change: Callable[[], None] = lambda: None
        self.kind = [0] * 5
        self.left = [0.0] * 5
        self.done: list[simpy.Event | None] = [None] * 5
        self.busy_s = [0.0] * 5
        self.since = env.now
        self.generation = 0

    def _speed(self, engine: int) -> float:
        if engine == R:
            return self.share.remote
        rate = float(self.rates[self.kind[C], self.kind[B], self.kind[H], self.kind[D], engine])
        return rate * self.share.link if engine == H else rate

    def _progress(self) -> None:
        elapsed = self.env.now - self.since
        for engine in range(5):
            if self.done[engine] is not None:
                self.left[engine] -= elapsed * self._speed(engine)
                self.busy_s[engine] += elapsed
        self.since = self.env.now

    def _reschedule(self) -> None:
        self.generation += 1
        active = [e for e in range(5) if self.done[e] is not None]
        if active:
            first = min(active, key=lambda e: self.left[e] / self._speed(e))
            self.env.process(self._finish(first, max(0.0, self.left[first] / self._speed(first)), self.generation))

    def _finish(self, engine: int, after_s: float, generation: int) -> Process:
        yield self.env.timeout(after_s)
        if generation != self.generation:
            return  # the active set changed meanwhile
        self._progress()
        event, self.done[engine], self.kind[engine] = self.done[engine], None, 0
        assert event is not None
        event.succeed()
        self._reschedule()
        if engine in (H, R):
            self.on_link_change()

    def run(self, engine: int, kind: int, work_s: float) -> simpy.Event:
        """Start `work_s` seconds (alone) of work; the event fires when it is done."""
        event = self.env.event()
        if work_s <= 0.0:
            return event.succeed()
        assert self.done[engine] is None, "an engine runs one operation at a time"
        self._progress()
        self.kind[engine], self.left[engine], self.done[engine] = kind, work_s, event
        self._reschedule()
        if engine in (H, R):
            self.on_link_change()
        return event

    def pause(self, engine: int) -> float:
        """Take the running operation off the engine; returns what is left of it."""
        self._progress()
        left, self.done[engine], self.kind[engine] = self.left[engine], None, 0
        self._reschedule()
        if engine in (H, R):
            self.on_link_change()
        return left

    def set_share(self, share: Share) -> None:
        """Some GPU started or stopped transferring: H and R go on at `share` of their solo rates."""
        if share != self.share:
            self._progress()
            self.share = share
            self._reschedule()


class TransferQueues:
    """One engine's two queues: the first before prefetches, which it interrupts and later resumes."""

    def __init__(self, engines: Engines, engine: int, record: Callable[[int, str, int, int, float], None]) -> None:
        self.env, self.engines, self.engine, self.record = engines.env, engines, engine, record
        self.wanted = self.env.event()
        self.first: list[tuple[int, int, float, simpy.Event]] = []
        self.prefetch: list[tuple[int, int, float, simpy.Event]] = []

    def ask(self, queue: list[tuple[int, int, float, simpy.Event]], t: int, layer: int, work_s: float) -> simpy.Event:
        """Queue a transfer; the event fires when it has arrived."""
        done = self.env.event()
        queue.append((t, layer, work_s, done))
        if not self.wanted.triggered:
            self.wanted.succeed()
        return done

    def serve(self) -> Process:
        while True:
            if not self.first and not self.prefetch:
                self.wanted = self.env.event()
                yield self.wanted
            queue = self.first or self.prefetch
            t, layer, work_s, done = queue.pop(0)
            start = self.env.now
            running = self.engines.run(self.engine, 1, work_s)
            if queue is self.first:
                yield running
                self.record(self.engine, "fetch", t, layer, start)
                done.succeed()
                continue
            while not self.first and not running.triggered:
                self.wanted = self.env.event()
                yield running | self.wanted
            self.record(self.engine, "prefetch", t, layer, start)
            if running.triggered:
                done.succeed()
            else:
                self.prefetch.insert(0, (t, layer, self.engines.pause(self.engine), done))
