"""A real decode step: the whole layer stack of a batch, with the flow's selection, plans and transfers, in one graph.

The graph holds all steps of a run; where copy engines fetch, it is cut at each layer (`realhw.pieces`). Nothing joins
at a step's end: a layer waits only for what it reads, so transfers and side-stream work cross steps as they would in an
engine. Block ids come from a trace: the real scoring and top-K run, and the plan that follows takes the trace's ids;
what the plan decides is what moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from realhw.draft_head import DraftHead
from realhw.flows import Flow
from realhw.kernels.activation.api import silu_multiply
from realhw.kernels.attention.api import AttentionConfig, attention_scratch, choose_splits, decode_attention
from realhw.kernels.gather.api import gather_blocks
from realhw.kernels.plan.api import BLOCK, Moves, PlanShape, admit, make_slots, plan_scratch, plan_step
from realhw.kernels.pool.api import append_token, pool_blocks
from realhw.kernels.score.api import make_scores, score_blocks
from realhw.kernels.topk.api import topk_blocks, topk_table
from realhw.kernels.writeback.api import write_back
from realhw.pieces import PieceSchedule
from realhw.schedule import Schedule
from realhw.step_trace import Int32, StepTrace
from realhw.transfers import CopyTransfers
from realhw.weights import LayerWeights, ModelWeights
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


class DecodeRunner:
    """Decodes `num_steps` steps of a batch. Build, `prepare`, then `run` as often as wanted.

    host: [A, L, H, n, 2, P, d] pinned KV, shared by requests b with equal b % A; null for flows that move nothing.
    """

    def __init__(
        self,
        weights: ModelWeights,
        flow: Flow,
        trace: StepTrace,
        num_steps: int,
        host: torch.Tensor | None = None,
        *,
        fill: Callable[[torch.Tensor], None] | None = None,
        seed: int = 0,
    ) -> None:
        trace.require_steps(num_steps)
        self.weights, self.flow, self.trace, self.num_steps, self.host = weights, flow, trace, num_steps, host
        self.geometry = g = weights.geometry
        self.batch_size = len(trace.offsets)
        self.device, self.dtype = weights.lm_head.device, weights.lm_head.dtype
        self._fill = fill or (lambda pool: _discard(pool.normal_()))
        kv_start = trace.kv_len[trace.offsets]
        self.max_blocks = -(-(int(kv_start.max()) + num_steps) // flow.block_size_tokens)
        if flow.moves and (host is None or host.shape[3] < self.max_blocks):
            have = "none" if host is None else f"{host.shape[3]} blocks a head"
            raise InputError(f"host KV: {have}, need {self.max_blocks}")
        self.slots_per_head = flow.num_slots + 1 if flow.moves else self.max_blocks
        self._generator = torch.Generator(device=self.device).manual_seed(seed)
        self._make_lengths(kv_start)
        self._make_buffers()
        self._admitted: dict[int, Int32] = {}
        if flow.moves:
            for request, offset in enumerate(trace.offsets):
                if int(offset) not in self._admitted:
                    ids = trace.admitted(request, flow.num_kept, flow.block_size_tokens)
                    self._admitted[int(offset)] = ids
        self.layers = [self._make_layer(index) for index in range(g.num_layers)]
        self.moves = self._make_moves()
        self._copies = None if flow.transport == "gather" else self._make_copies()
        in_pieces = self._copies is not None and self.device.type == "cuda"
        self.schedule = PieceSchedule(self.device) if in_pieces else Schedule(self.device)
        self._replay: Callable[[], None] | None = None

    # -- building -----------------------------------------------------------------------------------------------

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)

    def _int(self, values: Int32) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).to(self.device)

    @property
    def _num_sms(self) -> int:
        return torch.cuda.get_device_properties(0).multi_processor_count if self.device.type == "cuda" else 4

    def _make_lengths(self, kv_start: Int32) -> None:
        """Per step: KV length with the step's token, blocks that can be selected, tokens in the open block."""
        size = self.flow.block_size_tokens
        kv_len = kv_start[None, :] + np.arange(self.num_steps, dtype=np.int32)[:, None]
        selectable = -(-kv_len // size) - 1
        self.kv_start = self._int(kv_start)
        self.kv_len, self.selectable = self._int(kv_len), self._int(selectable)
        self.open_tokens = self._int(kv_len - selectable * size)
        self._fills = (kv_len % size == 0).any(axis=1).tolist()
        self.clock = torch.zeros(1, dtype=torch.int32, device=self.device)
        heads = self.geometry.num_kv_heads
        self._all_blocks = (self.selectable + 1)[:, :, None].expand(-1, -1, heads).contiguous()

    def _make_buffers(self) -> None:
        g, flow, batch = self.geometry, self.flow, self.batch_size
        rows = batch * flow.rows_per_request
        self._hidden = torch.randn(rows, g.hidden_size, device=self.device, dtype=self.dtype, generator=self._generator)
        self._x = self._empty(rows, g.hidden_size)
        self._attended = self._empty(batch, flow.rows_per_request, g.num_q_heads, g.head_dim)
        self._gate_up, self._gated = self._empty(rows, 2 * g.ffn_size), self._empty(rows, g.ffn_size)
        self._o = self._empty(rows, g.hidden_size)
        self.logits = torch.zeros(batch, g.vocab_size, dtype=self.dtype, device=self.device)
        self.tokens = self._empty(batch, dtype=torch.int64)
        heads = batch * g.num_kv_heads
        kept = flow.num_kept
        self._scores = make_scores(batch, g.num_kv_heads, self.max_blocks, self.device)
        self._ids = self._empty(batch, g.num_kv_heads, kept, dtype=torch.int32)
        tokens = self.max_blocks * flow.block_size_tokens
        read = tokens if flow.kind == "dense" else min(tokens, (kept + 1) * flow.block_size_tokens)
        self._splits = choose_splits(heads, read, AttentionConfig().block_n, self._num_sms, flow.rows_per_request)
        self._attention_scratch = attention_scratch(batch, g.num_kv_heads, g.head_dim, self._splits, self.device)
        if flow.moves:
            self._shape = PlanShape(
                kept, flow.num_slots, flow.block_size_tokens, self.max_blocks, max(16, self.num_steps)
            )
            self._plan_scratch = plan_scratch(batch, g.num_kv_heads, self._shape, self.device)
            self._rankings = self._int(self.trace.predicted)
            self._rows = self._int(self.trace.offsets - self.trace.shift)
            self._allowed = self._int(np.array(flow.allowed(self.num_steps), dtype=np.int32))
        if flow.draft_head:
            self._draft_head = DraftHead(
                self.weights, batch, self.max_blocks, flow.block_size_tokens, flow.draft_rows, self._fill,
                self._generator, self._num_sms,
            )  # fmt: skip

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
        slots = make_slots(batch, g.num_kv_heads, self._shape, self.device)
        admit(slots, self._int(ids))
        layer.slots, layer.first_slots = slots, slots.clone()
        layer.fill_slot = [
            torch.full((batch, g.num_kv_heads), -1, dtype=torch.int32, device=self.device) for _ in range(2)
        ]
        counts = (slots[:, :, 0] >= 0).sum(-1, keepdim=True, dtype=torch.int32)
        table = base + torch.arange(flow.num_slots + 1, dtype=torch.int32, device=self.device)
        table.scatter_(2, counts.long(), (base + flow.num_slots).to(table.dtype))
        layer.first_table, layer.first_counts = table, (counts + 1).squeeze(-1)

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

    def _make_copies(self) -> CopyTransfers:
        assert self.host is not None
        flow, heads = self.flow, self.batch_size * self.geometry.num_kv_heads
        return CopyTransfers(
            flow.transport, self.host, [layer.pool for layer in self.layers], heads, self.slots_per_head,
            self.num_steps, flow.distance, heads * max(flow.allowed(self.num_steps)), self._num_sms,
        )  # fmt: skip

    # -- one run ------------------------------------------------------------------------------------------------

    def prepare(self, mark_parts: bool = False) -> None:
        """Compile every kernel with one eager run, then capture the graph."""
        self.schedule.mark_parts = mark_parts
        self.reset()
        if self.schedule.on_gpu:
            eager = Schedule(self.device, ("C", "H"))
            eager.on_gpu = False
            captured, self.schedule = self.schedule, eager
            steps = min(self.num_steps, self.flow.lookahead_k + 1)
            self._decode(steps)
            self.schedule = captured
            torch.cuda.synchronize()
            self.reset()
        self._replay = self.schedule.capture(lambda: self._decode(self.num_steps))

    def reset(self) -> None:
        """State as before step 0; the contents of the pools stay."""
        if self.flow.moves:
            self._counters.zero_()
        if self._copies is not None:
            self._copies.reset()
        for layer in self.layers:
            if layer.slots is not None and layer.first_slots is not None:
                layer.slots.copy_(layer.first_slots)
                assert layer.first_table is not None
                assert layer.first_counts is not None
                layer.table[0].copy_(layer.first_table)
                layer.counts[0].copy_(layer.first_counts)
                layer.fill_slot[0].fill_(-1)

    def run(self) -> list[tuple[str, float]]:
        """Reset and decode; labelled seconds since the start of step 0 (empty on a CPU)."""
        if self._replay is None:
            raise InputError("runner: prepare() comes before run()")
        self.reset()
        if self.schedule.on_gpu:
            torch.cuda.synchronize()
        self._replay()
        return self.schedule.marks_s() if self.schedule.on_gpu else []

    def step_seconds(self, marks: list[tuple[str, float]]) -> list[float]:
        """Seconds of each step from a run's marks."""
        ends = [at for label, at in marks if label == "step"]
        return [end - start for start, end in pairwise(ends)]

    def _decode(self, num_steps: int) -> None:
        schedule = self.schedule
        with schedule.on("C"):
            schedule.mark("step")
            for t in range(num_steps):
                self._begin_step(t)
                for index in range(self.geometry.num_layers):
                    self._layer(t, index)
                real = self._x.view(self.batch_size, self.flow.rows_per_request, -1)[:, 0]
                torch.mm(real, self.weights.lm_head.t(), out=self.logits)
                schedule.mark_part("lm_head")
                schedule.mark("step")

    def _begin_step(self, t: int) -> None:
        if self.flow.draft_head:
            self._draft_head.run(self._all_blocks[t], self.open_tokens[t])
            self.schedule.mark_part("draft")
        torch.argmax(self.logits, dim=-1, out=self.tokens)
        self.schedule.mark_part("sampling")
        self._x.copy_(self._hidden)

    def _layer(self, t: int, index: int) -> None:
        flow, schedule = self.flow, self.schedule
        layer, weights = self.layers[index], self.weights.layers[index]
        parity = t % 2
        qkv = layer.qkv[parity]
        torch.mm(self._x, weights.qkv.t(), out=qkv)
        schedule.mark_part("qkv")
        if flow.kind == "quest":
            self._select(layer, qkv, t, row=0)
            topk_table(self._scores, self.selectable[t], layer.table[parity], layer.counts[parity], self.slots_per_head)
            schedule.mark_part("score+topk")
        elif flow.kind == "on-demand":
            self._select(layer, qkv, t, row=0)
            topk_blocks(self._scores, self.selectable[t], self._ids)
            schedule.mark_part("score+topk")
            self._plan(layer, t, index)
            schedule.mark_part("plan")
        elif flow.kind == "lookahead":
            schedule.wait("C", ("planned", t - 1, index))
        schedule.wait("C", ("written", t - 1, index))
        self._append(layer, qkv, t)
        if flow.kind == "on-demand":
            # Only now: the plan may put a block into the slot that the append has just filled.
            self._publish(t, index)
        schedule.signal("C", ("ready", t, index))
        schedule.mark_part("append")
        if flow.kind == "lookahead":
            self._look_ahead(layer, qkv, t, index)
        if flow.moves and self._fills[t]:
            self._write(layer, t, index)
        if t >= flow.distance and flow.moves:
            self._arrive(layer, t - flow.distance, index)
        schedule.mark_part("wait")
        self._attend(layer, qkv, t)
        if flow.kind == "lookahead":
            if self._lands_in_read_slots:
                schedule.signal("C", ("read", t, index))
            if self._copies is None:
                self._prefetch(layer, t, index)
        schedule.mark_part("attention")
        self._feed_forward(weights)
        schedule.mark_part("ffn")

    @property
    def _lands_in_read_slots(self) -> bool:
        """Whether fetches land in slots that the step's attention reads; packed blocks wait beside the slots."""
        return self.flow.slack_blocks == 0 and self.flow.transport != "ce-contiguous"

    def _look_ahead(self, layer: LayerState, qkv: torch.Tensor, t: int, index: int) -> None:
        """Score, top-K and plan on B, for the step k ahead."""
        schedule, flow = self.schedule, self.flow
        with schedule.on("B"):
            schedule.wait("B", ("ready", t, index))
            self._select(layer, qkv, t, row=flow.rows_per_request - 1)
            topk_blocks(self._scores, self.selectable[t], self._ids)
            self._plan(layer, t, index)
            self._publish(t, index)
            schedule.signal("B", ("planned", t, index))

    def _prefetch(self, layer: LayerState, t: int, index: int) -> None:
        """The gather of a plan on H."""
        schedule = self.schedule
        with schedule.on("H"):
            schedule.wait("H", ("planned", t, index))
            schedule.wait("H", ("read", t, index))
            self._gather(layer, t, index)
            schedule.signal("H", ("arrived", t, index))

    def _arrive(self, layer: LayerState, t: int, index: int) -> None:
        """Hold C until the blocks of plan (t, index) are in their slots; fetch them on demand."""
        schedule = self.schedule
        if self._copies is not None:
            schedule.wait("H", ("read", t, index))
            schedule.host("H", partial(self._copies.serve, t, index))
            schedule.signal("H", ("arrived", t, index))
        if self.flow.kind == "on-demand" and self._copies is None:
            self._gather(layer, t, index)
        schedule.wait("C", ("arrived", t, index))
        if self._copies is not None:
            self._copies.scatter(t, index)

    def _select(self, layer: LayerState, qkv: torch.Tensor, t: int, row: int) -> None:
        g = self.geometry
        query = qkv.view(self.batch_size, self.flow.rows_per_request, -1)[:, row, : g.num_q_heads * g.head_dim]
        score_blocks(
            query.view(self.batch_size, g.num_q_heads, g.head_dim), layer.metadata, self.selectable[t], self._scores
        )

    def _plan(self, layer: LayerState, t: int, index: int) -> None:
        flow = self.flow
        after = (t + 1) % 2 if flow.kind == "lookahead" else t % 2
        assert layer.slots is not None
        plan_step(
            self._shape, layer.slots, self._rankings, self._rows, self._allowed, self.clock, self.kv_start,
            layer.table[after], layer.counts[after], layer.fill_slot[after], self.moves[t][index], self._plan_scratch,
            offset=t, layer=index, lookahead_k=flow.distance, num_steps=self.num_steps,
        )  # fmt: skip

    def _publish(self, t: int, index: int) -> None:
        """Tell the CPU a plan whose copies it enqueues; nothing to do for a gather."""
        if self._copies is not None and t + self.flow.distance < self.num_steps:
            self._copies.publish(t, index, self.moves[t][index])

    def _gather(self, layer: LayerState, t: int, index: int) -> None:
        assert self.host is not None
        moves = self.moves[t][index]
        gather_blocks(
            self.host, layer.pool, moves.fetch, moves.fetch_count, index, self.slots_per_head, self.flow.gather
        )

    def _append(self, layer: LayerState, qkv: torch.Tensor, t: int) -> None:
        g = self.geometry
        row = qkv.view(self.batch_size, self.flow.rows_per_request, -1)[:, 0, g.num_q_heads * g.head_dim :]
        width = g.num_kv_heads * g.head_dim
        key = row[:, :width].view(self.batch_size, g.num_kv_heads, g.head_dim)
        value = row[:, width:].view(self.batch_size, g.num_kv_heads, g.head_dim)
        fill_slot = layer.fill_slot[t % 2] if self.flow.moves else None
        append_token(key, value, layer.pool, layer.metadata, self.kv_len[t], self.slots_per_head, fill_slot)

    def _attend(self, layer: LayerState, qkv: torch.Tensor, t: int) -> None:
        g, flow = self.geometry, self.flow
        query = qkv.view(self.batch_size, flow.rows_per_request, -1)[:, :, : g.num_q_heads * g.head_dim]
        if flow.kind == "dense":
            table, counts = layer.table[0], self._all_blocks[t]
        else:
            table, counts = layer.table[t % 2], layer.counts[t % 2]
        decode_attention(
            query.view(self.batch_size, flow.rows_per_request, g.num_q_heads, g.head_dim), layer.pool, table, counts,
            self.open_tokens[t], self._attended, self._attention_scratch, self._splits,
        )  # fmt: skip

    def _write(self, layer: LayerState, t: int, index: int) -> None:
        assert self.host is not None
        with self.schedule.on("D"):
            self.schedule.wait("D", ("ready", t, index))
            write_back(layer.pool, self.host, self.kv_len[t], index, self.slots_per_head)
            self.schedule.signal("D", ("written", t, index))

    def _feed_forward(self, weights: LayerWeights) -> None:
        torch.mm(self._attended.view(len(self._x), -1), weights.o.t(), out=self._o)
        torch.mm(self._o, weights.gate_up.t(), out=self._gate_up)
        silu_multiply(self._gate_up, self._gated)
        torch.mm(self._gated, weights.down.t(), out=self._x)

    # -- what moved ---------------------------------------------------------------------------------------------

    def moved(self, t: int) -> list[tuple[Int32, Int32]]:
        """What step t's plans decided, read back, per layer: (fetched [n, 3], evicted [m, 2]) as `Moves` names them."""
        counts = self._counters[t].cpu()
        fetch, evict = self._logs[t]
        most_fetched, most_evicted = counts.amax(0).tolist()
        fetched = fetch[:, :most_fetched].cpu().numpy()
        evicted = evict[:, :most_evicted].cpu().numpy()
        return [(fetched[i, :n], evicted[i, :m]) for i, (n, m) in enumerate(counts.tolist())]


def _discard(_: torch.Tensor) -> None:
    return None
