"""From prefill to decode replicas: what crosses the network when, and what each side holds meanwhile.

Source: full push DistServe (arXiv 2401.09670), layer-wise push Splitwise (arXiv 2311.18677) and Mooncake
(arXiv 2407.00079), first set OasisKV (arXiv 2608.08097).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import simpy

from simulator.serving.network import ADMISSION, BACKGROUND, Network
from simulator.serving.pools import Int64, Pool, RequestPools
from simulator.serving.request_state import RequestState
from simulator.serving.work import Chunk
from simulator.specs.serving import Disaggregation

Events = Generator[simpy.Event, None, None]
IN_HBM = (Pool.SPARSE_KV, Pool.COMPRESSED_KEYS, Pool.DRAFT_KV)


@dataclass(slots=True)
class HandoverTally:
    num_requests: int = 0
    admission_bytes: int = 0
    """Over the network before a request could decode, all GPUs of the replica."""
    wait_s: float = 0.0
    """Between the last prefill chunk and the first decode iteration that could have the request."""
    staged_bytes: int = 0
    staged_peak_bytes: int = 0
    """In the host memory of prefill nodes: full KV, from the end of its prefill until its last byte was sent."""


class Handover:
    """Moves KV of prefilled requests. A decode replica takes memory first, then pulls; the rest may follow behind.

    `first-set`: blocks that attention needs before their turn in the background queue came are taken to be there:
    optimistic while the rest is on its way, the bytes are the same.
    """

    def __init__(
        self, env: simpy.Environment, mode: Disaggregation, network: Network, tables: RequestPools, full_kv: Int64,
        num_gpus: int,
    ) -> None:  # fmt: skip
        """`full_kv` [max blocks + 1]: bytes of the whole KV per GPU. `num_gpus`: of a replica."""
        self.env, self.mode, self.network, self.tables, self.num_gpus = env, mode, network, tables, num_gpus
        self.full_kv = full_kv
        self.tally = HandoverTally()
        self._layers_sent: dict[int, list[simpy.Process]] = {}

    def chunk_done(self, chunk: Chunk) -> None:
        """Layer-wise push: a chunk's KV is sent while the next one is computed."""
        if self.mode != "layer-push":
            return
        before, after = (self._full_bytes(tokens) for tokens in (chunk.before, chunk.before + chunk.tokens))
        sent = self.env.process(self.network.send(after - before, ADMISSION))
        self._layers_sent.setdefault(chunk.request.index, []).append(sent)

    def staged(self, request: RequestState) -> None:
        """The prefill side holds the request's KV from now on."""
        self.tally.staged_bytes += self._full_bytes(request.prompt_tokens)
        self.tally.staged_peak_bytes = max(self.tally.staged_peak_bytes, self.tally.staged_bytes)

    def pull(self, request: RequestState) -> Events:
        """Until the request can decode; what may follow then follows by itself."""
        full_bytes = self._full_bytes(request.prompt_tokens)
        admission_bytes = full_bytes
        if self.mode == "layer-push":
            yield self.env.all_of(self._layers_sent.pop(request.index))
        else:
            if self.mode == "first-set":
                admission_bytes = self._first_set_bytes(request)
            yield from self.network.send(admission_bytes, ADMISSION)
        assert request.first_token_s is not None
        self.tally.num_requests += 1
        self.tally.admission_bytes += admission_bytes
        self.tally.wait_s += self.env.now - request.first_token_s
        if admission_bytes < full_bytes:
            self.env.process(self._trickle(full_bytes, self._kv_left_bytes(request)))
        else:
            self.tally.staged_bytes -= full_bytes

    def _trickle(self, staged_bytes: int, left_bytes: int) -> Events:
        yield from self.network.send(left_bytes, BACKGROUND)
        self.tally.staged_bytes -= staged_bytes

    def _full_bytes(self, tokens: int) -> int:
        return self.num_gpus * int(self.full_kv[self.tables.num_blocks(tokens)])

    def _first_set_bytes(self, request: RequestState) -> int:
        """Working set, compressed keys and draft KV, or the whole KV where that is less."""
        held = self.tables.decode[self.tables.num_blocks(request.prompt_tokens)]
        first = self.num_gpus * int(np.sum(held[list(IN_HBM)]))
        return min(first, self._full_bytes(request.prompt_tokens))

    def _kv_left_bytes(self, request: RequestState) -> int:
        blocks = self.tables.num_blocks(request.prompt_tokens)
        return self._full_bytes(request.prompt_tokens) - self.num_gpus * int(self.tables.decode[blocks, Pool.SPARSE_KV])
