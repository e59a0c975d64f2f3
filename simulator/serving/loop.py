"""THE SERVING LOOP: requests arrive, replicas iterate. SimPy events: one per arrival and one per iteration.

What an iteration contains is `scheduler`'s choice, how long it takes is `iteration`'s; this file only keeps time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Protocol

import simpy

from simulator.serving.handover import Handover
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
        self.handover: Handover | None = None
        """Between prefill and decode replicas, where they are apart."""
        self.decode_replica: Callable[[RequestState], Replica] = lambda request: self
        """Where a request goes that was prefilled here."""
        self.busy_s = 0.0
        self._arrived = env.event()

    def submit(self, request: RequestState) -> None:
        self.scheduler.submit(request)
        self._wake()

    def _wake(self) -> None:
        if not self._arrived.triggered:
            self._arrived.succeed()

    def serve(self) -> Events:
        """Iterations back to back; asleep while there is nothing to do."""
        while True:
            batch = self.scheduler.schedule()
            for request in batch.pulls:
                self.env.process(self._pull(request))
            if batch.is_empty:
                assert self.scheduler.pulling or not self.scheduler.waiting, "requests wait for an empty replica"
                self.links.end(self.number)
                self._arrived = self.env.event()
                yield self._arrived
                self.times.resume()
                continue
            for chunk in batch.chunks:
                if chunk.request.started_s is None:
                    chunk.request.started_s = self.env.now
            seconds = self.times.run(batch, self.links.begin(self.number))
            yield self.env.timeout(seconds)
            self.busy_s += seconds
            self._completed(batch)

    def _completed(self, batch: Batch) -> None:
        if not self.scheduler.hands_over:
            self.log.iteration(batch)
        finished = self.scheduler.complete(batch)
        for request in finished.first_token:
            request.first_token_s = self.env.now
        for request in finished.done:
            request.finished_s = self.env.now
            self.log.finish(request)
        if self.handover is not None and self.scheduler.hands_over:
            for chunk in batch.chunks:
                self.handover.chunk_done(chunk)
            for request in finished.prefilled:
                self.handover.staged(request)
                self.decode_replica(request).submit(request)

    def _pull(self, request: RequestState) -> Events:
        assert self.handover is not None, "a prefilled request without a way to get its KV"
        yield from self.handover.pull(request)
        self.scheduler.pulled(request)
        self._wake()


def arrive(
    env: simpy.Environment, requests: Iterable[Request], replicas: Sequence[Replica], router: Router, log: RequestLog,
    other_replicas: Sequence[Replica] = (),
) -> Events:  # fmt: skip
    """Each request at its time, to the replica that the router names; it must fit one of `other_replicas` too."""
    for index, request in enumerate(requests):
        if request.arrival_s > env.now:
            yield env.timeout(request.arrival_s - env.now)
        # Adding up delays rounds: never before the clock's own time.
        arrival_s = min(request.arrival_s, env.now)
        state = RequestState(index, arrival_s, request.prompt_tokens, request.output_tokens, request.hash_ids or ())
        log.arrive(state)
        state.replica = choose(router, index, replicas)
        if all(replica.scheduler.can_ever_fit(state) for replica in (replicas[state.replica], *other_replicas)):
            replicas[state.replica].submit(state)
        else:
            log.refuse(state)


def choose(router: Router, index: int, replicas: Sequence[Replica]) -> int:
    """Number of the replica that the request of this index goes to."""
    if router == "round-robin":
        return index % len(replicas)
    return min(range(len(replicas)), key=lambda r: replicas[r].scheduler.num_unfinished)


def serve_all(
    requests: Iterable[Request], make_replicas: Callable[[simpy.Environment], Sequence[Replica]], router: Router,
    log: RequestLog, make_prefill: Callable[[simpy.Environment, Sequence[Replica]], Sequence[Replica]] | None = None,
) -> tuple[Sequence[Replica], Sequence[Replica]]:  # fmt: skip
    """Play all requests to their ends; what happened is in `log` and the replicas, (decoding, prefilling elsewhere).

    `make_prefill(env, decoding replicas)`: replicas that take the requests first and hand them over.
    """
    env = simpy.Environment()
    log.clock = lambda: env.now
    replicas = make_replicas(env)
    prefill = [] if make_prefill is None else make_prefill(env, replicas)
    env.process(arrive(env, requests, prefill or replicas, router, log, replicas[:1]))
    for replica in (*prefill, *replicas):
        env.process(replica.serve())
    env.run()
    return replicas, prefill
