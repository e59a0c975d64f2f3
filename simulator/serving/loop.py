"""THE SERVING LOOP: requests arrive, replicas iterate. SimPy events: one per arrival and one per iteration.

What an iteration contains is `scheduler`'s choice, how long it takes is `iteration`'s; this file only keeps time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Protocol

import simpy

from simulator.serving.handover import Handover, choose
from simulator.serving.records import RequestLog
from simulator.serving.request_state import RequestState
from simulator.serving.scheduler import Scheduler
from simulator.serving.usage import Usage
from simulator.serving.work import Batch
from simulator.specs.serving import Router
from simulator.timeline import SharedLinks
from simulator.topology import Share
from traces.workload import Request

Events = Generator[simpy.Event, None, None]


class BatchTimes(Protocol):
    """How long iterations take: `simulator.serving.iteration.Iteration`, or anything else that says so."""

    def resume(self) -> None: ...

    @property
    def pulled_bytes(self) -> int:
        """Of the newest iteration, from prefill replicas."""
        ...

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
        self.busy_s = self.blocked_s = 0.0
        """Of the second: nothing ran, and what waits had no memory."""
        self.host_byte_s = self.request_s = 0.0
        """Integrals over iterations: host memory in use, requests that run."""
        self.usage: Usage | None = None
        """Over time, where it is asked for."""
        self._arrived = env.event()

    def submit(self, request: RequestState) -> None:
        self.scheduler.submit(request)
        self.wake()

    def wake(self) -> None:
        if not self._arrived.triggered:
            self._arrived.succeed()

    def serve(self) -> Events:
        """Iterations back to back; asleep while there is nothing to do."""
        while True:
            batch = self.scheduler.schedule()
            if self.usage is not None:
                self.usage.record(self.number, self.env.now, self.scheduler)
            for request in batch.stopped:
                request.last_token_s = self.env.now
            self._hand_over(batch)
            if batch.is_empty:
                since_s, is_blocked = self.env.now, bool(self.scheduler.waiting)
                assert self.scheduler.pools.used.any() or not is_blocked, "requests wait for an empty replica"
                self.links.end(self.number)
                self._arrived = self.env.event()
                yield self._arrived
                self.blocked_s += (self.env.now - since_s) * is_blocked
                self.times.resume()
                continue
            for chunk in batch.chunks:
                if chunk.request.started_s is None:
                    chunk.request.started_s = self.env.now
            seconds = self.times.run(batch, self.links.begin(self.number))
            if self.handover is not None and self.scheduler.role == "prefill":
                for chunk in batch.chunks:
                    self.handover.computing(chunk, seconds)
            elif self.handover is not None and self.times.pulled_bytes:
                self.handover.fetching(self.number, self.times.pulled_bytes)
            yield self.env.timeout(seconds)
            self.busy_s += seconds
            self.host_byte_s += seconds * self.scheduler.pools.host_used_bytes
            self.request_s += seconds * self.scheduler.num_running
            self._completed(batch, seconds)

    def _hand_over(self, batch: Batch) -> None:
        if self.handover is None:
            return
        for request in batch.pulls:
            self.handover.pull(request)
        for request in batch.returned:
            self.handover.prefill_again(request)

    def _completed(self, batch: Batch, seconds: float) -> None:
        scheduler, now_s = self.scheduler, self.env.now
        if scheduler.role != "prefill":
            self.log.iteration(batch)
        finished = scheduler.complete(batch)
        for request in finished.first_token:
            # One that ends with it is not handed over.
            if scheduler.role != "prefill" or scheduler.serving.first_token == "prefill" or request in finished.done:
                request.first_token_s = request.last_token_s = now_s
        for request in finished.second_token:
            request.second_token_s = request.second_token_s or now_s
        self.log.gaps.add(seconds, finished.num_continued)
        for request in finished.resumed:
            assert request.last_token_s is not None
            self.log.gaps.add(now_s - request.last_token_s)
            request.last_token_s = now_s
        for request in finished.done:
            request.finished_s = now_s
            if self.handover is not None:
                self.handover.stopped(request)
            self.log.finish(request)
        if self.handover is not None:
            for request in finished.prefilled:
                self.handover.prefilled(request)


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
        number = choose(router, index, replicas)
        if other_replicas:
            state.prefill_replica = number
        else:
            state.replica = number
        if all(replica.scheduler.can_ever_fit(state) for replica in (replicas[number], *other_replicas)):
            replicas[number].submit(state)
        else:
            log.refuse(state)


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
    others = replicas[:1] if prefill else ()
    env.process(arrive(env, requests, prefill or replicas, router, log, others))
    for replica in (*prefill, *replicas):
        env.process(replica.serve())
    env.run()
    return replicas, prefill
