"""The decode step as plain SimPy processes, one event per layer and operation: slow, and obviously right.

`step_kernel.run_step` must agree with it within 1e-9 s a step; it also emits the records of a timeline export.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from simulator import step_layout as at
from simulator.engine_rates import B, C, D, H, Kind
from simulator.step_layout import StepRules, StepWork
from simulator.topology import HostTopology

Process = Generator[simpy.Event, Any, Any]
ENGINE_NAMES = ("compute", "side stream", "H2D", "D2H")


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
    """Four engines that slow each other: at most one operation each, re-timed whenever the active set changes."""

    def __init__(self, env: simpy.Environment, rates: NDArray[np.float64], link_share: float) -> None:
        self.env, self.rates, self.link_share = env, rates, link_share
        self.on_link_change: Callable[[], None] = lambda: None
        self.kind = [0, 0, 0, 0]
        self.left = [0.0] * 4
        self.done: list[simpy.Event | None] = [None] * 4
        self.busy_s = [0.0] * 4
        self.since = env.now
        self.generation = 0

    def _speed(self, engine: int) -> float:
        rate = float(self.rates[self.kind[C], self.kind[B], self.kind[H], self.kind[D], engine])
        return rate * self.link_share if engine == H else rate

    def _progress(self) -> None:
        elapsed = self.env.now - self.since
        for engine in range(4):
            if self.done[engine] is not None:
                self.left[engine] -= elapsed * self._speed(engine)
                self.busy_s[engine] += elapsed
        self.since = self.env.now

    def _reschedule(self) -> None:
        self.generation += 1
        active = [e for e in range(4) if self.done[e] is not None]
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
        if engine == H:
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
        if engine == H:
            self.on_link_change()
        return event

    def pause(self, engine: int) -> float:
        """Take the running operation off the engine; returns what is left of it."""
        self._progress()
        left, self.done[engine], self.kind[engine] = self.left[engine], None, 0
        self._reschedule()
        if engine == H:
            self.on_link_change()
        return left

    def set_link_share(self, share: float) -> None:
        """Another GPU started or stopped transferring: H goes on at `share` of its solo rate."""
        if share != self.link_share:
            self._progress()
            self.link_share = share
            self._reschedule()


class Flags:
    """One event per (step, layer), made on demand."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self.events: dict[tuple[int, int], simpy.Event] = {}
        self.at_s: dict[tuple[int, int], float] = {}

    def event(self, step: int, layer: int) -> simpy.Event:
        return self.events.setdefault((step, layer), self.env.event())

    def set(self, step: int, layer: int) -> None:
        self.at_s[step, layer] = self.env.now
        self.event(step, layer).succeed()


