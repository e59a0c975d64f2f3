"""The rest of first sets on one link: request after request in the background, without what plans fetched meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

import simpy

from simulator.serving.decode_batch import DecodeBatch
from simulator.serving.network import BACKGROUND, PIECE_BYTES, Network, Part
from simulator.serving.request_state import RequestState


@dataclass(frozen=True, slots=True)
class Rest:
    """Of one request."""

    request: RequestState
    batch: DecodeBatch
    """That decodes it, and knows what is left."""
    message_bytes: float
    is_wanted: Callable[[], bool]
    """False once the request has stopped."""
    count: Callable[[int], None]
    """Bytes that are sent."""
    done: Callable[[], None]
    """Everything has come."""


class Trickle:
    """First come, first served. What is left when a request stops is not sent."""

    def __init__(self, env: simpy.Environment, link: Network, block_bytes: int) -> None:
        self.env, self.link, self.block_bytes = env, link, block_bytes
        self._rests: deque[Rest] = deque()
        self._added = env.event()
        env.process(self._serve())

    def add(self, rest: Rest) -> None:
        self._rests.append(rest)
        if not self._added.triggered:
            self._added.succeed()

    def _serve(self) -> Generator[simpy.Event, None, None]:
        while True:
            if not self._rests:
                self._added = self.env.event()
                yield self._added
            rest = self._rests.popleft()
            while rest.is_wanted() and rest.batch.left_blocks(rest.request):
                blocks = min(rest.batch.left_blocks(rest.request), max(1, PIECE_BYTES // self.block_bytes))
                rest.count(blocks * self.block_bytes)
                yield self.link.send((Part(blocks * self.block_bytes, rest.message_bytes),), BACKGROUND)
                if rest.is_wanted():
                    rest.batch.came(rest.request, blocks)
            if rest.is_wanted():
                rest.done()
