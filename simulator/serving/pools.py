"""Memory of one replica, per GPU: what each request holds at each length, and what all of them hold together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from simulator.capacity import activations_bytes, request_bytes, weights_bytes
from simulator.remote import reads_beyond_host, remote_pool_bytes
from simulator.specs.experiment import IN_HOST_MEMORY, EngineSpec, PlacementSpec
from simulator.specs.hardware import HardwareSpec
from simulator.specs.model import ModelSpec
from simulator.specs.policy import KV_BYTES_PER_ELEMENT, PolicySpec
from traces.errors import CapacityError

Int64 = NDArray[np.int64]


class Pool(IntEnum):
    """Columns of every array of bytes here. Those before HOST_KV lie in HBM."""

    FULL_KV = 0
    """The whole KV: of every request where residency is everything, elsewhere of requests in prefill."""
    SPARSE_KV = 1
    """K + slack slots and the open block."""
    COMPRESSED_KEYS = 2
    """Or what else the selection keeps of a request."""
    DRAFT_KV = 3
    LOGITS = 4
    HOST_KV = 5
    """Full KV outside HBM, or what the host keeps of KV whose home is beyond it; and KV that was swapped out."""
    REMOTE_KV = 6
    """Full KV beyond the host."""


@dataclass(frozen=True, slots=True)
class RequestPools:
    """Bytes of one request by its length in blocks, int64 [max blocks + 1, pools]; row 0 is nothing."""

    decode: Int64
    prefill: Int64
    """While a prompt is prefilled its whole KV is in HBM: every chunk attends to all of it. What the policy keeps
    outside HBM is written there as it comes. An assumption: no published system says where prefill keeps its KV."""
    swapped: Int64
    """What stays after a swap: everything that is not in HBM anyway moves to the host."""
    swap_out: Int64
    """[max blocks + 1] bytes that a swap moves to the host: what HBM holds and the host does not."""
    swap_in: Int64
    """[max blocks + 1] bytes back."""
    remote_swap_in: Int64
    """Of `swap_in`, what comes from beyond the host: the working set, unless the host has all of it. What a host cache
    of fetched blocks holds of it is not counted on: an assumption."""
    block_size_tokens: int
    max_tokens: int
    """Longest prompt and output."""

    def num_blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size_tokens)


def request_pools(
    model: ModelSpec, policy: PolicySpec, max_tokens: int, placement: PlacementSpec = IN_HOST_MEMORY
) -> RequestPools:
    """Tables up to `max_tokens` tokens."""
    size, in_hbm = policy.block_size_tokens, policy.residency == "everything"
    element = KV_BYTES_PER_ELEMENT[policy.kv_dtype]
    most = -(-max_tokens // size)
    decode, prefill = (np.zeros((most + 1, len(Pool)), np.int64) for _ in range(2))
    for blocks in range(1, most + 1):
        held = request_bytes(model, policy, blocks * size, placement)
        decode[blocks, Pool.FULL_KV if in_hbm else Pool.SPARSE_KV] = held.kv
        decode[blocks, Pool.COMPRESSED_KEYS] = held.compressed_keys
        decode[blocks, Pool.DRAFT_KV] = held.draft_kv
        decode[blocks, Pool.LOGITS] = held.logits
        decode[blocks, Pool.HOST_KV] = held.host_kv
        decode[blocks, Pool.REMOTE_KV] = held.remote_kv
        prefill[blocks] = decode[blocks]
        prefill[blocks, Pool.SPARSE_KV] = 0
        prefill[blocks, Pool.FULL_KV] = model.kv_bytes(blocks * size, element)
    kv = (Pool.FULL_KV, Pool.SPARSE_KV, Pool.COMPRESSED_KEYS, Pool.DRAFT_KV)
    swap_in = decode[:, kv].sum(axis=1)
    swap_out = swap_in - decode[:, Pool.SPARSE_KV] if policy.offloads else swap_in
    swapped = np.zeros_like(decode)
    swapped[:, Pool.HOST_KV] = decode[:, Pool.HOST_KV] + swap_out
    swapped[:, Pool.REMOTE_KV] = decode[:, Pool.REMOTE_KV]
    remote_swap_in = decode[:, Pool.SPARSE_KV] * reads_beyond_host(policy, placement)
    return RequestPools(decode, prefill, swapped, swap_out, swap_in, remote_swap_in, size, max_tokens)


class Pools:
    """Bytes in use by pool, against HBM, host memory and the tier beyond. Bytes taken and given back must match."""

    def __init__(self, hbm_bytes: int, host_bytes: int, remote_bytes: int = 0) -> None:
        self.hbm_bytes, self.host_bytes, self.remote_bytes = hbm_bytes, host_bytes, remote_bytes
        self.used: Int64 = np.zeros(len(Pool), np.int64)
        self.peak: Int64 = np.zeros(len(Pool), np.int64)
        self.hbm_peak_bytes = 0

    @property
    def hbm_used_bytes(self) -> int:
        return int(self.used[: Pool.HOST_KV].sum())

    @property
    def host_used_bytes(self) -> int:
        return int(self.used[Pool.HOST_KV])

    @property
    def host_peak_bytes(self) -> int:
        return int(self.peak[Pool.HOST_KV])

    @property
    def remote_peak_bytes(self) -> int:
        return int(self.peak[Pool.REMOTE_KV])

    def fits(self, more: Int64) -> bool:
        """Whether `more` [pools] (which may give back in one pool what it takes in another) has room."""
        return self.could_hold(self.used + more)

    def could_hold(self, held: Int64) -> bool:
        """Whether `held` [pools] would have room in empty pools."""
        return bool(held[: Pool.HOST_KV].sum() <= self.hbm_bytes) and self._room_outside(held)

    def fits_outside_hbm(self, more: Int64) -> bool:
        return self._room_outside(self.used + more)

    def _room_outside(self, held: Int64) -> bool:
        return bool(held[Pool.HOST_KV] <= self.host_bytes and held[Pool.REMOTE_KV] <= self.remote_bytes)

    def take(self, more: Int64) -> None:
        """Adds `more` [pools], which may be negative: what was taken comes back."""
        self.used += more
        assert (self.used >= 0).all(), f"more was given back than taken: {self.used}"
        np.maximum(self.peak, self.used, out=self.peak)
        self.hbm_peak_bytes = max(self.hbm_peak_bytes, self.hbm_used_bytes)
        assert self.hbm_peak_bytes <= self.hbm_bytes, "HBM overflowed"
        assert self._room_outside(self.used), "memory outside HBM overflowed"


def static_bytes(model: ModelSpec, policy: PolicySpec, max_num_batched_tokens: int) -> int:
    """HBM that is gone before any request: weights (draft head included) and one iteration's activations."""
    return weights_bytes(model, policy) + activations_bytes(model, max_num_batched_tokens)


def make_pools(
    model: ModelSpec, hardware: HardwareSpec, policy: PolicySpec, engine: EngineSpec, max_num_batched_tokens: int,
    num_gpus: int, placement: PlacementSpec = IN_HOST_MEMORY,
) -> Pools:  # fmt: skip
    """Empty pools of one GPU; the host's DRAM and the tier beyond are divided among the `num_gpus` in use.

    Raises CapacityError where weights and activations alone do not fit.
    """
    available = int(hardware.gpu.hbm_bytes.value * engine.hbm_utilization)
    fixed = static_bytes(model, policy, max_num_batched_tokens)
    if fixed >= available:
        raise CapacityError("hbm", fixed, available, 0)
    beyond = 0 if placement.kv_tier == "host" else int(remote_pool_bytes(hardware, placement))
    return Pools(available - fixed, int(hardware.host.dram_bytes.value) // num_gpus, beyond // num_gpus)
