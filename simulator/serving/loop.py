"""THE SERVING LOOP: requests arrive, replicas iterate. SimPy events: one per arrival and one per iteration.

What an iteration contains is `scheduler`'s choice, how long it takes is `iteration`'s; this file only keeps time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Protocol

import simpy

from simulator.serving.records import RequestLog
from simulator.serving.request_state import RequestState
from simulator.serving.scheduler import Scheduler
from simulator.serving.work import Batch
from simulator.specs.serving import Router
from simulator.timeline import SharedLinks
from simulator.topology import Share
from traces.workload import Request

Events = Generator[simpy.Event, None, None]


class BatchTimes(Protocol):
    """How long iterations take: `simulator.serving.iteration.Iteration`, or anything else that says so."""

    def resume(self) -> None: ...

    def run(self, batch: Batch, share: Share) -> float: ...


class Replica:
    """One copy of the model on its own GPUs: a queue, a batch and a clock."""

    def __init__(
        self, env: simpy.Environment, number: int, scheduler: Scheduler, times: BatchTimes, links: SharedLinks,
        log: RequestLog,
    ) -> None:  # fmt: skip
        self.env, self.number, self.scheduler, self.times, self.links, self.log = (
            env, number, scheduler, times, links, log,
        )  # fmt: skip
        self.busy_s = 0.0
        self._arrived = env.event()

    def submit(self, request: RequestState) -> None:
        self.scheduler.submit(request)
        if not self._arrived.triggered:
            self._arrived.succeed()

    def serve(self) -> Events:
        """Iterations back to back; asleep while there is nothing to do."""
        while True:
            batch = self.scheduler.schedule()
            if batch.is_empty:
                assert not self.scheduler.waiting, "requests wait for an empty replica"
                self.links.end(self.number)
                self._arrived = self.env.event()
                yield self._arrived
                self.times.resume()
                continue
            for chunk in batch.chunks:
                if chunk.request.started_s is None:
                    chunk.request.started_s = self.env.now
            seconds = self.times.run(batch, self.links.begin(self.number))
            self.log.iteration(batch, seconds)
            yield self.env.timeout(seconds)
            self.busy_s += seconds
            finished = self.scheduler.complete(batch)
            for request in finished.first_token:
                request.first_token_s = self.env.now
            for request in finished.done:
                request.finished_s = self.env.now
                self.log.finish(request)


def arrive(
    env: simpy.Environment, requests: Iterable[Request], replicas: Sequence[Replica], router: Router, log: RequestLog
) -> Events:
    """Each request at its time, to the replica that the router names."""
    for index, request in enumerate(requests):
        if request.arrival_s > env.now:
            yield env.timeout(request.arrival_s - env.now)
        # Adding up delays rounds: never before the clock's own time.
        arrival_s = min(request.arrival_s, env.now)
        state = RequestState(index, arrival_s, request.prompt_tokens, request.output_tokens, request.hash_ids or ())
        log.arrive(state)
        state.replica = index % len(replicas)
        if router == "least-loaded":
            state.replica = min(range(len(replicas)), key=lambda r: replicas[r].scheduler.num_unfinished)
        replica = replicas[state.replica]
        if replica.scheduler.can_ever_fit(state):
            replica.submit(state)
        else:
            log.refuse(state)


def serve_all(
    requests: Iterable[Request], make_replicas: Callable[[simpy.Environment], Sequence[Replica]], router: Router,
    log: RequestLog,
) -> Sequence[Replica]:  # fmt: skip
    """Play all requests to their ends; what happened is in `log` and the replicas."""
    env = simpy.Environment()
    log.clock = lambda: env.now
    replicas = make_replicas(env)
    env.process(arrive(env, requests, replicas, router, log))
    for replica in replicas:
        env.process(replica.serve())
    env.run()
    return replicas
