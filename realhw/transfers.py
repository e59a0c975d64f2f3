"""Fetches by the copy engines beside a decode run: the CPU learns each plan, then enqueues its copies.

A kernel writes a layer's plan to pinned memory; the CPU sees it and enqueues the blocks' copies, then launches the
attention that waits for them (`realhw.pieces`). So the way of the plan to the CPU is paid layer by layer, across steps.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from realhw.copy_engine import HOST_TO_DEVICE, CopyEngine
from realhw.device import new_event
from realhw.flows import Transport
from realhw.kernels.gather.api import gather_blocks
from realhw.kernels.gather.config import GatherConfig
from realhw.kernels.plan.api import Moves
from realhw.kernels.publish.api import FIELD_BITS, publish_fetches
from traces.errors import EnvironmentMissing

UInt64 = NDArray[np.uint64]
Int64 = NDArray[np.int64]

CHUNK_BYTES = 4 << 20
"""The CPU packs the next chunk while the engine copies the one before; smaller ones pay more submissions."""
NUM_CHUNKS = 8
DEADLINE_S = 10.0
"""A plan that has not reached the CPU by then never will: the GPU has failed."""
NOT_YET = -1
NEXT_IN_RUN = (1 << FIELD_BITS) + 1
"""From a code to that of the next block in the next slot."""


class Copies(Protocol):
    """What enqueues copies by address: `CopyEngine`, or memory moves on a CPU."""

    def copy(self, target: int, source: int, num_bytes: int, kind: int, stream: int) -> None: ...
    def copy_batch(self, targets: UInt64, sources: UInt64, sizes: UInt64, stream: int) -> None: ...


class MemoryCopies:
    """Moves memory at once: the copy engine's stand-in on a CPU."""

    def copy(self, target: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        ctypes.memmove(target, source, num_bytes)

    def copy_batch(self, targets: UInt64, sources: UInt64, sizes: UInt64, stream: int) -> None:
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)


def decode_fetches(codes: Int64) -> tuple[Int64, Int64, Int64]:
    """Head, block and slot of `publish_fetches`' codes."""
    field = (1 << FIELD_BITS) - 1
    return codes >> (2 * FIELD_BITS), (codes >> FIELD_BITS) & field, codes & field


def contiguous_runs(codes: Int64) -> tuple[Int64, Int64]:
    """First code and length of each maximal run whose blocks and slots both go up by one, in (head, block) order."""
    ordered = np.sort(codes)
    starts = np.flatnonzero(np.diff(ordered, prepend=-2 * NEXT_IN_RUN) != NEXT_IN_RUN)
    return ordered[starts], np.diff(starts, append=len(ordered))


