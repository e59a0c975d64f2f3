"""THE LOOP: SimPy sequences the decode steps of every replica of a host and lets them contend for shared links.

A step's inside is `step_kernel.run_step`; a step is one SimPy timeout. A replica is one GPU, or several that run in
lockstep (tensor parallelism). Link shares are constants of a step: they are recomputed whenever a step starts or ends
on a replica that transfers. A replica alone on its links plays its steps in one go.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import simpy
from numpy.typing import NDArray

from simulator.step_kernel import run_step, run_steps
from simulator.step_layout import H_BUSY, NUM_PARTS, NUM_STEP_COLUMNS, R_BUSY, STEP, new_state
from simulator.step_work import RunWork
from simulator.topology import ALONE, HostTopology, Share, Solo


@dataclass(frozen=True, slots=True)
class TimelineResult:
    """What happened, per replica r and step t."""

    steps_s: NDArray[np.float64]
    """[R, T, 17]: breakdown, step, how long H2D, D2H and the remote engine were busy. Below are views of it."""

    @property
    def parts_s(self) -> NDArray[np.float64]:
        """[R, T, 13] in the order of `simulator.metrics.BREAKDOWN`; sums to `step_s`."""
        return self.steps_s[..., :NUM_PARTS]

    @property
    def step_s(self) -> NDArray[np.float64]:
        """[R, T]."""
        return self.steps_s[..., STEP]

    @property
    def h2d_busy_s(self) -> NDArray[np.float64]:
        """[R, T]."""
        return self.steps_s[..., H_BUSY]

    @property
    def remote_busy_s(self) -> NDArray[np.float64]:
        """[R, T]."""
        return self.steps_s[..., R_BUSY]


class SharedLinks:
    """Which replicas transfer now, and so each one's share of the host's links."""

    def __init__(
        self, topology: HostTopology, solo: Solo, uses_link: Sequence[bool], uses_remote: Sequence[bool]
    ) -> None:
        """`solo`: what a GPU's transfers draw alone. `uses_link`, `uses_remote` [replicas]: who transfers at all."""
        self.topology, self.num_replicas, self.solo = topology, len(uses_link), solo
        self.uses_link, self.uses_remote = uses_link, uses_remote
        self.transferring: set[int] = set()
        self.share: dict[int, Share] = {}

    @classmethod
    def of_runs(cls, topology: HostTopology, runs: Sequence[RunWork]) -> Self:
        return cls(
            topology,
            Solo(max(run.solo.link for run in runs), max(run.solo.remote for run in runs)),
            [bool(run.h2d_bytes.any()) for run in runs],
            [bool(run.remote_read_bytes.any()) for run in runs],
        )

    @property
    def are_shared(self) -> bool:
        return self.num_replicas > 1

    def gpus_of(self, replica: int) -> range:
        size = self.topology.num_gpus // self.num_replicas
        return range(replica * size, (replica + 1) * size)

    def transfers(self, replica: int) -> bool:
        return self.uses_link[replica] or self.uses_remote[replica]

    def begin(self, replica: int) -> Share:
        """A step starts on `replica`; returns its shares, those of its worst-placed GPU."""
        if not self.transfers(replica):
            return ALONE
        if replica not in self.transferring:
            self.transferring.add(replica)
            self._share_out()
        shares = [self.share[gpu] for gpu in self.gpus_of(replica)]
        return Share(min(share.link for share in shares), min(share.remote for share in shares))

    def begin_all(self) -> list[Share]:
        """Shares of each replica when all transfer."""
        self.transferring = {replica for replica in range(self.num_replicas) if self.transfers(replica)}
        self._share_out()
        return [self.begin(replica) for replica in range(self.num_replicas)]

    def end(self, replica: int) -> None:
        self.transferring.discard(replica)
        self._share_out()

    def _share_out(self) -> None:
        def gpus(uses: Sequence[bool]) -> list[int]:
            return [gpu for replica in sorted(self.transferring) if uses[replica] for gpu in self.gpus_of(replica)]

        self.share = self.topology.shares(gpus(self.uses_link), gpus(self.uses_remote), self.solo)


def decode(
    env: simpy.Environment,
    replica: int,
    run: RunWork,
    rates: NDArray[np.float64],
    links: SharedLinks,
    result: TimelineResult,
) -> Generator[simpy.Event, None, None]:
    """One replica's decode loop, the process that the simulation consists of."""
    rules, work = run.rules, run.work
    state = new_state(rules.num_layers, ring=rules.lookahead_k + 3)
    constants = (
        work.durations_s, work.attention_s, work.scatter_s, work.selects, work.first_s, work.prefetch_s, work.write_s,
        work.waits_for_slots, work.remote_first_s, work.remote_prefetch_s, state.counts, state.clock,
        state.planned_at_s, rates, result.steps_s[replica],
    )  # fmt: skip
    num_steps = work.durations_s.shape[0]
    if not links.are_shared or not links.transfers(replica):
        # Nothing that another replica does can change this one's steps: they need no events of their own.
        yield env.timeout(run_steps(num_steps, *rules.flags, *links.begin(replica), *constants))
        return
    for t in range(num_steps):
        step_s = run_step(t, *rules.flags, *links.begin(replica), *constants)
        yield env.timeout(step_s)
    links.end(replica)


def play(runs: Sequence[RunWork], rates: NDArray[np.float64], topology: HostTopology) -> TimelineResult:
    """Play one run per replica (same number of steps) on one host, whose GPUs they divide among them."""
    num_steps = runs[0].work.durations_s.shape[0]
    result = TimelineResult(np.zeros((len(runs), num_steps, NUM_STEP_COLUMNS)))
    env = simpy.Environment()
    links = SharedLinks.of_runs(topology, runs)
    for replica, run in enumerate(runs):
        env.process(decode(env, replica, run, rates, links, result))
    env.run()
    return result
