"""Continuous batching: who decodes, whose prompt goes on, who starts and who must make room. No time in it.

An iteration gives each decoding request one token, then prompts in progress, then the queue, as far as its tokens and
the pools reach. The rules are vLLM's, with these differences: a prompt's memory is taken whole when it starts, and
decoding requests are never left out of an iteration.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Literal

import numpy as np

from simulator.serving.decode_batch import DecodeBatch
from simulator.serving.pools import Int64, Pool, Pools, RequestPools
from simulator.serving.prefix_reuse import PrefixReuse
from simulator.serving.request_state import RequestState
from simulator.serving.work import Batch, Chunk, Finished, Tally
from simulator.specs.serving import ServingSpec

Role = Literal["both", "prefill", "decode"]


class Scheduler:
    def __init__(
        self,
        serving: ServingSpec,
        tables: RequestPools,
        pools: Pools,
        decode: DecodeBatch,
        prefix: PrefixReuse | None = None,
        role: Role = "both",
        link_has_room: Callable[[int], bool] = lambda num_decoding: True,
    ) -> None:
        """`role`: what of a request's life happens here. `link_has_room(n)`: whether n requests may decode together, by
        what they are expected to fetch."""
        self.prefix, self.role = prefix, role
        self._joined: list[RequestState] = []
        """Since the last iteration."""
        self._returned: list[RequestState] = []
        self._stopped: list[RequestState] = []
        self._pulled: list[RequestState] = []
        self.pulling: set[RequestState] = set()
        """Their memory is taken, their KV is on its way."""
        self._stored_bytes = 0
        self.serving, self.tables, self.pools, self.decode = serving, tables, pools, decode
        self._link_has_room = link_has_room
        self.waiting: list[tuple[float, int, RequestState]] = []
        """Heap: the order of the queue; preempted requests come back at their old place."""
        self.prefilling: list[RequestState] = []
        """In order of starting."""
        self.tally = Tally()
        self._growth: Int64 = np.zeros(len(Pool), np.int64)

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.pulling) + len(self.decode)

    @property
    def num_unfinished(self) -> int:
        return self.num_running + len(self.waiting)

    def can_ever_fit(self, request: RequestState) -> bool:
        """Whether an empty replica could serve it to its end."""
        if request.prompt_tokens + request.output_tokens > self.tables.max_tokens:
            return False
        last = self.tables.num_blocks(request.prompt_tokens + request.output_tokens - 1)
        # A preempted request may have to prefill all but its last token again.
        prefill, decode = self.tables.prefill[last], self._decoding(request, request.prompt_tokens, last)
        needed = {"both": (prefill, decode), "prefill": (prefill,), "decode": (decode,)}[self.role]
        return all(self.pools.could_hold(held) for held in needed)

    def submit(self, request: RequestState) -> None:
        heapq.heappush(self.waiting, (*self._priority(request), request))

    def schedule(self) -> Batch:
        """The next iteration, its memory taken. Empty when there is nothing to do."""
        for request in self._pulled:
            self.pulling.remove(request)
            request.is_prefilled = request.is_expected = False
            self._join(request, self.tables.num_blocks(request.kv_len))
        self._pulled.clear()
        out_bytes = self._make_room()
        preempted = out_bytes is not None
        left = self.serving.max_num_batched_tokens - len(self.decode)
        chunks: list[Chunk] = []
        for request in self.prefilling:
            left -= self._add_chunk(request, left, chunks)
        in_bytes, remote_bytes, pulls = 0, 0, []
        # Whoever had to make room would be the first to take it again.
        while not preempted and self.waiting and left > 0 and self.num_running < self.serving.max_num_seqs:
            request = self.waiting[0][-1]
            while not self.num_running and not self.pools.fits(self._held_at_start(request)):
                if not self._drop_swapped():
                    break  # its host memory holds KV that waits to be sent
            held = self._held_at_start(request)
            fits = self.pools.fits(held)
            self.tally.num_short += not fits
            if not fits or (self.num_running and not self._link_has_room(self.num_running + 1)):
                break
            heapq.heappop(self.waiting)
            self.pools.take(held)
            if request.is_prefilled:
                pulls.append(request)
                self.pulling.add(request)
            elif request.swapped_blocks:
                swapped_bytes = int(self.tables.swap_in[request.swapped_blocks])
                self.tally.swapped_bytes += swapped_bytes
                in_bytes += swapped_bytes
                remote_bytes += int(self.tables.remote_swap_in[request.swapped_blocks])
                self._join(request, self.tables.num_blocks(request.kv_len))
                request.swapped_blocks = 0
                left -= 1
            else:
                if self.prefix is not None:
                    in_bytes += self._reuse(request)
                self.prefilling.append(request)
                left -= self._add_chunk(request, left, chunks)
        stored_bytes, self._stored_bytes = self._stored_bytes, 0
        returned, self._returned = tuple(self._returned), []
        stopped, self._stopped = tuple(self._stopped), []
        out_bytes = (out_bytes or 0) + stored_bytes
        return Batch(
            len(self.decode), tuple(chunks), out_bytes, tuple(pulls), returned, in_bytes, remote_bytes, stopped
        )

    def expect(self, request: RequestState) -> bool:
        """Takes the memory of a request that is prefilled elsewhere; False where others wait or it does not fit."""
        held = self.tables.decode[self.tables.num_blocks(request.prefill_target + 1)]
        running = self.num_running
        if self.waiting or running >= self.serving.max_num_seqs or not self.pools.fits(held):
            return False
        if running and not self._link_has_room(running + 1):
            return False
        self.pools.take(held)
        self.pulling.add(request)
        return True

    def sent(self, tokens: int) -> None:
        """Nothing of a request of `tokens` tokens, prefilled here, is needed here any more."""
        staged = np.zeros(len(Pool), np.int64)
        staged[Pool.HOST_KV] = self.tables.prefill[self.tables.num_blocks(tokens), Pool.HOST_KV]
        self.pools.take(-staged)

    def pulled(self, request: RequestState) -> None:
        """The KV that its first decode step needs has arrived; it joins the next iteration."""
        self._pulled.append(request)

    def complete(self, batch: Batch) -> Finished:
        """The iteration has run: tokens come out, prompts move on, finished requests give their memory back."""
        finished = Finished()
        finished.second_token, self._joined = self._joined, []
        finished.resumed = list(finished.second_token)
        finished.num_continued = batch.num_decoding - len(finished.resumed)
        for request, blocks in self.decode.advance():
            held = self._decoding(request, request.prefilled_tokens, blocks)
            self.pools.take(-held)
            self.tally.host_request_peak_bytes = max(self.tally.host_request_peak_bytes, int(held[Pool.HOST_KV]))
            finished.done.append(request)
        for chunk in batch.chunks:
            request = chunk.request
            request.prefilled_tokens += chunk.tokens
            self.tally.prefilled_tokens += chunk.tokens
            if chunk.is_last:
                self._end_prefill(request, finished)
        return finished

    def _end_prefill(self, request: RequestState, finished: Finished) -> None:
        self.prefilling.remove(request)
        blocks = self.tables.num_blocks(request.prefill_target)
        held = self.tables.prefill[blocks]
        if self.prefix is not None:
            self._stored_bytes += self.prefix.keep(request)
        if request.generated_tokens:
            finished.resumed.append(request)
        if request.generated_tokens < 2:
            (finished.second_token if request.generated_tokens else finished.first_token).append(request)
        request.generated_tokens += 1
        if request.generated_tokens == request.output_tokens:
            self.pools.take(-held)
            finished.done.append(request)
        elif self.role == "prefill":
            in_hbm = held.copy()
            in_hbm[Pool.HOST_KV] = 0
            self.pools.take(-in_hbm)
            request.is_prefilled = True
            finished.prefilled.append(request)
        else:
            self.pools.take(self.tables.decode[blocks] - held)
            self._join(request, blocks)

    def _join(self, request: RequestState, blocks: int) -> None:
        self.decode.join(request, blocks)
        self._joined.append(request)

    def _reuse(self, request: RequestState) -> int:
        assert self.prefix is not None
        loaded_bytes = self.prefix.start(request)
        if request.started_s is None:
            request.reused_tokens = request.prefilled_tokens
        return loaded_bytes

    def _add_chunk(self, request: RequestState, left: int, chunks: list[Chunk]) -> int:
        tokens = max(0, min(left, request.prefill_target - request.prefilled_tokens))
        if tokens:
            chunks.append(Chunk(request, tokens, request.prefilled_tokens))
        return tokens

    def _held_at_start(self, request: RequestState) -> Int64:
        """Bytes [pools] that a waiting request takes when it starts."""
        blocks = request.swapped_blocks
        if request.is_prefilled:
            return self._decoding(request, request.prefilled_tokens, self.tables.num_blocks(request.kv_len))
        if blocks:
            return np.asarray(self.tables.decode[self.tables.num_blocks(request.kv_len)] - self.tables.swapped[blocks])
        return np.asarray(self.tables.prefill[self.tables.num_blocks(request.prefill_target)])

    def _decoding(self, request: RequestState, prefilled_tokens: int, blocks: int) -> Int64:
        """Bytes [pools] of a request that decodes with `blocks` blocks and was prefilled with so many tokens."""
        held: Int64 = self.tables.decode[blocks].copy()
        held[Pool.HOST_KV] -= self.decode.behind_bytes(request, prefilled_tokens, blocks)
        return held

    def _make_room(self) -> int | None:
        """Takes the memory that one token more of each decoding request needs; others go where it does not suffice.

        Returns bytes swapped out, None where nobody had to go.
        """
        out_bytes = None
        if not self.decode.growth(self.tables.decode, self._growth):
            return None
        while not self.pools.fits(self._growth):
            # A swap frees nothing outside HBM.
            short_outside = not self.pools.fits_outside_hbm(self._growth)
            if not (short_outside and self._drop_swapped()):
                out_bytes = (out_bytes or 0) + self._preempt(may_swap=not short_outside)
            self.decode.growth(self.tables.decode, self._growth)
        self.pools.take(self._growth)
        self.decode.hold()
        return out_bytes

    def _preempt(self, may_swap: bool) -> int:
        """Sends the last in the order of the queue back to it; returns bytes that it swaps out."""
        request = max([*self.prefilling, *self.decode.requests], key=self._running_priority)
        self.tally.num_preemptions += 1
        request.num_preemptions += 1
        if request in self.prefilling:
            self.prefilling.remove(request)
            self.pools.take(-self.tables.prefill[self.tables.num_blocks(request.prefill_target)])
            self._requeue_without_kv(request)
            return 0
        if request in self._joined:
            self._joined.remove(request)
        else:
            self._stopped.append(request)
        blocks = self.decode.leave(request)
        self.pools.take(-self._decoding(request, request.prefilled_tokens, blocks))
        request.prefilled_tokens = request.kv_len - 1
        stays = self.tables.swapped[blocks]
        if self.serving.preemption == "recompute" or not may_swap or not self.pools.fits(stays):
            self._requeue_without_kv(request)
            return 0
        self.pools.take(stays)
        request.swapped_blocks = blocks
        self.tally.num_swaps += 1
        self.submit(request)
        self.tally.swapped_bytes += int(self.tables.swap_out[blocks])
        return int(self.tables.swap_out[blocks])

    def _requeue_without_kv(self, request: RequestState) -> None:
        self.tally.recomputed_tokens += request.prefilled_tokens
        request.prefilled_tokens = 0
        if self.role == "decode":
            self._returned.append(request)
        else:
            self.submit(request)

    def _drop_swapped(self) -> bool:
        """Frees what the last swapped request in the queue holds outside HBM, which then must prefill again; False
        where there is none."""
        swapped = [entry for entry in self.waiting if entry[-1].swapped_blocks]
        if not swapped:
            return False
        last = max(swapped)
        self.waiting.remove(last)
        heapq.heapify(self.waiting)
        request = last[-1]
        self.pools.take(-self.tables.swapped[request.swapped_blocks])
        request.swapped_blocks = 0
        self._requeue_without_kv(request)
        return True

    def _priority(self, request: RequestState) -> tuple[float, int]:
        if self.serving.scheduler == "fcfs":
            return request.arrival_s, request.index
        return float(request.remaining_tokens), request.index

    def _running_priority(self, request: RequestState) -> tuple[float, int]:
        if self.serving.scheduler == "fcfs" or request in self.prefilling:
            return self._priority(request)
        return float(self.decode.remaining_tokens(request)), request.index
