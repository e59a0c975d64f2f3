"""A real decode step: the whole layer stack of a batch, with the flow's selection, plans and transfers, in one graph.

The graph holds all steps of a run; where copy engines fetch, it is cut at each layer (`realhw.pieces`). Nothing joins
at a step's end: a layer waits only for what it reads, so transfers and side-stream work cross steps as they would in an
engine. Block ids come from a trace: the real scoring and top-K run, and the plan that follows takes the trace's ids;
what the plan decides is what moves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

from realhw.decode_buffers import DecodeBuffers, LayerState
from realhw.draft_head import DraftHead
from realhw.flows import Flow
from realhw.kernels.activation.api import silu_multiply
from realhw.kernels.attention.api import decode_attention
from realhw.kernels.gather.api import gather_blocks
from realhw.kernels.plan.api import plan_step
from realhw.kernels.pool.api import append_token
from realhw.kernels.score.api import score_blocks
from realhw.kernels.topk.api import topk_blocks, topk_table
from realhw.kernels.writeback.api import write_back
from realhw.pieces import PieceSchedule
from realhw.products import leave_multiprocessors
from realhw.schedule import Schedule
from realhw.step_trace import StepTrace
from realhw.transfers import CopyTransfers
from realhw.weights import LayerWeights, ModelWeights
from traces.errors import InputError


class DecodeRunner:
    """Decodes `num_steps` steps of a batch. Build, `prepare`, then `run` as often as wanted.

    host, fill: see `DecodeBuffers`; pools are random where `fill` is null.
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
        self.weights, self.flow, self.num_steps, self.device = weights, flow, num_steps, weights.lm_head.device
        fill = fill or (lambda pool: _discard(pool.normal_()))
        generator = torch.Generator(device=self.device).manual_seed(seed)
        self.buffers = buffers = DecodeBuffers(weights, flow, trace, num_steps, host, fill, generator)
        if flow.draft_head:
            self._draft_head = DraftHead(
                weights, buffers.batch_size, buffers.max_blocks, flow.block_size_tokens, flow.draft_rows, fill,
                generator, buffers.num_sms,
            )  # fmt: skip
        self._copies = None if flow.transport == "gather" else self._make_copies()
        in_pieces = self._copies is not None and self.device.type == "cuda"
        self.schedule = PieceSchedule(self.device) if in_pieces else Schedule(self.device)
        self._replay: Callable[[], None] | None = None

    def _make_copies(self) -> CopyTransfers:
        buffers = self.buffers
        assert buffers.host is not None
        flow, heads = self.flow, buffers.batch_size * buffers.geometry.num_kv_heads
        return CopyTransfers(
            flow.transport, buffers.host, [layer.pool for layer in buffers.layers], heads, buffers.slots_per_head,
            self.num_steps, flow.distance, heads * max(flow.allowed(self.num_steps)), buffers.num_sms,
        )  # fmt: skip

    def prepare(self, mark_parts: bool = False) -> None:
        """Compile every kernel with one eager run, then capture the graph."""
        self.schedule.mark_parts = mark_parts
        with leave_multiprocessors(self.flow.left_multiprocessors if self.schedule.on_gpu else 0):
            self._prepare()

    def _prepare(self) -> None:
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
        self.buffers.reset()
        if self._copies is not None:
            self._copies.reset()

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
        schedule, buffers = self.schedule, self.buffers
        with schedule.on("C"):
            schedule.mark("step")
            for t in range(num_steps):
                self._begin_step(t)
                for index in range(buffers.geometry.num_layers):
                    self._layer(t, index)
                real = buffers.x.view(buffers.batch_size, self.flow.rows_per_request, -1)[:, 0]
                torch.mm(real, self.weights.lm_head.t(), out=buffers.logits)
                schedule.mark_part("lm_head")
                schedule.mark("step")

    def _begin_step(self, t: int) -> None:
        buffers = self.buffers
        if self.flow.draft_head:
            self._draft_head.run(buffers.all_blocks[t], buffers.open_tokens[t])
            self.schedule.mark_part("draft")
        torch.argmax(buffers.logits, dim=-1, out=buffers.tokens)
        self.schedule.mark_part("sampling")
        buffers.x.copy_(buffers.hidden)

    def _layer(self, t: int, index: int) -> None:
        flow, schedule, buffers = self.flow, self.schedule, self.buffers
        layer, weights = buffers.layers[index], self.weights.layers[index]
        parity = t % 2
        qkv = layer.qkv[parity]
        torch.mm(buffers.x, weights.qkv.t(), out=qkv)
        schedule.mark_part("qkv")
        if flow.kind == "quest":
            self._select(layer, qkv, t, row=0)
            topk_table(
                buffers.scores, buffers.selectable[t], layer.table[parity], layer.counts[parity], buffers.slots_per_head
            )
            schedule.mark_part("score+topk")
        elif flow.kind == "on-demand":
            self._select(layer, qkv, t, row=0)
            topk_blocks(buffers.scores, buffers.selectable[t], buffers.ids)
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
        if flow.moves and buffers.fills[t]:
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
        schedule, flow, buffers = self.schedule, self.flow, self.buffers
        with schedule.on("B"):
            schedule.wait("B", ("ready", t, index))
            self._select(layer, qkv, t, row=flow.rows_per_request - 1)
            topk_blocks(buffers.scores, buffers.selectable[t], buffers.ids)
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
        buffers, g = self.buffers, self.buffers.geometry
        query = qkv.view(buffers.batch_size, self.flow.rows_per_request, -1)[:, row, : g.num_q_heads * g.head_dim]
        query = query.view(buffers.batch_size, g.num_q_heads, g.head_dim)
        score_blocks(query, layer.metadata, buffers.selectable[t], buffers.scores)

    def _plan(self, layer: LayerState, t: int, index: int) -> None:
        flow, buffers = self.flow, self.buffers
        after = (t + 1) % 2 if flow.kind == "lookahead" else t % 2
        assert layer.slots is not None
        plan_step(
            buffers.plan_shape, layer.slots, buffers.rankings, buffers.rows, buffers.allowed, buffers.clock,
            buffers.kv_start, layer.table[after], layer.counts[after], layer.fill_slot[after], buffers.moves[t][index],
            buffers.plan_scratch,
            offset=t, layer=index, lookahead_k=flow.distance, num_steps=self.num_steps,
        )  # fmt: skip

    def _publish(self, t: int, index: int) -> None:
        """Tell the CPU a plan whose copies it enqueues; nothing to do for a gather."""
        if self._copies is not None and t + self.flow.distance < self.num_steps:
            self._copies.publish(t, index, self.buffers.moves[t][index])

    def _gather(self, layer: LayerState, t: int, index: int) -> None:
        buffers = self.buffers
        assert buffers.host is not None
        moves = buffers.moves[t][index]
        gather_blocks(
            buffers.host, layer.pool, moves.fetch, moves.fetch_count, index, buffers.slots_per_head, self.flow.gather
        )

    def _append(self, layer: LayerState, qkv: torch.Tensor, t: int) -> None:
        buffers, g = self.buffers, self.buffers.geometry
        row = qkv.view(buffers.batch_size, self.flow.rows_per_request, -1)[:, 0, g.num_q_heads * g.head_dim :]
        width = g.num_kv_heads * g.head_dim
        key = row[:, :width].view(buffers.batch_size, g.num_kv_heads, g.head_dim)
        value = row[:, width:].view(buffers.batch_size, g.num_kv_heads, g.head_dim)
        fill_slot = layer.fill_slot[t % 2] if self.flow.moves else None
        append_token(key, value, layer.pool, layer.metadata, buffers.kv_len[t], buffers.slots_per_head, fill_slot)

    def _attend(self, layer: LayerState, qkv: torch.Tensor, t: int) -> None:
        buffers, flow, g = self.buffers, self.flow, self.buffers.geometry
        query = qkv.view(buffers.batch_size, flow.rows_per_request, -1)[:, :, : g.num_q_heads * g.head_dim]
        if flow.kind == "dense":
            table, counts = layer.table[0], buffers.all_blocks[t]
        else:
            table, counts = layer.table[t % 2], layer.counts[t % 2]
        decode_attention(
            query.view(buffers.batch_size, flow.rows_per_request, g.num_q_heads, g.head_dim), layer.pool, table, counts,
            buffers.open_tokens[t], buffers.attended, buffers.attention_scratch, buffers.splits,
        )  # fmt: skip

    def _write(self, layer: LayerState, t: int, index: int) -> None:
        buffers = self.buffers
        assert buffers.host is not None
        with self.schedule.on("D"):
            self.schedule.wait("D", ("ready", t, index))
            write_back(layer.pool, buffers.host, buffers.kv_len[t], index, buffers.slots_per_head)
            self.schedule.signal("D", ("written", t, index))

    def _feed_forward(self, weights: LayerWeights) -> None:
        buffers = self.buffers
        torch.mm(buffers.attended.view(len(buffers.x), -1), weights.o.t(), out=buffers.o)
        torch.mm(buffers.o, weights.gate_up.t(), out=buffers.gate_up)
        silu_multiply(buffers.gate_up, buffers.gated)
        torch.mm(buffers.gated, weights.down.t(), out=buffers.x)


def _discard(_: torch.Tensor) -> None:
    return None
