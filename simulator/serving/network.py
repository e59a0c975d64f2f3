"""The network between prefill and decode hosts: one link, the urgent first, bytes and bursts counted."""

from __future__ import annotations

import heapq
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import simpy

from simulator.remote import nic_message_s
from simulator.specs.hardware import HardwareSpec

PIECE_BYTES = 64_000_000
"""Of the background, which makes way between them: 5 ms of a 100 Gb/s adapter."""
PULLED, ADMISSION, BACKGROUND = 0, 1, 2
"""Order of urgency."""
WINDOW_S = 0.1
"""Over which a burst is measured."""
_SAME_S = 1e-12
"""Times nearer than this are one: sums of floats."""


class Part(NamedTuple):
    """Bytes of a transfer that go in messages of one size."""

    num_bytes: int
    message_bytes: float


class Wire:
    """The adapters that bring KV to a decode host: those of `num_gpus` of its GPUs, at least one, divided among links.

    Each replica has the adapters of its own GPUs as one link; where there are fewer adapters than replicas, several
    replicas share one. Messages of a size take what an adapter was measured to take for many in a row (`nic.messages`);
    adapters work on different messages at a time. A prefill replica has as many GPUs, so it can send as fast as a link
    receives; that it does so to several at once is an assumption.
    """

    def __init__(self, hardware: HardwareSpec, num_gpus: int, num_replicas: int = 1) -> None:
        host, nic = hardware.host, hardware.nic
        gpus = host.num_sockets.value * host.gpus_per_socket.value
        adapters = max(1.0, host.num_sockets.value * nic.per_socket.value * min(1.0, num_gpus / gpus))
        self.nic, self.num_links = nic, min(num_replicas, int(adapters))
        self.num_adapters = adapters / self.num_links
        """Of a link."""
        self.bytes_per_s = self.num_adapters * nic.bytes_per_s.value
        """Of a link, in large messages."""

    def seconds(self, parts: Sequence[Part]) -> float:
        """Of the link, without the time to the first byte."""
        return sum(
            part.num_bytes / part.message_bytes * nic_message_s(self.nic, part.message_bytes) / self.num_adapters
            for part in parts
            if part.num_bytes
        )


class Bursts:
    """Bytes by windows of WINDOW_S; those of a transfer are spread evenly over its time. Added in order of starting."""

    def __init__(self) -> None:
        self._windows: dict[int, float] = {}
        """Those that later transfers may still add to."""
        self._past_peak_bytes, self._num_past = 0.0, 0

    @property
    def peak_bytes(self) -> float:
        return max(self._past_peak_bytes, max(self._windows.values(), default=0.0))

    @property
    def num_windows(self) -> int:
        """With any bytes."""
        return self._num_past + len(self._windows)

    def add(self, start_s: float, seconds: float, num_bytes: int) -> None:
        for past in [window for window in self._windows if (window + 1) * WINDOW_S <= start_s]:
            self._past_peak_bytes = max(self._past_peak_bytes, self._windows.pop(past))
            self._num_past += 1
        at_s, end_s = start_s, start_s + seconds
        while at_s < end_s:
            window = int(at_s / WINDOW_S)
            if (window + 1) * WINDOW_S <= at_s:  # rounded down
                window += 1
            until_s = min(end_s, (window + 1) * WINDOW_S)
            self._windows[window] = self._windows.get(window, 0.0) + num_bytes * (until_s - at_s) / seconds
            at_s = until_s


@dataclass(slots=True)
class Traffic:
    """What crossed the links of a host together."""

    total_bytes: int = 0
    backlog_bytes: int = 0
    """Asked for and not there yet, future layers of a chunk included."""
    backlog_peak_bytes: int = 0
    busy_s: float = 0.0
    """Over all links."""
    awaited_s: float = 0.0
    """Of it, with what requests wait for: all but the background."""
    bursts: Bursts = field(default_factory=Bursts)


