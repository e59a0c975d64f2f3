"""The decoding requests of one replica as arrays, so that an iteration's work is a compiled loop over them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.serving import batch_kernel
from simulator.serving.demand_table import DemandTable
from simulator.serving.left_behind import ALL_CAME, LeftBehind
from simulator.serving.pools import Pool
from simulator.serving.request_state import RequestState

Int64 = NDArray[np.int64]

KV_LEN, LEFT, HELD_BLOCKS, ROW, ROW_START, ROW_STOP, PROMPT_BLOCKS, GROUP = range(8)
LEFT_BLOCKS, NEW_BLOCKS, CARRY, PULLED_BLOCKS, NUM_FIELDS = range(8, 13)
"""KV length that the next iteration attends to, output tokens to come, blocks of memory held, next demand row and the
range that it wraps in, blocks prefilled, trace group; blocks of the prompt that are still on the prefill side, that no
plan has fetched yet, what rounding owes, and those that plans fetched from there."""

HOST_KV = int(Pool.HOST_KV)
"""Compiled code takes a plain integer at once, and an enum after a microsecond of looking."""


class DecodeBatch:
    """Requests in order of joining, which decides nothing but ties."""

    def __init__(self, capacity: int, block_size_tokens: int, demand: DemandTable, left: LeftBehind = ALL_CAME) -> None:
        """`left`: what requests do not have of their prompts when they join."""
        self.requests: list[RequestState] = []
        self.block_size_tokens, self.demand, self.left = block_size_tokens, demand, left
        self._columns: Int64 = np.zeros((NUM_FIELDS, capacity), np.int64)
        self._finished: Int64 = np.zeros(capacity, np.int64)

    def __len__(self) -> int:
        return len(self.requests)

    def join(self, request: RequestState, held_blocks: int) -> None:
        """`request` has its first token or more; the last one's KV comes with the next iteration."""
        columns, n = self._columns[:, len(self.requests)], self.demand
        columns[KV_LEN] = request.kv_len
        columns[LEFT] = request.output_tokens - request.generated_tokens
        columns[HELD_BLOCKS] = held_blocks
        columns[ROW], columns[ROW_START], columns[ROW_STOP] = n.first_row(request)
        columns[PROMPT_BLOCKS:] = 0
        if self.left is not ALL_CAME:
            columns[PROMPT_BLOCKS] = -(-request.prefilled_tokens // self.block_size_tokens)
            columns[GROUP] = n.group_of(request)
            columns[LEFT_BLOCKS] = request.left_blocks
            columns[NEW_BLOCKS] = self.left.gap_blocks[columns[PROMPT_BLOCKS]]
        self.requests.append(request)

    def leave(self, request: RequestState) -> int:
        """Takes a request out, its generated tokens up to date; returns the blocks it held."""
        at = self.requests.index(request)
        request.generated_tokens = request.output_tokens - int(self._columns[LEFT, at])
        held = int(self._columns[HELD_BLOCKS, at])
        request.pulled_blocks = int(self._columns[PULLED_BLOCKS, at])
        batch_kernel.remove(np.array([at]), len(self.requests), self._columns)
        del self.requests[at]
        return held

    def left_blocks(self, request: RequestState) -> int:
        """Of its prompt, that have not come from the prefill side."""
        if request not in self.requests:
            return request.left_blocks
        return max(0, int(self._columns[LEFT_BLOCKS, self.requests.index(request)]))

    def came(self, request: RequestState, blocks: int) -> None:
        """So many of what is left have come by themselves."""
        left = max(0, self.left_blocks(request) - blocks)
        if request in self.requests:
            self._columns[LEFT_BLOCKS, self.requests.index(request)] = left
        else:
            request.left_blocks = left

    def behind_bytes(self, request: RequestState, prefilled_tokens: int, blocks: int) -> int:
        """Per GPU, what host memory does not hold of a request of `blocks` blocks that was handed over with so many
        tokens."""
        if self.left is ALL_CAME:
            return 0
        prompt_blocks = -(-prefilled_tokens // self.block_size_tokens)
        return self.left.bytes(self.demand.group_of(request), prompt_blocks, blocks)

    def growth(self, table: Int64, out: Int64) -> bool:
        """out [pools]: bytes that the next iteration needs beyond what is held; False: none."""
        columns, left = self._columns, self.left
        grows: bool = batch_kernel.growth(
            len(self), columns[KV_LEN], columns[HELD_BLOCKS], columns[PROMPT_BLOCKS], columns[GROUP],
            self.block_size_tokens, table, left.gap_bytes, left.brought_bytes, HOST_KV, out,
        )  # fmt: skip
        return grows

    def hold(self) -> None:
        """The bytes of `growth` were taken."""
        batch_kernel.hold(len(self), self._columns[KV_LEN], self._columns[HELD_BLOCKS], self.block_size_tokens)

    def measure(self, num_slots: int, window_tokens: int, totals: Int64, sums: Int64) -> None:
        """What the next iteration reads and fetches: `batch_kernel.measure`."""
        batch_kernel.measure(
            len(self), self._columns[KV_LEN], self._columns[LEFT], self._columns[ROW], self.block_size_tokens,
            self.demand.num_kept, num_slots, window_tokens, self.demand.counts, self.demand.gained_tokens,
            self.demand.row_uses, self.demand.gpus_alike, self.left is not ALL_CAME, self._columns[LEFT_BLOCKS:],
            totals, sums,
        )  # fmt: skip

    def advance(self) -> list[tuple[RequestState, int]]:
        """One token more of each; requests that have all theirs leave, each with the blocks it held."""
        columns, n = self._columns, len(self)
        num_finished = batch_kernel.advance(
            n,
            columns[KV_LEN],
            columns[LEFT],
            columns[ROW],
            columns[ROW_START],
            columns[ROW_STOP],
            self.demand.gained_tokens,
            self._finished,
        )
        if not num_finished:
            return []
        gone = self._finished[:num_finished]
        done = [(self.requests[at], int(columns[HELD_BLOCKS, at])) for at in gone.tolist()]
        for (request, _), at in zip(done, gone.tolist(), strict=True):
            request.pulled_blocks = int(columns[PULLED_BLOCKS, at])
            request.generated_tokens = request.output_tokens
        batch_kernel.remove(gone, n, columns)
        left_over = set(gone.tolist())
        self.requests = [request for at, request in enumerate(self.requests) if at not in left_over]
        return done

    def remaining_tokens(self, request: RequestState) -> int:
        return int(self._columns[LEFT, self.requests.index(request)])
