"""From prefill to decode replicas: what crosses the network when, and what each side holds meanwhile.

Source: full push DistServe (arXiv 2401.09670), layer-wise push Splitwise (arXiv 2311.18677) and Mooncake
(arXiv 2407.00079), first set OasisKV (arXiv 2608.08097).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import simpy

from simulator.serving.handover_bytes import HandoverBytes, Parts
from simulator.serving.left_behind import LeftBehind
from simulator.serving.network import ADMISSION, PULLED, Network, Part
from simulator.serving.request_state import RequestState
from simulator.serving.scheduler import Scheduler
from simulator.serving.trickle import Rest, Trickle
from simulator.serving.work import Chunk
from simulator.specs.serving import Router, ServingSpec

Events = Generator[simpy.Event, None, None]


class Side(Protocol):
    """A replica, as far as handing over goes."""

    number: int
    scheduler: Scheduler

    def submit(self, request: RequestState) -> None: ...

    def wake(self) -> None: ...


def choose(router: Router, index: int, replicas: Sequence[Side]) -> int:
    """Number of the replica that the request of this index goes to."""
    if router == "round-robin":
        return index % len(replicas)
    return min(range(len(replicas)), key=lambda r: replicas[r].scheduler.num_unfinished)


@dataclass(slots=True)
class HandoverTally:
    num_requests: int = 0
    num_handovers: int = 0
    """More than requests where some were prefilled again."""
    num_expected: int = 0
    """Of the handovers, those whose layers could be sent as they were computed."""
    admission_bytes: int = 0
    """Over the network before a request could decode, all GPUs of the replica."""
    asked_bytes: int = 0
    """Of all that was ever sent: what the network must have carried in the end."""


class Handover:
    """Moves KV of prefilled requests. A decode replica takes memory first, then pulls; the rest may follow behind.

    Until its last byte was sent, a request's KV is in the host memory of its prefill replica, taken when its prompt
    starts. After a first set blocks come when a plan first fetches them (`left_behind`), and under `first-set` also by
    themselves (`trickle`); the prefill side keeps everything until all has come or the request is done.
    """

    def __init__(
        self, env: simpy.Environment, serving: ServingSpec, links: Sequence[Network], sizes: HandoverBytes,
        prefill: Sequence[Side], decoding: Sequence[Side], num_layers: int, left: LeftBehind,
    ) -> None:  # fmt: skip
        """`links`: decode replicas use them in turn. `left`: what first sets leave."""
        self.env, self.serving, self.mode = env, serving, serving.disaggregation
        self.links, self.sizes, self.prefill, self.decoding = links, sizes, prefill, decoding
        self.num_layers = num_layers
        self.tally = HandoverTally()
        self._layers: dict[RequestState, simpy.Event] = {}
        """Of requests that are sent as they are computed: arrival of what was computed so far."""
        self.left = left
        self._kept: dict[RequestState, tuple[int | None, int]] = {}
        """Prefill replica and tokens of requests that have not all of their KV yet."""
        self._trickles = [Trickle(env, link, sizes.block_bytes) for link in links]

    def computing(self, chunk: Chunk, seconds: float) -> None:
        """An iteration of this length prefills `chunk`. Layer-wise push: a layer's KV goes once it is computed, if the
        decode side has memory for the request; layers are taken to be equally long."""
        request = chunk.request
        if self.mode != "layer-push" or request.generated_tokens + 1 == request.output_tokens:
            return
        blocks_of = self.sizes.tables.num_blocks
        before, after = blocks_of(chunk.before), blocks_of(chunk.before + chunk.tokens)
        if not request.is_expected:
            request.replica = choose(self.serving.router, request.index, self.decoding)
            request.is_expected = self.decoding[request.replica].scheduler.expect(request)
            if not request.is_expected:
                return
            self._send(request, self.sizes.whole(before), ADMISSION)
        parts = self.sizes.whole(after, before)
        layer_s = seconds / self.num_layers
        # A link serves in order, so the last chunk's arrival is that of all.
        self._layers[request] = self._send(
            request, parts, ADMISSION, num_pieces=self.num_layers, first_s=self.env.now + layer_s, gap_s=layer_s
        )

    def prefilled(self, request: RequestState) -> None:
        """The prefill side holds all of the request's KV from now on."""
        request.prefilled_s = self.env.now
        if request.is_expected:
            self.env.process(self._await_layers(request))
            return
        request.replica = choose(self.serving.router, request.index, self.decoding)
        self.decoding[request.replica].submit(request)

    def pull(self, request: RequestState) -> None:
        """The decode side has taken the request's memory."""
        self.env.process(self._pull(request))

    def prefill_again(self, request: RequestState) -> None:
        """A decoding request made room for others, its KV is gone."""
        self.stopped(request)
        request.prefill_replica = choose(self.serving.router, request.index, self.prefill)
        self.prefill[request.prefill_replica].submit(request)

    def stopped(self, request: RequestState) -> None:
        """A request does not decode any more: nothing that was left behind is needed."""
        pulled_bytes, request.pulled_blocks = request.pulled_blocks * self.sizes.block_bytes, 0
        request.network_bytes += pulled_bytes
        self._all_came(request)

    def _all_came(self, request: RequestState) -> None:
        if request in self._kept:
            self._sent(*self._kept.pop(request))

    def fetching(self, replica: int, num_bytes: int) -> None:
        """An iteration of a decode replica fetches so many bytes of blocks, of all GPUs, from the prefill side. What it
        waits for is its own business; admissions wait behind it."""
        self.tally.asked_bytes += num_bytes
        self._link(replica).send((Part(num_bytes, float(self.sizes.block_bytes)),), PULLED)

    def _await_layers(self, request: RequestState) -> Events:
        yield self._layers.pop(request)
        self.tally.num_expected += 1
        parts = self.sizes.whole(self.sizes.tables.num_blocks(request.prefilled_tokens))
        self._sent(request.prefill_replica, request.prefilled_tokens)
        self._arrived(request, parts)

    def _pull(self, request: RequestState) -> Events:
        blocks = self.sizes.tables.num_blocks(request.prefilled_tokens)
        kept = request.prefill_replica, request.prefilled_tokens
        leaves = self.mode in ("first-set", "pull")
        first = self.sizes.first_set(blocks) if leaves else self.sizes.whole(blocks)
        yield self._send(request, first, ADMISSION)
        if leaves:
            request.left_blocks = int(self.left.gap_blocks[blocks])
            self._kept[request] = kept
        else:
            self._sent(*kept)
        self._arrived(request, first)
        if self.mode == "first-set":
            self._trickles[request.replica % len(self.links)].add(
                Rest(
                    request,
                    self.decoding[request.replica].scheduler.decode,
                    self.sizes.rest_message_bytes(blocks),
                    is_wanted=lambda: self._kept.get(request) is kept,
                    count=lambda num_bytes: self._count(request, num_bytes),
                    done=lambda: self._all_came(request),
                )
            )

    def _send(
        self, request: RequestState, parts: Parts, priority: int, num_pieces: int = 1, first_s: float | None = None,
        gap_s: float = 0.0,
    ) -> simpy.Event:  # fmt: skip
        self._count(request, sum(part.num_bytes for part in parts))
        return self._link(request.replica).send(parts, priority, num_pieces, first_s, gap_s)

    def _count(self, request: RequestState, num_bytes: int) -> None:
        request.network_bytes += num_bytes
        self.tally.asked_bytes += num_bytes

    def _link(self, replica: int) -> Network:
        return self.links[replica % len(self.links)]

    def _arrived(self, request: RequestState, admission: Parts) -> None:
        """Decoding may start."""
        assert request.prefilled_s is not None
        self.tally.num_handovers += 1
        self.tally.admission_bytes += sum(part.num_bytes for part in admission)
        if request.handover_s is None:
            self.tally.num_requests += 1
            request.handover_s = self.env.now - request.prefilled_s
        if request.first_token_s is None:
            request.first_token_s = request.last_token_s = self.env.now
        replica = self.decoding[request.replica]
        replica.scheduler.pulled(request)
        replica.wake()

    def _sent(self, prefill_replica: int | None, tokens: int) -> None:
        """The last byte of a request of `tokens` tokens has left its prefill replica."""
        assert prefill_replica is not None
        replica = self.prefill[prefill_replica]
        replica.scheduler.sent(tokens)
        replica.wake()