class StepReference:
    """Plays `work` for all its steps; `step_s` [T], `parts_s` [T, 13] and `records` are read afterwards."""

    def __init__(
        self,
        rules: StepRules,
        work: StepWork,
        rates: NDArray[np.float64],
        link_share: float = 1.0,
        gpu: int = 0,
        env: simpy.Environment | None = None,
    ) -> None:
        self.rules, self.work, self.gpu = rules, work, gpu
        self.env = env or simpy.Environment()
        self.engines = Engines(self.env, rates, link_share)
        self.num_steps = work.durations_s.shape[0]
        self.step_s = np.zeros(self.num_steps)
        self.parts_s = np.zeros((self.num_steps, at.NUM_PARTS))
        self.records: list[EngineRecord] = []
        self.qkv, self.selected, self.attention, self.planned, self.first, self.prefetched, self.written = (
            Flags(self.env) for _ in range(7)
        )
        self.link_wanted = self.env.event()
        self.first_ready: list[tuple[int, int, float, simpy.Event]] = []
        self.prefetch_ready: list[tuple[int, int, float, simpy.Event]] = []

    def play(self) -> StepReference:
        self.env.run(until=self.start())
        return self

    def start(self) -> simpy.Process:
        """Start all streams; returns the compute stream's process, which ends with the last step."""
        compute = self.env.process(self._compute())
        for process in (self._side(), self._first(), self._prefetch(), self._write_back(), self._link()):
            self.env.process(process)
        return compute

    def _record(self, engine: int, kind: str, step: int, layer: int, start_s: float) -> None:
        if self.env.now > start_s:
            self.records.append(EngineRecord(self.gpu, ENGINE_NAMES[engine], kind, step, layer, start_s, self.env.now))

    # Compute stream.
    def _compute(self) -> Process:
        for t in range(self.num_steps):
            start = self.env.now
            for phase in (at.SOFTWARE, at.DRAFT, at.SAMPLING):
                yield from self._phase(t, -1, phase, self.work.durations_s[t, phase])
            for layer in range(self.rules.num_layers):
                yield from self._layer(t, layer)
            for phase in (at.LM_HEAD, at.OTHER):
                yield from self._phase(t, -1, phase, self.work.durations_s[t, phase])
            self.step_s[t] = self.env.now - start

    def _phase(self, t: int, layer: int, phase: int, work_s: float) -> Process:
        start = self.env.now
        kind = int(at.PHASE_KIND[phase])
        if kind == Kind.IDLE:
            if work_s > 0:
                yield self.env.timeout(work_s)
        else:
            yield self.engines.run(C, kind, work_s)
        self.parts_s[t, at.PHASE_PART[phase]] += self.env.now - start
        self._record(C, PHASE_NAMES[phase], t, layer, start)

    def _layer(self, t: int, layer: int) -> Process:
        dur = self.work.durations_s[t]
        yield from self._phase(t, layer, at.QKV, dur[at.QKV])
        self.qkv.set(t, layer)
        for phase in (at.SCORE, at.TOPK, at.PLAN):
            yield from self._phase(t, layer, phase, dur[phase] if self.work.selects[layer] else 0.0)
        self.selected.set(t, layer)
        if self.rules.plan_waits and self.work.selects[layer]:
            k = self.rules.lookahead_k
            if self.rules.on_demand:
                yield from self._wait(t, self.selected, self.first, t, layer)
            if self.rules.urgent and t >= 1:
                yield from self._wait(t, self.planned, self.first, t - 1, layer)
            if 0 < k <= t:
                yield from self._wait(t, self.planned, self.prefetched, t - k, layer)
        yield from self._phase(t, layer, at.SCATTER, self.work.scatter_s[t, layer])
        yield from self._phase(t, layer, at.ATTENTION, self.work.attention_s[t, layer])
        self.attention.set(t, layer)
        for phase in (at.FFN, at.ALLREDUCE):
            yield from self._phase(t, layer, phase, dur[phase])

    def _wait(self, t: int, plan: Flags, transfer: Flags, step: int, layer: int) -> Process:
        """Idle until `transfer` (step, layer) is there: first for its plan to exist and reach the host, then for it."""
        start = self.env.now
        yield transfer.event(step, layer)
        ready_s = plan.at_s[step, layer] + float(self.work.durations_s[t, at.HOP])
        end = self.env.now
        planning_s = min(max(ready_s - start, 0.0), end - start)
        self.parts_s[t, at.T_PLAN] += planning_s
        self.parts_s[t, at.T_EXPOSED] += end - start - planning_s
        self._record(C, "wait", t, layer, start)

    # Side stream.
    def _side(self) -> Process:
        for t in range(self.num_steps):
            for layer in range(self.rules.num_layers):
                yield self.qkv.event(t, layer)
                if self.work.selects[layer]:
                    for part, kind, name in (
                        (at.SIDE_SCORE, Kind.SCORE, "score"),
                        (at.SIDE_TOPK, Kind.TOPK, "top-k"),
                        (at.SIDE_PLAN, Kind.TOPK, "plan"),
                    ):
                        start = self.env.now
                        yield self.engines.run(B, kind, self.work.durations_s[t, part])
                        self._record(B, name, t, layer, start)
                self.planned.set(t, layer)

    # Transfers: each queue waits for what its next entry needs, then asks the link for it.
    def _hazards(self, t: int, layer: int, slots: bool) -> Process:
        if slots and self.work.waits_for_slots[t, layer]:
            yield self.attention.event(t, layer)
        if t >= 2:
            yield self.written.event(t - 2, layer)

    def _hop(self, plan: Flags, t: int, layer: int) -> Process:
        ready_s = plan.at_s[t, layer] + float(self.work.durations_s[t, at.HOP])
        if ready_s > self.env.now:
            yield self.env.timeout(ready_s - self.env.now)

    def _first(self) -> Process:
        on_demand = self.rules.on_demand
        plan = self.selected if on_demand else self.planned
        for t in range(self.num_steps):
            for layer in range(self.rules.num_layers):
                yield plan.event(t, layer)
                work_s = float(self.work.first_s[t, layer])
                if not on_demand and self.work.waits_for_slots[t, layer]:
                    yield self.attention.event(t, layer)
                if work_s > 0:
                    yield from self._hazards(t, layer, slots=False)
                    yield from self._hop(plan, t, layer)
                    yield self._ask_link(self.first_ready, t, layer, work_s)
                self.first.set(t, layer)

    def _prefetch(self) -> Process:
        if self.rules.lookahead_k == 0:
            return
        for t in range(self.num_steps):
            for layer in range(self.rules.num_layers):
                yield self.planned.event(t, layer)
                work_s = float(self.work.prefetch_s[t, layer])
                if work_s > 0:
                    yield from self._hazards(t, layer, slots=True)
                    yield from self._hop(self.planned, t, layer)
                    yield self._ask_link(self.prefetch_ready, t, layer, work_s)
                self.prefetched.set(t, layer)

    def _ask_link(
        self, queue: list[tuple[int, int, float, simpy.Event]], t: int, layer: int, work_s: float
    ) -> simpy.Event:
        done = self.env.event()
        queue.append((t, layer, work_s, done))
        if not self.link_wanted.triggered:
            self.link_wanted.succeed()
        return done

    def _link(self) -> Process:
        """The H2D engine: first queue before prefetches, which it interrupts and later resumes."""
        while True:
            if not self.first_ready and not self.prefetch_ready:
                self.link_wanted = self.env.event()
                yield self.link_wanted
            queue = self.first_ready or self.prefetch_ready
            t, layer, work_s, done = queue.pop(0)
            start = self.env.now
            running = self.engines.run(H, 1, work_s)
            if queue is self.first_ready:
                yield running
                self._record(H, "fetch", t, layer, start)
                done.succeed()
                continue
            while not self.first_ready and not running.triggered:
                self.link_wanted = self.env.event()
                yield running | self.link_wanted
            self._record(H, "prefetch", t, layer, start)
            if running.triggered:
                done.succeed()
            else:
                self.prefetch_ready.insert(0, (t, layer, self.engines.pause(H), done))

    def _write_back(self) -> Process:
        for t in range(self.num_steps):
            for layer in range(self.rules.num_layers):
                yield self.qkv.event(t, layer)
                start = self.env.now
                yield self.engines.run(D, 1, float(self.work.write_s[t, layer]))
                self._record(D, "write back", t, layer, start)
                self.written.set(t, layer)


def play_host(
    runs: Sequence[tuple[StepRules, StepWork]],
    rates: NDArray[np.float64],
    topology: HostTopology,
    solo_bytes_per_s: float,
) -> list[StepReference]:
    """All GPUs of a host with link shares that change the moment a transfer starts or ends anywhere.

    What the timeline approximates by shares that are constants of a step.
    """
    env = simpy.Environment()
    gpus = [StepReference(rules, work, rates, gpu=gpu, env=env) for gpu, (rules, work) in enumerate(runs)]

    def share_out() -> None:
        transferring = [gpu.gpu for gpu in gpus if gpu.engines.done[H] is not None]
        for index, share in topology.shares(transferring, solo_bytes_per_s).items():
            gpus[index].engines.set_link_share(share)

    for gpu in gpus:
        gpu.engines.on_link_change = share_out
    env.run(until=env.all_of([gpu.start() for gpu in gpus]))
    return gpus


PHASE_NAMES = (
    "software", "draft", "sampling", "qkv", "score", "top-k", "plan", "wait", "scatter", "attention", "o + ffn",
    "all-reduce", "lm_head", "other", "end",
)  # fmt: skip
