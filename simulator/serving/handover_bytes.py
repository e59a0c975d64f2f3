"""What of a prefilled request crosses the network, and in messages of which size. Pure functions of its length."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simulator.capacity import kv_bytes_in_hbm, low_rank_key_bytes, slots_held
from simulator.cost import moved_block_bytes
from simulator.serving.network import Part
from simulator.serving.pools import Int64, Pool, RequestPools
from simulator.specs.model import ModelSpec
from simulator.specs.policy import KV_BYTES_PER_ELEMENT, PolicySpec

Parts = tuple[Part, ...]


def kept_kv(model: ModelSpec, policy: PolicySpec, tables: RequestPools) -> Int64:
    """[max blocks + 1] bytes per GPU of the KV that decoding needs: all of it, or what a system that drops keeps, or
    values and low-rank keys."""
    if policy.residency == "drop":
        return tables.decode[:, Pool.SPARSE_KV]
    if policy.key_rank is None:
        return tables.prefill[:, Pool.FULL_KV]
    lengths = range(0, len(tables.decode) * tables.block_size_tokens, tables.block_size_tokens)
    keys = [low_rank_key_bytes(model, policy, tokens) if tokens else 0 for tokens in lengths]
    return tables.decode[:, Pool.HOST_KV] + np.array(keys, np.int64)


def staging_tables(model: ModelSpec, policy: PolicySpec, tables: RequestPools) -> RequestPools:
    """Tables of a prefill replica: its host memory holds what crosses, from a prompt's start until it is sent."""
    prefill = tables.prefill.copy()
    prefill[:, Pool.HOST_KV] = kept_kv(model, policy, tables)
    prefill[:, Pool.HOST_KV] += tables.decode[:, (Pool.COMPRESSED_KEYS, Pool.DRAFT_KV)].sum(axis=1)
    return replace(tables, prefill=prefill)


class HandoverBytes:
    """Bytes of all GPUs of a replica, by length in blocks.

    In every mode all KV that decoding needs crosses, and with it what prefill made besides: compressed keys and the
    draft head's KV (which decode could not make without the model's hidden states). Modes differ in when.

    Messages, an assumption: where HBM pages hold the KV, one is a block of all KV heads of a layer, as paged engines
    address it. KV that lives on the host lies by layer and head on both sides, so a head's part of what is sent is one
    message; a block of the first working set is one, as it goes to a slot.
    """

    def __init__(self, model: ModelSpec, policy: PolicySpec, tables: RequestPools, num_gpus: int) -> None:
        """`model` is one GPU's part; `num_gpus` of a replica."""
        self.model, self.policy, self.tables, self.num_gpus = model, policy, tables, num_gpus
        self.block_bytes = moved_block_bytes(model, policy)
        self._kv = kept_kv(model, policy, tables)
        self._without_slack = policy.model_copy(update={"residency": "exact", "slack_blocks": None})
        self._first_kv: dict[int, int] = {}

    def whole(self, blocks: int, before: int = 0) -> Parts:
        """Everything from `before` blocks on."""
        kv_bytes = self.kv_bytes(blocks) - self.kv_bytes(before)
        return (Part(kv_bytes, self._kv_message_bytes(blocks - before)), *self._made_besides(blocks, before))

    def first_set(self, blocks: int) -> Parts:
        """The working set that attention reads first, compressed keys and draft KV."""
        return (Part(self.first_kv_bytes(blocks), float(self.block_bytes)), *self._made_besides(blocks))

    def rest_message_bytes(self, blocks: int) -> float:
        """Of what `first_set` leaves: runs between its blocks, as if these lay evenly."""
        kept = slots_held(self._without_slack, blocks) + 1
        return float(self.block_bytes * max(1.0, (blocks - kept) / kept))

    def kv_bytes(self, blocks: int) -> int:
        return self.num_gpus * int(self._kv[blocks])

    def first_kv_bytes(self, blocks: int) -> int:
        """K blocks, the open one, windows and low-rank keys; slack is for later arrivals."""
        if blocks not in self._first_kv:
            model, policy, size = self.model, self._without_slack, self.tables.block_size_tokens
            num_kept = slots_held(policy, blocks) + 1
            kept = kv_bytes_in_hbm(model, policy, blocks * size)
            kept -= model.working_set_bytes(num_kept, size, KV_BYTES_PER_ELEMENT[policy.kv_dtype])
            kept += num_kept * model.num_full_attention_layers * model.num_kv_heads * self.block_bytes
            self._first_kv[blocks] = self.num_gpus * min(kept, int(self._kv[blocks]))
        return self._first_kv[blocks]

    def _made_besides(self, blocks: int, before: int = 0) -> Parts:
        table, model = self.tables.decode, self.model
        keys, draft = (int(table[blocks, pool] - table[before, pool]) for pool in (Pool.COMPRESSED_KEYS, Pool.DRAFT_KV))
        heads = model.num_kv_heads
        layers = max(1, model.num_full_attention_layers)
        return (
            Part(self.num_gpus * keys, max(1.0, keys / (layers * heads))),
            Part(self.num_gpus * draft, max(1.0, draft / heads)),
        )

    def _kv_message_bytes(self, blocks: int) -> float:
        return float(self.block_bytes * (max(1, blocks) if self.policy.offloads else self.model.num_kv_heads))
