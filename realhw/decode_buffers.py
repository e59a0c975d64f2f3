"""What a run of decode steps keeps in device memory: pools, tables, what a step writes, what its plans decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from realhw.flows import Flow
from realhw.kernels.attention.api import AttentionConfig, attention_scratch, choose_splits
from realhw.kernels.plan.api import BLOCK, Moves, PlanShape, admit, make_slots, plan_scratch
from realhw.kernels.pool.api import pool_blocks
from realhw.kernels.score.api import make_scores
from realhw.step_trace import Int32, StepTrace
from realhw.weights import ModelWeights
from traces.errors import InputError


@dataclass(slots=True)
class LayerState:
    """What one layer keeps between steps. Two of what a step writes while the step before still reads."""

    pool: torch.Tensor
    metadata: torch.Tensor
    table: list[torch.Tensor]
    counts: list[torch.Tensor]
    qkv: list[torch.Tensor]
    fill_slot: list[torch.Tensor] = field(default_factory=list)
    slots: torch.Tensor | None = None
    first_slots: torch.Tensor | None = None
    """Slots, table and counts as they are before step 0."""
    first_table: torch.Tensor | None = None
    first_counts: torch.Tensor | None = None


class DecodeBuffers:
    """Everything that `realhw.runner` reads and writes. Step 0's blocks are admitted; `reset` returns to that.

    host: [A, L, H, n, 2, P, d] pinned KV, shared by requests b with equal b % A; null for flows that move nothing.
    fill: called on every pool and on compressed keys. Raises `InputError` where host KV is needed and too short.
    """

    def __init__(
        self,
        weights: ModelWeights,
        flow: Flow,
        trace: StepTrace,
        num_steps: int,
        host: torch.Tensor | None,
        fill: Callable[[torch.Tensor], None],
        generator: torch.Generator,
    ) -> None:
        self.flow, self.trace, self.num_steps, self.host = flow, trace, num_steps, host
        self.geometry = g = weights.geometry
        self.batch_size = len(trace.offsets)
        self.device, self.dtype = weights.lm_head.device, weights.lm_head.dtype
        self._fill, self._generator = fill, generator
        kv_start = trace.kv_len[trace.offsets]
        self.max_blocks = -(-(int(kv_start.max()) + num_steps) // flow.block_size_tokens)
        if flow.moves and (host is None or host.shape[3] < self.max_blocks):
            have = "none" if host is None else f"{host.shape[3]} blocks a head"
            raise InputError(f"host KV: {have}, need {self.max_blocks}")
        self.slots_per_head = flow.num_slots + 1 if flow.moves else self.max_blocks
        self._make_lengths(kv_start)
        self._make_step_buffers()
        self._admitted: dict[int, Int32] = {}
        if flow.moves:
            for request, offset in enumerate(trace.offsets):
                if int(offset) not in self._admitted:
                    ids = trace.admitted(request, flow.num_kept, flow.block_size_tokens)
                    self._admitted[int(offset)] = ids
        self.layers = [self._make_layer(index) for index in range(g.num_layers)]
        self.moves = self._make_moves()

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)

    def _int(self, values: Int32) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).to(self.device)

    @property
    def num_sms(self) -> int:
        return torch.cuda.get_device_properties(0).multi_processor_count if self.device.type == "cuda" else 4

    def _make_lengths(self, kv_start: Int32) -> None:
        """Per step: KV length with the step's token, blocks that can be selected, tokens in the open block."""
        size = self.flow.block_size_tokens
        kv_len = kv_start[None, :] + np.arange(self.num_steps, dtype=np.int32)[:, None]
        selectable = -(-kv_len // size) - 1
        self.kv_start = self._int(kv_start)
        self.kv_len, self.selectable = self._int(kv_len), self._int(selectable)
        self.open_tokens = self._int(kv_len - selectable * size)
        self.fills = (kv_len % size == 0).any(axis=1).tolist()
        self.clock = torch.zeros(1, dtype=torch.int32, device=self.device)
        heads = self.geometry.num_kv_heads
        self.all_blocks = (self.selectable + 1)[:, :, None].expand(-1, -1, heads).contiguous()

    def _make_step_buffers(self) -> None:
        g, flow, batch = self.geometry, self.flow, self.batch_size
        rows = batch * flow.rows_per_request
        self.hidden = torch.randn(rows, g.hidden_size, device=self.device, dtype=self.dtype, generator=self._generator)
        self.x = self._empty(rows, g.hidden_size)
        self.attended = self._empty(batch, flow.rows_per_request, g.num_q_heads, g.head_dim)
        self.gate_up, self.gated = self._empty(rows, 2 * g.ffn_size), self._empty(rows, g.ffn_size)
        self.o = self._empty(rows, g.hidden_size)
        self.logits = torch.zeros(batch, g.vocab_size, dtype=self.dtype, device=self.device)
        self.tokens = self._empty(batch, dtype=torch.int64)
        heads = batch * g.num_kv_heads
        kept = flow.num_kept
        self.scores = make_scores(batch, g.num_kv_heads, self.max_blocks, self.device)
        self.ids = self._empty(batch, g.num_kv_heads, kept, dtype=torch.int32)
        tokens = self.max_blocks * flow.block_size_tokens
        read = tokens if flow.kind == "dense" else min(tokens, (kept + 1) * flow.block_size_tokens)
        self.splits = choose_splits(heads, read, AttentionConfig().block_n, self.num_sms, flow.rows_per_request)
        self.attention_scratch = attention_scratch(batch, g.num_kv_heads, g.head_dim, self.splits, self.device)
        if flow.moves:
            self.plan_shape = PlanShape(
                kept, flow.num_slots, flow.block_size_tokens, self.max_blocks, max(16, self.num_steps)
            )
            self.plan_scratch = plan_scratch(batch, g.num_kv_heads, self.plan_shape, self.device)
            self.rankings = self._int(self.trace.predicted)
            self.rows = self._int(self.trace.offsets - self.trace.shift)
            self.allowed = self._int(np.array(flow.allowed(self.num_steps), dtype=np.int32))

    def _make_layer(self, index: int) -> LayerState:
        g, flow, batch = self.geometry, self.flow, self.batch_size
        heads, size = batch * g.num_kv_heads, flow.block_size_tokens
        pool = self._empty(heads * self.slots_per_head, 2, size, g.head_dim)
        self._fill(pool)
        metadata = self._empty(batch, g.num_kv_heads, self.max_blocks, 2, g.head_dim)
        self._fill(metadata)
        width = self.max_blocks if flow.kind == "dense" else flow.num_slots + 1
        qkv = [self._empty(batch * flow.rows_per_request, g.qkv_size) for _ in range(2)]
        base = torch.arange(heads, dtype=torch.int32, device=self.device).view(batch, -1, 1) * self.slots_per_head
        table = [self._empty(batch, g.num_kv_heads, width, dtype=torch.int32) for _ in range(2)]
        counts = [self._empty(batch, g.num_kv_heads, dtype=torch.int32) for _ in range(2)]
        layer = LayerState(pool, metadata, table, counts, qkv)
        if flow.kind == "dense":
            table[0].copy_(base + torch.arange(width, dtype=torch.int32, device=self.device))
        if flow.moves:
            self._admit(layer, index, base)
        return layer

    def _admit(self, layer: LayerState, index: int, base: torch.Tensor) -> None:
        """Step 0's blocks in their slots, with their data, and the table that attention of step 0 reads."""
        g, flow, batch = self.geometry, self.flow, self.batch_size
        ids = np.stack([self._admitted[int(offset)][index] for offset in self.trace.offsets])
        slots = make_slots(batch, g.num_kv_heads, self.plan_shape, self.device)
        admit(slots, self._int(ids))
        layer.slots, layer.first_slots = slots, slots.clone()
        layer.fill_slot = [
            torch.full((batch, g.num_kv_heads), -1, dtype=torch.int32, device=self.device) for _ in range(2)
        ]
        counts = (slots[:, :, 0] >= 0).sum(-1, keepdim=True, dtype=torch.int32)
        table = base + torch.arange(flow.num_slots + 1, dtype=torch.int32, device=self.device)
        table.scatter_(2, counts.long(), (base + flow.num_slots).to(table.dtype))
        layer.first_table, layer.first_counts = table, (counts + 1).squeeze(-1)

    def _make_moves(self) -> list[list[Moves]]:
        """Logs of what every plan decided, [step][layer]; all counters in one tensor, so one fill clears them."""
        steps, layers = self.num_steps, self.geometry.num_layers
        if not self.flow.moves:
            return []
        heads = self.batch_size * self.geometry.num_kv_heads
        self._counters = torch.zeros(steps, layers, 2, dtype=torch.int32, device=self.device)
        self._logs: list[tuple[torch.Tensor, torch.Tensor]] = []
        moves: list[list[Moves]] = []
        for t, allowed in enumerate(self.flow.allowed(steps)):
            room = heads * allowed + 1
            fetch = self._empty(layers, room, 3, dtype=torch.int32)
            evict = self._empty(layers, room + heads, 2, dtype=torch.int32)
            self._logs.append((fetch, evict))
            counters = self._counters[t]
            moves.append([Moves(fetch[i], evict[i], counters[i]) for i in range(layers)])
        return moves

    def reset(self) -> None:
        """State as before step 0; the contents of the pools stay."""
        if self.flow.moves:
            self._counters.zero_()
        for layer in self.layers:
            if layer.slots is not None and layer.first_slots is not None:
                layer.slots.copy_(layer.first_slots)
                assert layer.first_table is not None
                assert layer.first_counts is not None
                layer.table[0].copy_(layer.first_table)
                layer.counts[0].copy_(layer.first_counts)
                layer.fill_slot[0].fill_(-1)

    def load_kv(self, host: torch.Tensor) -> None:
        """Fill HBM from host KV [A, L, H, n, 2, P, d] as an admission would: blocks, open blocks, compressed keys."""
        g, size = self.geometry, self.flow.block_size_tokens
        known = self.kv_start - 1
        opened = torch.div(known, size, rounding_mode="floor").long()
        requests = torch.arange(self.batch_size, device=self.device)
        heads = torch.arange(g.num_kv_heads, device=self.device)
        for index, layer in enumerate(self.layers):
            kv = host[:, index].to(self.device)[requests % host.shape[0]][:, :, : self.max_blocks]
            full = torch.full((kv[:, :, :, 0, 0, 0].numel(),), size, dtype=torch.int32, device=self.device)
            pool_blocks(kv.reshape(-1, 2, size, g.head_dim), full, layer.metadata.view(-1, 2, g.head_dim))
            slots = layer.pool.view(self.batch_size, g.num_kv_heads, self.slots_per_head, 2, size, g.head_dim)
            tail = kv[requests, :, opened]
            held = (known % size)[:, None, None] > torch.arange(size, device=self.device)[:, None]
            low = torch.where(held[:, None], tail[:, :, 0].float(), float("inf")).amin(2)
            high = torch.where(held[:, None], tail[:, :, 0].float(), float("-inf")).amax(2)
            layer.metadata[requests, :, opened, 0] = low.to(self.dtype)
            layer.metadata[requests, :, opened, 1] = high.to(self.dtype)
            if layer.first_slots is None:
                slots.copy_(kv)
                continue
            slots[:, :, -1] = tail
            ids = layer.first_slots[:, :, BLOCK].long()
            held_slots = ids >= 0
            chosen = kv[requests[:, None, None], heads[None, :, None], ids.clamp(min=0)]
            slots[:, :, :-1][held_slots] = chosen[held_slots]

    def moved(self, t: int) -> list[tuple[Int32, Int32]]:
        """What step t's plans decided, read back, per layer: (fetched [n, 3], evicted [m, 2]) as `Moves` names them."""
        counts = self._counters[t].cpu()
        fetch, evict = self._logs[t]
        most_fetched, most_evicted = counts.amax(0).tolist()
        fetched = fetch[:, :most_fetched].cpu().numpy()
        evicted = evict[:, :most_evicted].cpu().numpy()
        return [(fetched[i, :n], evicted[i, :m]) for i, (n, m) in enumerate(counts.tolist())]
