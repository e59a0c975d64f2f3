"""What HBM, host memory and the tier beyond must hold for a batch, and the largest batch that fits. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from simulator import draft_heads
from simulator.cost import logit_rows, moved_block_bytes, scored_bytes
from simulator.remote import remote_pool_bytes
from simulator.selectors.table import SELECTORS
from simulator.specs.experiment import IN_HOST_MEMORY, EngineSpec, PlacementSpec
from simulator.specs.hardware import HardwareSpec
from simulator.specs.model import ModelSpec
from simulator.specs.policy import KV_BYTES_PER_ELEMENT, PolicySpec
from traces.errors import CapacityError

PREFILL_CHUNK_TOKENS = 2048
"""Tokens of a prefill chunk whose activations HBM holds. Source: vLLM's default max_num_batched_tokens (2,048)."""
STREAM_BUFFERS = 2
"""Layers whose whole KV fits in HBM where it is streamed: one is read, the next arrives. FlexGen's double buffer."""
STATISTICS_BYTES_PER_BLOCK = 8
"""What a selector that reads attention keeps of a resident block: a mass and a count, four bytes each."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes by pool. A batch of B needs `fixed + B x per_request` of HBM and `B x per_request` of the other pools."""

    weights_bytes: int
    activations_bytes: int
    hbm_per_request_bytes: int
    host_per_request_bytes: int
    hbm_available_bytes: int
    host_available_bytes: int
    remote_per_request_bytes: int = 0
    """Beyond the host."""
    remote_available_bytes: int = 0
    remote_pool: str = "remote"
    """What the pool beyond the host is called."""

    def hbm_bytes(self, batch_size: int) -> int:
        return self.weights_bytes + self.activations_bytes + batch_size * self.hbm_per_request_bytes

    def host_bytes(self, batch_size: int) -> int:
        return batch_size * self.host_per_request_bytes

    def remote_bytes(self, batch_size: int) -> int:
        return batch_size * self.remote_per_request_bytes

    @property
    def max_batch_size(self) -> int:
        largest = (self.hbm_available_bytes - self.weights_bytes - self.activations_bytes) // self.hbm_per_request_bytes
        if self.host_per_request_bytes:
            largest = min(largest, self.host_available_bytes // self.host_per_request_bytes)
        if self.remote_per_request_bytes:
            largest = min(largest, self.remote_available_bytes // self.remote_per_request_bytes)
        return max(0, largest)

    def require(self, batch_size: int) -> None:
        """Raises CapacityError naming the pool that is too small."""
        need = self.hbm_bytes(batch_size)
        if need > self.hbm_available_bytes:
            raise CapacityError("hbm", need, self.hbm_available_bytes, self.max_batch_size)
        need = self.host_bytes(batch_size)
        if need > self.host_available_bytes:
            raise CapacityError("host", need, self.host_available_bytes, self.max_batch_size)
        need = self.remote_bytes(batch_size)
        if need > self.remote_available_bytes:
            raise CapacityError(self.remote_pool, need, self.remote_available_bytes, self.max_batch_size)


def slots_per_head(policy: PolicySpec) -> int:
    """K + slack, without the open block; `policy` is resolved (budget and slack are numbers)."""
    assert policy.kv_budget_tokens is not None
    slack = policy.slack_blocks or 0 if policy.residency in ("slack", "cache") else 0
    return policy.kv_budget_tokens // policy.block_size_tokens + slack


def slots_held(policy: PolicySpec, num_blocks: int) -> int:
    """Of `slots_per_head` those that a context of `num_blocks` blocks fills, the open one aside: memory holds no more,
    and a plan goes over no more."""
    return min(slots_per_head(policy), max(0, num_blocks - 1))


def kv_bytes_in_hbm(model: ModelSpec, policy: PolicySpec, kv_len: int) -> int:
    """KV of one request in HBM: everything, or K + slack slots and the open block per KV head plus full windows."""
    element = KV_BYTES_PER_ELEMENT[policy.kv_dtype]
    if policy.residency == "everything":
        return model.kv_bytes(kv_len, element)
    num_blocks = -(-kv_len // policy.block_size_tokens)
    slots = 1 if policy.residency == "streamed" else slots_held(policy, num_blocks) + 1
    window = min(kv_len, model.sliding_window or 0)
    windows = len(model.sliding_layers) * window * model.kv_bytes_per_token_per_layer(element)
    blocks = model.working_set_bytes(slots, policy.block_size_tokens, element)
    if policy.residency == "streamed":  # beside the open block of every layer
        blocks += STREAM_BUFFERS * kv_len * model.kv_bytes_per_token_per_layer(element)
    return blocks + windows + low_rank_key_bytes(model, policy, kv_len)


def low_rank_key_bytes(model: ModelSpec, policy: PolicySpec, kv_len: int) -> int:
    """Keys of one request as a product of [kv_len, rank] and [rank, H_kv d] per layer, bf16; 0 where keys cross."""
    if policy.key_rank is None:
        return 0
    elements = policy.key_rank * (kv_len + model.num_kv_heads * model.head_dim)
    return 2 * model.num_full_attention_layers * elements


def selection_bytes_in_hbm(model: ModelSpec, policy: PolicySpec, num_blocks: int) -> int:
    """What one request's selection keeps beside the KV: compressed keys, or statistics of resident blocks."""
    reads = "nothing" if policy.selector == "all" else SELECTORS[policy.selector].reads
    if reads == "keys":
        return round(scored_bytes(model, policy, num_blocks))
    if reads == "attention":
        heads = model.num_full_attention_layers * model.num_kv_heads
        return heads * (slots_held(policy, num_blocks) + 1) * STATISTICS_BYTES_PER_BLOCK
    return 0


@dataclass(frozen=True, slots=True)
class RequestBytes:
    """What one request holds at a KV length, per GPU."""

    kv: int
    """In HBM: the whole KV, or K + slack slots and the open block."""
    compressed_keys: int
    """Or, for a selector that reads attention, statistics of resident blocks."""
    draft_kv: int
    """The draft head's own layer, whole context."""
    logits: int
    host_kv: int
    """In host memory: the full KV, or of KV whose home is beyond the host what `policy.host_residency` keeps."""
    remote_kv: int
    """Full KV beyond the host."""

    @property
    def hbm(self) -> int:
        return self.kv + self.compressed_keys + self.draft_kv + self.logits


def request_bytes(
    model: ModelSpec, policy: PolicySpec, kv_len: int, placement: PlacementSpec = IN_HOST_MEMORY
) -> RequestBytes:
    size = policy.block_size_tokens
    num_blocks = -(-kv_len // size)
    blocks_bytes = model.num_full_attention_layers * model.num_kv_heads * moved_block_bytes(model, policy)
    host = remote = 0
    if policy.offloads:
        host = blocks_bytes * num_blocks
    if policy.offloads and placement.kv_tier != "host":
        remote = host
        if policy.host_residency != "full":
            kept = min(num_blocks, (policy.host_cache_tokens or 0) // size)
            host = blocks_bytes * kept
    return RequestBytes(
        kv=kv_bytes_in_hbm(model, policy, kv_len),
        compressed_keys=selection_bytes_in_hbm(model, policy, num_blocks),
        draft_kv=draft_heads.kv_bytes(model, policy, kv_len),
        logits=4 * logit_rows(policy) * model.num_logits,  # fp32
        host_kv=host,
        remote_kv=remote,
    )


def weights_bytes(model: ModelSpec, policy: PolicySpec) -> int:
    """The model, and the draft head where the policy runs one."""
    return model.weight_bytes + draft_heads.head_bytes(model, policy)


def activations_bytes(model: ModelSpec, num_tokens: int) -> int:
    """`num_tokens` rows through the widest layer (gate, up, hidden in and out, bf16), an assumption."""
    return 2 * num_tokens * (2 * model.intermediate + 4 * model.hidden)


def footprint(
    model: ModelSpec, hardware: HardwareSpec, policy: PolicySpec, engine: EngineSpec, kv_len: int, num_gpus: int,
    placement: PlacementSpec = IN_HOST_MEMORY,
) -> Footprint:  # fmt: skip
    """Pools at the longest KV length of the run (`kv_len`), per GPU; those beyond HBM are shared by its `num_gpus`.

    With tensor parallelism `model` is one GPU's shard, and a request is one of the replica's: it has a part on each.
    """
    per_request = request_bytes(model, policy, kv_len, placement)
    remote_available = 0
    if per_request.remote_kv:
        remote_available = int(remote_pool_bytes(hardware, placement)) // num_gpus
    return Footprint(
        weights_bytes=weights_bytes(model, policy),
        activations_bytes=activations_bytes(model, PREFILL_CHUNK_TOKENS),
        hbm_per_request_bytes=per_request.hbm,
        host_per_request_bytes=per_request.host_kv,
        hbm_available_bytes=int(hardware.gpu.hbm_bytes.value * engine.hbm_utilization),
        host_available_bytes=int(hardware.host.dram_bytes.value) // num_gpus,
        remote_per_request_bytes=per_request.remote_kv,
        remote_available_bytes=remote_available,
        remote_pool=placement.kv_tier,
    )
