"""The decode step as plain SimPy processes, one event per layer and operation: slow, and obviously right.

`step_kernel.run_step` must agree with it within 1e-9 s a step; it also emits the records of a timeline export.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import simpy
from numpy.typing import NDArray

from simulator import step_layout as at
from simulator.engine_rates import B, C, D, H, Kind
from simulator.reference_engines import ENGINE_NAMES, EngineRecord, Engines, Process, R, TransferQueues
from simulator.step_layout import StepRules, StepWork
from simulator.topology import ALONE, HostTopology, Share, Solo


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
        share: Share = ALONE,
        gpu: int = 0,
        env: simpy.Environment | None = None,
    ) -> None:
        self.rules, self.work, self.gpu = rules, work, gpu
        self.env = env or simpy.Environment()
        self.engines = Engines(self.env, rates, share)
        self.num_steps = work.durations_s.shape[0]
        self.step_s = np.zeros(self.num_steps)
        self.parts_s = np.zeros((self.num_steps, at.NUM_PARTS))
        self.records: list[EngineRecord] = []
        self.on_step: Callable[[int], object] = lambda num_done: None
        self.qkv, self.selected, self.attention, self.planned, self.first, self.prefetched, self.written = (
            Flags(self.env) for _ in range(7)
        )
        self.remote_first, self.remote_prefetched = Flags(self.env), Flags(self.env)
        self.link = TransferQueues(self.engines, H, self._record)
        self.remote = TransferQueues(self.engines, R, self._record)

    def play(self, on_step: Callable[[int], None] | None = None) -> StepReference:
        """Run to the end of the last step; `on_step` hears how many steps are done."""
        self.on_step = on_step or self.on_step
        self.env.run(until=self.start())
        return self

    def start(self) -> simpy.Process:
        """Start all streams; returns the compute stream's process, which ends with the last step."""
        compute = self.env.process(self._compute())
        processes = [self._side(), self._first(), self._prefetch(), self._write_back(), self.link.serve()]
        if self.rules.remote:
            processes += [self._remote_first(), self._remote_prefetch(), self.remote.serve()]
        for process in processes:
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
            self.on_step(t + 1)

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
            if self.rules.prefetches and k <= t:
                yield from self._wait(t, self.planned, self.prefetched, t - k, layer)
        yield from self._phase(t, layer, at.JOIN, dur[at.JOIN] if self.work.selects[layer] else 0.0)
        yield from self._phase(t, layer, at.SCATTER, self.work.scatter_s[t, layer])
        yield from self._phase(t, layer, at.ATTENTION, self.work.attention_s[t, layer])
        self.attention.set(t, layer)
        for phase in (at.FFN, at.ALLREDUCE):
            yield from self._phase(t, layer, phase, dur[phase])

    def _wait(self, t: int, plan: Flags, transfer: Flags, step: int, layer: int) -> Process:
        """Idle until `transfer` (step, layer) is there: first for its plan to exist and reach the host, then for it."""
        start = self.env.now
        yield plan.event(step, layer)
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
                early = self.rules.same_step and not self.rules.stream_buffers and layer > 0
                yield self.qkv.event(t, layer - early)
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

    def _remote_first(self) -> Process:
        """What of a fetch comes from beyond the host, before H2D: R waits for plan, hop and write-back, not H2D."""
        on_demand = self.rules.on_demand
        plan = self.selected if on_demand else self.planned
        for t in range(self.num_steps):
            for layer in range(self.rules.num_layers):
                yield plan.event(t, layer)
                work_s = float(self.work.remote_first_s[t, layer])
                if self.rules.lands_in_slots and not on_demand and self.work.waits_for_slots[t, layer]:
                    yield self.attention.event(t, layer)
                if work_s > 0 or self.work.first_s[t, layer] > 0:
                    yield from self._hazards(t, layer, slots=False)
                    yield from self._hop(plan, t, layer)
                if work_s > 0:
                    yield self.remote.ask(self.remote.first, t, layer, work_s)
                self.remote_first.set(t, layer)

    def _may_prefetch(self, t: int, layer: int) -> Process:
        """Until the plan exists or, streaming, attention has freed a buffer."""
        if not self.rules.stream_buffers:
            yield self.planned.event(t, layer)
            return
        freed_by = t * self.rules.num_layers + layer - self.rules.stream_buffers
        if freed_by >= 0:
            yield self.attention.event(*divmod(freed_by, self.rules.num_layers))

    def _remote_prefetch(self) -> Process:
        if not self.rules.prefetches:
            return
        for t in range(self.num_steps):
            for layer in range(self.rules.num_layers):
                yield from self._may_prefetch(t, layer)
                work_s = float(self.work.remote_prefetch_s[t, layer])
                if work_s > 0 or self.work.prefetch_s[t, layer] > 0:
                    yield from self._hazards(t, layer, slots=self.rules.lands_in_slots)
                    if not self.rules.stream_buffers:
                        yield from self._hop(self.planned, t, layer)
                if work_s > 0:
                    yield self.remote.ask(self.remote.prefetch, t, layer, work_s)
                self.remote_prefetched.set(t, layer)

    def _first(self) -> Process:
        on_demand = self.rules.on_demand
        plan = self.selected if on_demand else self.planned
        for t in range(self.num_steps):
            for layer in range(self.rules.num_layers):
                yield (self.remote_first if self.rules.remote else plan).event(t, layer)
                work_s = float(self.work.first_s[t, layer])
                if not on_demand and self.work.waits_for_slots[t, layer]:
                    yield self.attention.event(t, layer)
                if work_s > 0:
                    if not self.rules.remote:
                        yield from self._hazards(t, layer, slots=False)
                        yield from self._hop(plan, t, layer)
                    yield self.link.ask(self.link.first, t, layer, work_s)
                self.first.set(t, layer)

    def _prefetch(self) -> Process:
        if not self.rules.prefetches:
            return
        for t in range(self.num_steps):
            for layer in range(self.rules.num_layers):
                if self.rules.remote:
                    yield self.remote_prefetched.event(t, layer)
                else:
                    yield from self._may_prefetch(t, layer)
                work_s = float(self.work.prefetch_s[t, layer])
                if work_s > 0:
                    if self.rules.remote:
                        if self.work.waits_for_slots[t, layer]:
                            yield self.attention.event(t, layer)
                    else:
                        yield from self._hazards(t, layer, slots=True)
                        if not self.rules.stream_buffers:
                            yield from self._hop(self.planned, t, layer)
                    yield self.link.ask(self.link.prefetch, t, layer, work_s)
                self.prefetched.set(t, layer)

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
    solo: Solo,
) -> list[StepReference]:
    """All GPUs of a host with link shares that change the moment a transfer starts or ends anywhere.

    What the timeline approximates by shares that are constants of a step.
    """
    env = simpy.Environment()
    gpus = [StepReference(rules, work, rates, gpu=gpu, env=env) for gpu, (rules, work) in enumerate(runs)]

    def share_out() -> None:
        on_link, on_remote = ([gpu.gpu for gpu in gpus if gpu.engines.done[engine] is not None] for engine in (H, R))
        for index, share in topology.shares(on_link, on_remote, solo).items():
            gpus[index].engines.set_share(share)

    for gpu in gpus:
        gpu.engines.on_link_change = share_out
    env.run(until=env.all_of([gpu.start() for gpu in gpus]))
    return gpus


PHASE_NAMES = (
    "software", "draft", "sampling", "qkv", "score", "top-k", "plan", "wait", "join", "scatter", "attention",
    "o + ffn", "all-reduce", "lm_head", "other", "end",
)  # fmt: skip