@dataclass(slots=True, eq=False)
class Transfer:
    """Equal pieces that become ready one after another, sent in order."""

    priority: int
    num_bytes: int
    num_pieces: int
    piece_s: float
    first_s: float
    """When the first piece is ready."""
    gap_s: float
    done: simpy.Event
    num_sent: int = 0

    @property
    def ready_s(self) -> float:
        """When the next piece is."""
        return self.first_s + self.num_sent * self.gap_s

    def take(self, now_s: float) -> tuple[int, int]:
        """(pieces, bytes) that go now: those ready."""
        before, left = self.num_sent, self.num_pieces - self.num_sent
        pieces = left if self.gap_s == 0 else min(left, int((now_s - self.first_s + _SAME_S) / self.gap_s) + 1 - before)
        pieces = max(1, pieces)
        self.num_sent += pieces
        return pieces, self.num_bytes * self.num_sent // self.num_pieces - self.num_bytes * before // self.num_pieces


class Network:
    """One link: pieces in order of urgency, then of readiness; each has the whole link.

    The time to the first byte of a message shows once, behind a transfer's last piece.
    """

    def __init__(self, env: simpy.Environment, wire: Wire, t0_s: float, traffic: Traffic) -> None:
        self.env, self.wire, self.t0_s, self.traffic = env, wire, t0_s, traffic
        self._num_sends = 0
        self._coming: list[tuple[float, int, Transfer]] = []
        """Heap: next piece not ready yet."""
        self._ready: list[tuple[int, float, int, Transfer]] = []
        """Heap: by priority, then readiness."""
        self._submitted = env.event()
        env.process(self._serve())

    def send(
        self, parts: Sequence[Part], priority: int, num_pieces: int = 1, first_s: float | None = None,
        gap_s: float = 0.0,
    ) -> simpy.Event:  # fmt: skip
        """Event of the last byte's arrival. `num_pieces`: equal, ready from `first_s` (null: now) on, every `gap_s`."""
        num_bytes, done = sum(part.num_bytes for part in parts), self.env.event()
        if not num_bytes:
            return done.succeed()
        seconds = self.wire.seconds(parts) / num_pieces
        ready_s = self.env.now if first_s is None else first_s
        traffic = self.traffic
        traffic.backlog_bytes += num_bytes
        traffic.backlog_peak_bytes = max(traffic.backlog_peak_bytes, traffic.backlog_bytes)
        self._queue(Transfer(priority, num_bytes, num_pieces, seconds, ready_s, gap_s, done))
        if not self._submitted.triggered:
            self._submitted.succeed()
        return done

    def _queue(self, transfer: Transfer) -> None:
        self._num_sends += 1
        heapq.heappush(self._coming, (transfer.ready_s, self._num_sends, transfer))

    def _serve(self) -> Generator[simpy.Event, None, None]:
        env = self.env
        while True:
            while self._coming and self._coming[0][0] <= env.now + _SAME_S:
                ready_s, order, transfer = heapq.heappop(self._coming)
                heapq.heappush(self._ready, (transfer.priority, ready_s, order, transfer))
            if not self._ready:
                self._submitted = env.event()
                if self._coming:
                    yield self._submitted | env.timeout(self._coming[0][0] - env.now)
                else:
                    yield self._submitted
                continue
            transfer = heapq.heappop(self._ready)[-1]
            pieces, num_bytes = transfer.take(env.now)
            is_last = transfer.num_sent == transfer.num_pieces
            seconds = pieces * transfer.piece_s + self.t0_s * is_last
            self.traffic.bursts.add(env.now, seconds, num_bytes)
            yield env.timeout(seconds)
            self.traffic.busy_s += seconds
            self.traffic.awaited_s += seconds * (transfer.priority != BACKGROUND)
            self.traffic.total_bytes += num_bytes
            self.traffic.backlog_bytes -= num_bytes
            if is_last:
                transfer.done.succeed()
            else:
                self._queue(transfer)
