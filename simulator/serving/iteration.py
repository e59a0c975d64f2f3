"""One iteration of a replica: the batch at hand becomes one row of step work, `run_step` plays it.

The row lives in a window of a few dozen rows that moves along: transfers may still be on their way when later
iterations start, and memory does not grow with the run. Kernel times are remembered by rows and tokens.
`iteration_reference` fills the same row with plain calls; a test holds both equal.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator import cost
from simulator import step_layout as at
from simulator.capacity import slots_per_head
from simulator.engine_rates import RatesByBatch, gather_wait_s
from simulator.links import d2h_bytes_per_s, fetch_cost, write_back_cost
from simulator.serving.batch_kernel import (
    ATTENDED_TOKENS,
    BLOCKS,
    FILLED_BLOCKS,
    NUM_COUNTS,
    NUM_TOTALS,
    WINDOW_TOKENS,
)
from simulator.serving.decode_batch import DecodeBatch
from simulator.serving.kernel_times import KernelTimes, Setting
from simulator.serving.transfer_kernel import coefficients, fill_transfers
from simulator.serving.work import Batch
from simulator.specs.policy import KV_BYTES_PER_ELEMENT
from simulator.step_kernel import run_step
from simulator.step_work import rules_of
from simulator.topology import Share

Float = NDArray[np.float64]
WINDOW_ROWS = 96
MAX_WRITE_LAG = 32
"""Iterations whose write-back may be outstanding: the staging memory of one prefill chunk each. An assumption; with
it a slow D2H link slows prefill instead of growing a queue without end."""


class Iteration:
    """Plays the iterations of one replica (one of its GPUs stands for all) and adds up what they did."""

    def __init__(self, setting: Setting, decode: DecodeBatch, rates: RatesByBatch) -> None:
        model, policy = setting.model, setting.policy
        self.setting, self.decode, self._rates = setting, decode, rates
        self.rules = rules_of(model, policy)
        self.link = fetch_cost(setting.hardware, policy.transport, policy.gather_ctas, setting.placement.host_numa)
        self.write_link = write_back_cost(setting.hardware, policy.transport, setting.placement.host_numa)
        self.kernels = KernelTimes(setting)
        self.element = KV_BYTES_PER_ELEMENT[policy.kv_dtype]
        self.block_bytes = model.block_bytes(policy.block_size_tokens, self.element)
        self.sliding = np.isin(np.arange(model.num_layers), model.sliding_layers)
        self.full_layers = np.array(model.full_attention_layers)
        self.window_tokens = model.sliding_window or 0
        layers, ring = model.num_layers, self.rules.lookahead_k + 3
        self.remote_first_s = self.remote_prefetch_s = np.zeros((WINDOW_ROWS, layers))
        self._ring = ring
        self.durations_s = np.zeros((WINDOW_ROWS, at.NUM_DURATIONS))
        self.attention_s, self.scatter_s, self.first_s, self.prefetch_s, self.write_s = (
            np.zeros((WINDOW_ROWS, layers)) for _ in range(5)
        )
        num_distinct = len(decode.demand.gpus_alike)
        self.arriving: Float = np.zeros((WINDOW_ROWS, num_distinct, 2, len(self.full_layers)))
        """Blocks that a row's plan brings to a GPU: prefetched for lookahead_k rows later, urgent for the next row."""
        self.waits_for_slots = np.zeros((WINDOW_ROWS, layers), np.bool_)
        self.selects = np.zeros(layers, np.bool_)
        if policy.selector != "all":
            self.selects[self.full_layers] = True
        self.steps_s = np.zeros((WINDOW_ROWS, at.NUM_STEP_COLUMNS))
        self.state = at.new_state(layers, ring)
        self._queues = np.arange(len(self.state.counts)) != at.B_PART
        self.row = -1
        self.totals: NDArray[np.int64] = np.zeros(NUM_TOTALS, np.int64)
        self.sums: NDArray[np.int64] = np.zeros((num_distinct, NUM_COUNTS, len(self.full_layers)), np.int64)
        self._fetch_link, self._write_link = coefficients(self.link), coefficients(self.write_link)
        self._durations_fixed()
        self.done_s = np.zeros(at.NUM_STEP_COLUMNS)
        """Sum of all iterations' columns."""
        self.num_iterations = self.measured_decoding = 0
        self.h2d_bytes = self.d2h_bytes = 0.0
        """Over all GPUs of the replica."""

    def _durations_fixed(self) -> None:
        self.durations_s[:, at.SOFTWARE] = self.setting.engine.software_overhead_s
        self.durations_s[:, at.HOP] = self.link.hop_s

    def resume(self) -> None:
        """The replica was idle until now: what was on its way has arrived."""
        self.state.clock[:] = -1.0
        self.state.clock[at.NOW] = 0.0
        self.state.counts[self._queues] = (self.row + 1) * len(self.selects)
        self.arriving[:] = 0.0

    def run(self, batch: Batch, share: Share) -> float:
        """Seconds of the iteration that starts now, with its shares of the links."""
        self._next_row()
        self.decode.measure(self.window_tokens, self.totals, self.sums)
        self.measured_decoding = batch.num_decoding
        self.fill(batch)
        t = self.row
        self.steps_s[t] = 0.0
        waited_s = self._drain_write_backs() + self._move(batch, share.link)
        rules, state = self.rules, self.state
        step_s: float = run_step(
            t, *rules.flags, *share, self.durations_s, self.attention_s, self.scatter_s, self.selects, self.first_s,
            self.prefetch_s, self.write_s, self.waits_for_slots, self.remote_first_s, self.remote_prefetch_s,
            state.counts, state.clock, state.planned_at_s, self._rates.at(batch.num_decoding), self.steps_s,
        )  # fmt: skip
        self.done_s += self.steps_s[t]
        self.done_s[at.T_OTHER] += waited_s
        self.done_s[at.STEP] += waited_s
        self.num_iterations += 1
        return waited_s + step_s

    @property
    def transfers(self) -> bool:
        """Whether replicas share anything through the host link."""
        return self.setting.policy.offloads

    def fill(self, batch: Batch) -> None:
        """Fills the current row of the window for `batch`, from the totals of the decoding requests."""
        self._fill_durations(batch)
        self._fill_attention(batch)
        if self.transfers:
            self._fill_transfers(batch)
            self._wait_for_multiprocessors(batch)

    def _fill_durations(self, batch: Batch) -> None:
        kernels, policy, dur = self.kernels, self.setting.policy, self.durations_s[self.row]
        decoding, rows = batch.num_decoding, batch.num_decoding * (1 + cost.draft_rows(policy)) + batch.prefill_tokens
        sampled = decoding * cost.logit_rows(policy) + batch.num_ended_prompts
        dur[at.QKV] = kernels.qkv_s(rows)
        dur[at.FFN] = kernels.ffn_s(rows)
        dur[at.ALLREDUCE] = kernels.allreduce_s(rows) + kernels.collectives_s(rows, sampled)
        dur[at.SAMPLING] = kernels.sampling_s(sampled) if sampled else 0.0
        dur[at.LM_HEAD] = kernels.lm_head_s(sampled) if sampled else 0.0
        dur[at.DRAFT] = dur[at.SCORE] = dur[at.TOPK] = dur[at.PLAN] = 0.0
        dur[at.SIDE_SCORE] = dur[at.SIDE_TOPK] = dur[at.SIDE_PLAN] = 0.0
        if not decoding:
            return
        blocks = mean_size(self.totals[BLOCKS], decoding)
        dur[at.DRAFT] = kernels.draft_s(decoding, blocks * policy.block_size_tokens)
        if policy.selector == "all":
            return
        selection = kernels.selection_s(decoding, blocks, slots_per_head(policy))
        if self.rules.on_demand:
            dur[at.SCORE : at.PLAN + 1] = selection
        if self.rules.lookahead_k:
            dur[at.SIDE_SCORE : at.SIDE_PLAN + 1] = selection

    def _fill_attention(self, batch: Batch) -> None:
        hardware, model, decoding = self.setting.hardware, self.setting.model, batch.num_decoding
        chunks = [(chunk.tokens, chunk.before) for chunk in batch.chunks]
        full_s = cost.chunk_attention_s(hardware, model, chunks, self.element)
        if decoding:
            full_s += self.kernels.attention_s(decoding, mean_size(self.totals[ATTENDED_TOKENS], decoding))
        self.attention_s[self.row] = full_s
        if self.window_tokens and self.sliding.any():
            window_s = cost.chunk_attention_s(hardware, model, chunks, self.element, self.window_tokens)
            if decoding:
                window_s += self.kernels.window_attention_s(decoding, mean_size(self.totals[WINDOW_TOKENS], decoding))
            self.attention_s[self.row, self.sliding] = window_s

    def _fill_transfers(self, batch: Batch) -> None:
        model, kernels = self.setting.model, self.setting.hardware.kernels
        heads, size = model.num_kv_heads, self.setting.policy.block_size_tokens
        filled = float(self.totals[FILLED_BLOCKS]) * heads
        token_wise = self.setting.policy.write_back == "token"
        pieces = float(batch.num_decoding * heads) if token_wise else filled
        piece_bytes = float(model.block_bytes(1, self.element) if token_wise else self.block_bytes)
        ops = pieces * (2.0 if token_wise else 1.0)  # a token's key and value lie apart inside their block
        # A head's part of a chunk lies together on both sides.
        chunk_ops = float(len(batch.chunks) * heads)
        written_bytes = pieces * piece_bytes + batch.prefill_tokens * heads * self.block_bytes / size
        scatter = (kernels.attention_t0_s.value, self.block_bytes / kernels.scatter_bytes_per_s.value)
        h2d_blocks = fill_transfers(
            self.row, self.rules.lookahead_k, self.full_layers, self.sums, self.decode.demand.gpus_alike,
            float(self.block_bytes), self._fetch_link, self.link.staged, scatter, ops + chunk_ops, written_bytes,
            self._write_link, self.arriving, self.first_s, self.prefetch_s, self.write_s, self.scatter_s,
            self.waits_for_slots,
        )  # fmt: skip
        self.h2d_bytes += h2d_blocks * self.block_bytes
        self.d2h_bytes += written_bytes * len(self.full_layers) * model.tensor_parallel

    def _wait_for_multiprocessors(self, batch: Batch) -> None:
        policy, row = self.setting.policy, self.row
        gemm_s = self.durations_s[row, [at.QKV, at.FFN]].sum()
        wait_s = gather_wait_s(
            self.setting.hardware, policy.transport, policy.gather_ctas, max(1, batch.num_decoding), gemm_s,
            self.attention_s[row],
        )  # fmt: skip
        self.prefetch_s[row] += wait_s * np.sign(self.prefetch_s[row])

    def _next_row(self) -> None:
        self.row += 1
        if self.row == WINDOW_ROWS:
            self._move_window()

    def _move_window(self) -> None:
        """Keeps the rows that transfers, waits and scatters may still read, and moves them to the front."""
        layers, state = len(self.selects), self.state
        # Fetches lag by less than the ring.
        kept_from = min(int(state.counts[at.N_WRITTEN]) // layers, WINDOW_ROWS - self._ring)
        shift = kept_from // self._ring * self._ring  # plans are found by row modulo the ring
        for array in (
            self.durations_s, self.attention_s, self.scatter_s, self.first_s, self.prefetch_s, self.write_s,
            self.waits_for_slots, self.arriving,
        ):  # fmt: skip
            array[: WINDOW_ROWS - shift] = array[shift:].copy()
        state.counts[self._queues] -= shift * layers
        self.row -= shift
        # A clock that starts again keeps its last digits over hours.
        state.planned_at_s -= state.clock[at.NOW]
        state.clock[at.NOW] = 0.0

    def _drain_write_backs(self) -> float:
        """Seconds that the replica waits because write-backs lag too far behind."""
        layers, state, waited_s = len(self.selects), self.state, 0.0
        while self.row - int(state.counts[at.N_WRITTEN]) // layers > MAX_WRITE_LAG:
            done = int(state.counts[at.N_WRITTEN])
            left_s = state.clock[at.LEFT_WRITE]
            waited_s += self.write_s[done // layers, done % layers] if left_s < 0 else left_s
            state.counts[at.N_WRITTEN] += 1
            state.clock[at.LEFT_WRITE] = -1.0
        state.clock[at.NOW] += waited_s
        return waited_s

    def _move(self, batch: Batch, link_share: float) -> float:
        """Seconds of moving whole KV before the iteration starts, as vLLM v0 swaps before it executes."""
        out_bytes, in_bytes = batch.bytes_out, batch.bytes_in
        if not out_bytes and not in_bytes:
            return 0.0
        hardware, numa = self.setting.hardware, self.setting.placement.host_numa
        seconds = out_bytes / d2h_bytes_per_s(hardware, numa)
        seconds += in_bytes / (link_share * fetch_cost(hardware, "ce-batched", 0, numa).bytes_per_s)
        self.h2d_bytes += in_bytes * self.setting.model.tensor_parallel
        self.d2h_bytes += out_bytes * self.setting.model.tensor_parallel
        self.state.clock[at.NOW] += seconds
        return seconds


def mean_size(total: int | np.int64, count: int) -> int:
    """Mean length, rounded up: a kernel over requests of different lengths takes as long as over as many of the mean.

    Exact where its time is linear in the tokens; that split-K kernels balance lengths is an assumption elsewhere.
    """
    return -(-int(total) // count)