class CopyTransfers:
    """Fetches of one decode run by the copy engines.

    host [A, L, H, n, 2, P, d], pools[layer] [B*H*slots, 2, P, d]; plans of `distance` steps ahead, at most
    `max_blocks` blocks each.
    """

    def __init__(
        self, transport: Transport, host: torch.Tensor, pools: Sequence[torch.Tensor], num_heads: int,
        slots_per_head: int, num_steps: int, distance: int, max_blocks: int, num_sms: int,
    ) -> None:  # fmt: skip
        device = pools[0].device
        self._on_gpu, num_layers = device.type == "cuda", len(pools)
        self._packs = transport == "ce-contiguous"
        self._pools, self._slots_per_head, self._ring = pools, slots_per_head, distance + 1
        self._engine: Copies = CopyEngine() if self._on_gpu else MemoryCopies()
        pin = self._on_gpu
        self._codes = torch.empty(self._ring, num_layers, max_blocks + 1, dtype=torch.int64, pin_memory=pin)
        self._counts = torch.empty(num_steps, num_layers, 1, dtype=torch.int32, pin_memory=pin)
        self._seen_codes, self._seen_counts = self._codes.numpy(), self._counts.numpy()
        self._block_bytes = pools[0][0].numel() * pools[0].element_size()
        self._host = host
        head = np.arange(num_heads)
        requests, layers, kv_heads, blocks = host.shape[:4]
        self._first_block = ((head // kv_heads % requests) * layers * kv_heads + head % kv_heads) * blocks
        self._layer_blocks = kv_heads * blocks
        if self._packs:
            self._make_staging(pools[0], num_layers if distance else 1, max_blocks, num_sms)
        self.reset()

    def _make_staging(self, pool: torch.Tensor, num_layers: int, max_blocks: int, num_sms: int) -> None:
        """Packed blocks in HBM until their attention, and the chunks that the CPU packs into."""
        shape = (self._ring, num_layers, 1, 1, 1, max_blocks, *pool.shape[1:])
        self._staging = torch.empty(shape, dtype=pool.dtype, device=pool.device)
        self._arrivals = torch.zeros(self._ring, len(self._pools), max_blocks + 1, 3, dtype=torch.int32)
        self._arrivals[..., 1] = torch.arange(max_blocks + 1, dtype=torch.int32)
        self._arrivals = self._arrivals.to(pool.device)
        self._moves: dict[tuple[int, int], Moves] = {}
        words = self._block_bytes // 8
        self._host_words = self._host.view(-1).view(torch.int64).view(-1, words)
        self._chunk_blocks = max(1, CHUNK_BYTES // self._block_bytes)
        self._chunks = torch.empty(NUM_CHUNKS, self._chunk_blocks, words, dtype=torch.int64, pin_memory=self._on_gpu)
        self._chunk_free = [new_event() for _ in range(NUM_CHUNKS)] if self._on_gpu else []
        self._next_chunk = 0
        self._scatter = GatherConfig(num_ctas=4 * num_sms, in_flight_bytes=0, num_warps=4)

    def reset(self) -> None:
        """Nothing published."""
        self._counts.fill_(NOT_YET)
        self._codes.fill_(NOT_YET)

    # -- on the GPU ---------------------------------------------------------------------------------------------

    def publish(self, t: int, layer: int, moves: Moves) -> None:
        """Tell a plan to the CPU."""
        room = len(moves.fetch)
        publish_fetches(moves.fetch, moves.fetch_count, self._codes[t % self._ring, layer], self._counts[t, layer])
        if self._packs:
            self._arrivals[t % self._ring, layer, :room, 0::2].copy_(moves.fetch[:, 0::2])
            self._moves[t, layer] = moves

    def scatter(self, t: int, layer: int) -> None:
        """Packed blocks of plan (t, layer), which have arrived, into their slots; nothing to do for others."""
        if self._packs:
            ring = t % self._ring
            gather_blocks(
                self._staged(t, layer), self._pools[layer], self._arrivals[ring, layer],
                self._moves[t, layer].fetch_count, 0, self._slots_per_head, self._scatter,
            )  # fmt: skip

    def _staged(self, t: int, layer: int) -> torch.Tensor:
        return self._staging[t % self._ring, layer % self._staging.shape[1]]

    # -- on the CPU ---------------------------------------------------------------------------------------------

    def serve(self, t: int, layer: int, stream: torch.cuda.Stream | None) -> None:
        """Wait until plan (t, layer) is known here, then enqueue its copies.

        Raises EnvironmentMissing when no plan comes.
        """
        codes = self._await(t, layer)
        if len(codes):
            if self._packs:
                self._enqueue_packed(t, layer, codes, stream)
            else:
                self._enqueue_runs(layer, codes, stream)

    def _await(self, t: int, layer: int) -> Int64:
        """The plan's codes, once all of them are here; their places are then free for a later plan."""
        seen, deadline = self._seen_counts[t, layer], time.perf_counter() + DEADLINE_S
        while seen[0] == NOT_YET:
            self._require_time(deadline, t, layer)
        codes = self._seen_codes[t % self._ring, layer, : int(seen[0])]
        while len(codes) and codes.min() == NOT_YET:
            self._require_time(deadline, t, layer)
        taken = codes.copy()
        codes[:] = NOT_YET
        return taken

    def _require_time(self, deadline: float, t: int, layer: int) -> None:
        if time.perf_counter() > deadline:
            raise EnvironmentMissing(f"copy engine: no plan of step {t}, layer {layer} after {DEADLINE_S:.0f} s")

    def _blocks(self, layer: int, head: Int64, block: Int64) -> Int64:
        """Where blocks lie in the host KV, in blocks."""
        return self._first_block[head] + layer * self._layer_blocks + block

    def _enqueue_runs(self, layer: int, codes: Int64, stream: torch.cuda.Stream | None) -> None:
        """One batched submission of maximal contiguous runs."""
        first, lengths = contiguous_runs(codes)
        head, block, slot = decode_fetches(first)
        size = self._block_bytes
        targets = self._pools[layer].data_ptr() + (head * self._slots_per_head + slot) * size
        sources = self._host.data_ptr() + self._blocks(layer, head, block) * size
        self._engine.copy_batch(
            targets.astype(np.uint64), sources.astype(np.uint64), (lengths * size).astype(np.uint64), _handle(stream)
        )

    def _enqueue_packed(self, t: int, layer: int, codes: Int64, stream: torch.cuda.Stream | None) -> None:
        """Pack chunk after chunk, each copied while the next is packed."""
        head, block, _ = decode_fetches(codes)
        blocks = torch.from_numpy(self._blocks(layer, head, block))
        target, size = self._staged(t, layer).data_ptr(), self._block_bytes
        for start in range(0, len(blocks), self._chunk_blocks):
            ids = blocks[start : start + self._chunk_blocks]
            chunk = self._chunks[self._next_chunk]
            if self._chunk_free:
                self._chunk_free[self._next_chunk].synchronize()
            torch.index_select(self._host_words, 0, ids, out=chunk[: len(ids)])
            self._engine.copy(target + start * size, chunk.data_ptr(), len(ids) * size, HOST_TO_DEVICE, _handle(stream))
            if self._chunk_free:
                self._chunk_free[self._next_chunk].record(stream)
            self._next_chunk = (self._next_chunk + 1) % NUM_CHUNKS


def _handle(stream: torch.cuda.Stream | None) -> int:
    return stream.cuda_stream if stream is not None else 0
