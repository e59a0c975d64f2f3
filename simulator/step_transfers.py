"""What a batch moves in every step of a closed run, and the seconds that takes on each link alone.

Each request draws its rows of demand from a seeded offset and wraps over the steady rows, so requests are never in
lockstep. The batch's sum over requests is periodic, a circular correlation of offset counts with the rows: its cost
grows neither with the batch beyond the number of rows nor with the length of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simulator.demand import Demand
from simulator.fetch_path import FetchPath, PerBlock
from simulator.links import transfer_s
from simulator.specs.model import ModelSpec
from simulator.specs.policy import PolicySpec

Float = NDArray[np.float64]


def sum_over_requests(rows: NDArray[np.int32], offsets: NDArray[np.int64], num_steps: int) -> Float:
    """[T, L]: sum over requests i of rows[(offset_i + t) mod n]; `rows` [n, L]. Exact below 2^53."""
    n = rows.shape[0]
    twice = np.concatenate([rows, rows]).astype(np.float64)
    period = np.zeros((n, *rows.shape[1:]))
    for offset, count in enumerate(np.bincount(offsets % n, minlength=n)):
        if count:
            period += count * twice[offset : offset + n]
    return np.asarray(period[np.arange(num_steps) % n])


def batch_rows(demand: Demand, rows: NDArray[np.int32], offsets: NDArray[np.int64], num_steps: int) -> Float:
    """[T, …]: `rows` of the demand, summed over requests."""
    return sum_over_requests(rows[demand.steady_start : demand.steady_stop], offsets, num_steps)


@dataclass(frozen=True, slots=True)
class Transfers:
    """What one GPU moves, [T, full-attention layers]; bytes [T] of the whole replica."""

    first_s: Float
    prefetch_s: Float
    scatter_s: Float
    waits_for_slots: Float
    """1 where a fetch waits for attention to have read its slots."""
    remote_first_s: Float
    remote_prefetch_s: Float
    fallback_s: Float
    """Attention over what heads that fall back to dense read besides."""
    h2d_bytes: Float
    remote_bytes: Float

    @classmethod
    def none(cls, shape: tuple[int, int]) -> Transfers:
        nothing, no_bytes = np.zeros(shape), np.zeros(shape[0])
        return cls(nothing, nothing, nothing, nothing, nothing, nothing, nothing, no_bytes, no_bytes)

    @classmethod
    def of_the_slowest(cls, gpus: Sequence[Transfers]) -> Transfers:
        """What holds GPUs that wait for each other after every layer, and the bytes of all.

        The first queue is waited for in its own layer, so per (step, layer) the longest counts. Prefetches run on while
        a layer waits, so per step it is the GPU with the most of them.
        """

        def slowest(name: str) -> Float:
            return np.asarray(np.max([getattr(gpu, name) for gpu in gpus], axis=0))

        def busiest(name: str) -> Float:
            each = np.stack([getattr(gpu, name) for gpu in gpus])
            return np.asarray(each[each.sum(axis=2).argmax(axis=0), np.arange(each.shape[1])])

        return cls(
            first_s=slowest("first_s"),
            prefetch_s=busiest("prefetch_s"),
            scatter_s=slowest("scatter_s"),
            waits_for_slots=slowest("waits_for_slots"),
            remote_first_s=slowest("remote_first_s"),
            remote_prefetch_s=busiest("remote_prefetch_s"),
            fallback_s=slowest("fallback_s"),
            h2d_bytes=np.sum([gpu.h2d_bytes for gpu in gpus], axis=0),
            remote_bytes=np.sum([gpu.remote_bytes for gpu in gpus], axis=0),
        )


def stream_all(
    model: ModelSpec, policy: PolicySpec, path: FetchPath, kv_len: NDArray[np.int64], batch_size: int
) -> Transfers:
    """The whole KV but the open block, every step.

    Where pieces count, one is a block of all KV heads, as paged systems keep it.
    """
    none = Transfers.none((len(kv_len), model.num_full_attention_layers))
    pieces = np.repeat(
        ((-(-kv_len // policy.block_size_tokens) - 1) * batch_size)[:, None], none.first_s.shape[1], axis=1
    )
    piece_bytes = model.num_kv_heads * path.block_bytes
    seconds = transfer_s(path.link, pieces.astype(np.float64), pieces.astype(np.float64), piece_bytes)
    total_bytes = pieces.sum(axis=1, dtype=np.float64) * piece_bytes * model.tensor_parallel
    return replace(none, prefetch_s=seconds, h2d_bytes=total_bytes)


def fetch(path: FetchPath, demand: Demand, offsets: NDArray[np.int64], num_steps: int) -> Transfers:
    """One GPU's fetches for its batch."""

    def summed(rows: NDArray[np.int32]) -> Float:
        return batch_rows(demand, rows, offsets, num_steps)

    rules, link, block_bytes = path.rules, path.link, path.block_bytes
    fetched, urgent, repaired = (summed(x) for x in (demand.fetched, demand.urgent, demand.repaired))
    runs, urgent_runs, repair_runs = (summed(x) for x in (demand.runs, demand.urgent_runs, demand.repair_runs))
    moved_bytes = (fetched + repaired).sum(axis=1) * block_bytes
    prefetch_s = np.zeros_like(fetched)
    if not rules.prefetches:
        first_s = transfer_s(link, fetched + repaired, runs + repair_runs, block_bytes)
    else:
        prefetch_s = transfer_s(link, fetched - urgent, runs - urgent_runs, block_bytes)
        first_s = transfer_s(link, urgent + repaired, urgent_runs + repair_runs, block_bytes)
    waits_for_slots = (fetched > summed(demand.in_slack)).astype(np.float64)
    arriving = np.zeros_like(fetched)
    k = rules.lookahead_k
    arriving[k:] += (fetched - urgent)[: max(0, num_steps - k)]
    arriving[1:] += urgent[:-1]
    arriving += repaired
    remote_first_s = remote_prefetch_s = np.zeros_like(fetched)
    remote_bytes = np.zeros(num_steps)
    if path.remote is not None:
        fetched, urgent, repaired = (summed(x) for x in demand.from_remote())
        remote_bytes = (fetched + repaired).sum(axis=1) * block_bytes
        if not rules.prefetches:
            remote_first_s = (fetched + repaired) * path.remote.read_s
        else:
            remote_prefetch_s = (fetched - urgent) * path.remote.read_s
            remote_first_s = (urgent + repaired) * path.remote.read_s
    if rules.lands_in_slots:
        first_s, prefetch_s, moved_bytes = np.zeros_like(first_s), np.zeros_like(first_s), np.zeros(num_steps)
    return Transfers(
        fallback_s=_kernel_s(path.fallback, summed(demand.repaired)),
        first_s=first_s,
        prefetch_s=prefetch_s,
        scatter_s=_kernel_s(path.landing, arriving),
        waits_for_slots=waits_for_slots * (not rules.same_step),
        remote_first_s=remote_first_s,
        remote_prefetch_s=remote_prefetch_s,
        h2d_bytes=moved_bytes,
        remote_bytes=remote_bytes,
    )


def write_back(
    model: ModelSpec, policy: PolicySpec, path: FetchPath, kv_len: NDArray[np.int64], tokens_per_step: float,
    offsets: NDArray[np.int64],
) -> tuple[Float, Float]:  # fmt: skip
    """(seconds [T, full-attention layers], bytes [T]) of bringing new KV to its home, as blocks fill or every token.

    On its way through host memory the slower of the two stages counts: pieces follow each other.
    """
    num_steps, size, link = len(kv_len), policy.block_size_tokens, path.write_link
    if policy.write_back == "token":
        pieces = np.full(num_steps, len(offsets) * model.num_kv_heads * tokens_per_step)
    else:
        position = kv_len[0] + offsets[:, None] + np.floor(np.arange(-1, num_steps) * tokens_per_step)[None, :]
        pieces = np.diff(position // size, axis=1).sum(axis=0) * model.num_kv_heads
    per_full_layer = np.repeat(pieces[:, None], model.num_full_attention_layers, axis=1)
    seconds = transfer_s(link, per_full_layer, per_full_layer, path.piece_bytes)
    if link.ops_are == "blocks":
        seconds += per_full_layer * (path.ops_per_piece - 1) * link.op_s
    if path.remote is not None:
        remote_s = per_full_layer * path.remote.write_s
        seconds = remote_s if path.rules.lands_in_slots else np.maximum(seconds, remote_s)
    return seconds, pieces * model.num_full_attention_layers * path.piece_bytes


def _kernel_s(kernel: PerBlock, blocks: Float) -> Float:
    return np.asarray(kernel.t0_s * np.sign(blocks) + kernel.block_s * blocks)
