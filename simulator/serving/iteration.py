"""One iteration of a replica: the batch at hand becomes one row of step work, `run_step` plays it.

Kernel times are remembered by rows and tokens. `iteration_reference` fills the same row with plain calls; a test holds
both equal.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator import cost
from simulator import step_layout as at
from simulator.capacity import slots_per_head
from simulator.engine_rates import GatherWait, RatesByBatch
from simulator.fetch_path import FetchPath, fetch_path
from simulator.links import d2h_bytes_per_s, fetch_cost
from simulator.serving.batch_kernel import (
    ATTENDED_TOKENS,
    BLOCKS,
    FILLED_BLOCKS,
    NEW_TOKENS,
    NUM_TOTALS,
    SLOTS,
    WINDOW_TOKENS,
)
from simulator.serving.decode_batch import DecodeBatch
from simulator.serving.kernel_times import KernelTimes, Setting
from simulator.serving.transfer_kernel import (
    coefficients,
    fill_remote,
    fill_transfers,
    kernel_coefficients,
    kernel_rules,
    transfer_s,
)
from simulator.serving.window import Window
from simulator.serving.work import Batch
from simulator.specs.policy import KV_BYTES_PER_ELEMENT
from simulator.step_kernel import run_step
from simulator.topology import Share


class Iteration:
    """Plays the iterations of one replica (one of its GPUs stands for all) and adds up what they did."""

    def __init__(
        self, setting: Setting, decode: DecodeBatch, rates: RatesByBatch, path: FetchPath | None = None
    ) -> None:
        """`path`: how blocks come, where that is not the setting's own."""
        model, policy, demand = setting.model, setting.policy, decode.demand
        self.setting, self.decode, self._rates = setting, decode, rates
        own = fetch_path(model, setting.hardware, policy, setting.placement, demand.corrected_share)
        self.path = own if path is None else path
        self.rules = self.path.rules
        self.kernels = KernelTimes(setting, self.rules, demand.corrected_share)
        self.element = KV_BYTES_PER_ELEMENT[policy.kv_dtype]
        self.sliding = np.isin(np.arange(model.num_layers), model.sliding_layers)
        self.full_layers = np.array(model.full_attention_layers)
        self.window_tokens = model.sliding_window or 0
        self.num_slots = 0 if policy.selector == "all" else slots_per_head(policy)
        self.selects = np.zeros(model.num_layers, np.bool_)
        if self.rules.plan_waits:
            self.selects[self.full_layers] = True
        num_distinct, num_counts = len(demand.gpus_alike), demand.counts.shape[2]
        self.window = Window(model.num_layers, len(self.full_layers), num_distinct, self.rules.lookahead_k)
        self.window.durations_s[:, at.SOFTWARE] = setting.engine.software_overhead_s
        self.window.durations_s[:, at.HOP] = self.path.link.hop_s
        self.totals: NDArray[np.int64] = np.zeros(NUM_TOTALS, np.int64)
        self.sums: NDArray[np.int64] = np.zeros((num_distinct, num_counts, len(self.full_layers)), np.int64)
        self._link, self._write_link = coefficients(self.path.link), coefficients(self.path.write_link)
        self._landing, self._fallback = map(kernel_coefficients, (self.path.landing, self.path.fallback))
        self._kernel_rules, self._remote_counts = kernel_rules(self.path), demand.remote_counts
        self._gather_wait = GatherWait(
            setting.hardware, policy.transport, policy.gather_ctas, setting.model.num_kv_heads
        )
        self.done_s = np.zeros(at.NUM_STEP_COLUMNS)
        """Sum of all iterations' columns."""
        self.num_iterations = self.measured_decoding = 0
        self.h2d_bytes = self.d2h_bytes = self.remote_read_bytes = self.remote_write_bytes = 0.0
        """Over all GPUs of the replica."""
        self.pulled_bytes = 0
        """Of these reads those of the newest iteration, where they come from prefill replicas."""

    def resume(self) -> None:
        """The replica was idle until now."""
        self.window.resume()

    def run(self, batch: Batch, share: Share) -> float:
        """Seconds of the iteration that starts now, with its shares of the links."""
        self.window.next_row()
        self.decode.measure(self.num_slots, self.window_tokens, self.totals, self.sums)
        self.measured_decoding = batch.num_decoding
        self.fill(batch)
        w, t, state = self.window, self.window.row, self.window.state
        w.steps_s[t] = 0.0
        waited_s = w.drain_write_backs() + self._move(batch, share)
        step_s: float = run_step(
            t, *self.rules.flags, *share, w.durations_s, w.attention_s, w.scatter_s, self.selects, w.first_s,
            # No transfer starts for an iteration whose batch is not known yet.
            w.prefetch_s[: t + 1],
            w.write_s, w.waits_for_slots, w.remote_first_s, w.remote_prefetch_s, state.counts, state.clock,
            state.planned_at_s, self._rates.at(batch.num_decoding), w.steps_s,
        )  # fmt: skip
        self.done_s += w.steps_s[t]
        self.done_s[at.T_OTHER] += waited_s
        self.done_s[at.STEP] += waited_s
        self.num_iterations += 1
        return waited_s + step_s

    @property
    def transfers(self) -> bool:
        """Whether the KV lies outside HBM."""
        return self.setting.policy.offloads

    def fill(self, batch: Batch) -> None:
        """Fills the current row of the window for `batch`, from the totals of the decoding requests."""
        self._fill_durations(batch)
        self._fill_attention(batch)
        if not self.transfers:
            return
        # A gather waits for what else runs on the multiprocessors, not for heads that fall back to dense.
        gather_s = self._gather_wait_s(batch) if self._gather_wait.is_timed else None
        self._fill_transfers(batch)
        if gather_s is not None:
            prefetch_s = self.window.prefetch_s[self.window.row]
            prefetch_s += gather_s * np.sign(prefetch_s)

    def _fill_durations(self, batch: Batch) -> None:
        kernels, policy, dur = self.kernels, self.setting.policy, self.window.durations_s[self.window.row]
        decoding, rows = batch.num_decoding, batch.num_decoding * (1 + cost.draft_rows(policy)) + batch.prefill_tokens
        sampled = decoding * cost.logit_rows(policy) + batch.num_ended_prompts
        dur[at.QKV] = kernels.qkv_s(rows)
        dur[at.FFN] = kernels.ffn_s(rows)
        dur[at.ALLREDUCE] = kernels.allreduce_s(rows) + kernels.collectives_s(rows, sampled)
        dur[at.SAMPLING] = kernels.sampling_s(sampled) if sampled else 0.0
        dur[at.LM_HEAD] = kernels.lm_head_s(sampled) if sampled else 0.0
        dur[at.DRAFT] = dur[at.SCORE] = dur[at.TOPK] = dur[at.PLAN] = dur[at.JOIN] = 0.0
        dur[at.SIDE_SCORE] = dur[at.SIDE_TOPK] = dur[at.SIDE_PLAN] = 0.0
        if not decoding:
            return
        blocks = mean_size(self.totals[BLOCKS], decoding)
        dur[at.DRAFT] = kernels.draft_s(decoding, blocks * policy.block_size_tokens)
        if policy.selector == "all":
            return
        selections = kernels.selections_s(decoding, blocks, mean_size(self.totals[SLOTS], decoding))
        dur[at.SCORE : at.PLAN + 1], dur[at.SIDE_SCORE : at.SIDE_PLAN + 1] = selections
        if self.path.rules.prefetches:
            dur[at.JOIN] = cost.side_streams_s(self.setting.hardware)

    def _fill_attention(self, batch: Batch) -> None:
        hardware, model, decoding = self.setting.hardware, self.setting.model, batch.num_decoding
        chunks = [(chunk.tokens, chunk.before) for chunk in batch.chunks]
        full_s = cost.chunk_attention_s(hardware, model, chunks, self.element)
        if decoding:
            full_s += self.kernels.attention_s(decoding, mean_size(self.totals[ATTENDED_TOKENS], decoding))
        attention_s = self.window.attention_s[self.window.row]
        attention_s[:] = full_s
        if self.window_tokens and self.sliding.any():
            window_s = cost.chunk_attention_s(hardware, model, chunks, self.element, self.window_tokens)
            if decoding:
                window_s += self.kernels.window_attention_s(decoding, mean_size(self.totals[WINDOW_TOKENS], decoding))
            attention_s[self.sliding] = window_s

    def _fill_transfers(self, batch: Batch) -> None:
        w, path, gpus = self.window, self.path, self.decode.demand.gpus_alike
        num_blocks = fill_transfers(
            w.row, self._kernel_rules, self.full_layers, self.sums, gpus, float(path.block_bytes), self._link,
            self._landing, self._fallback, self._write_s(batch), w.arriving, w.first_s, w.prefetch_s, w.write_s,
            w.scatter_s, w.attention_s, w.waits_for_slots,
        )  # fmt: skip
        self.h2d_bytes += num_blocks * path.block_bytes
        if path.remote is not None:
            from_remote = fill_remote(
                w.row, self._kernel_rules, self.full_layers, self.sums, gpus, self._remote_counts, path.remote.read_s,
                w.remote_first_s, w.remote_prefetch_s,
            )  # fmt: skip
            self.remote_read_bytes += from_remote * path.block_bytes
            self.pulled_bytes = 0 if path.writes_beyond else int(from_remote) * path.block_bytes
        if self.rules.stream_buffers:
            self._stream(batch.num_decoding)

    def _stream(self, num_decoding: int) -> None:
        """The whole KV of every decoding request but its open block, a block of all KV heads a piece."""
        model, w = self.setting.model, self.window
        pieces = float(self.totals[BLOCKS] - num_decoding)
        num_bytes = pieces * model.num_kv_heads * self.path.block_bytes
        w.prefetch_s[w.row, self.full_layers] = transfer_s(self._link, pieces, pieces, num_bytes)
        self.h2d_bytes += num_bytes * len(self.full_layers) * model.tensor_parallel

    def _write_s(self, batch: Batch) -> float:
        """Seconds of bringing a layer's new KV home: pieces of decoding requests, and chunks, each head's in one.

        On its way through host memory the slower of the two stages counts.
        """
        model, path = self.setting.model, self.path
        token_wise = self.setting.policy.write_back == "token"
        pieces = float(self.totals[NEW_TOKENS if token_wise else FILLED_BLOCKS]) * model.num_kv_heads
        # A head's part of a chunk lies together on both sides.
        ops = pieces * path.ops_per_piece + float(len(batch.chunks) * model.num_kv_heads)
        token_bytes = path.block_bytes / self.setting.policy.block_size_tokens * model.num_kv_heads
        chunk_bytes = batch.prefill_tokens * token_bytes
        written_bytes = pieces * path.piece_bytes + chunk_bytes
        total_bytes = written_bytes * len(self.full_layers) * model.tensor_parallel
        seconds: float = transfer_s(self._write_link, ops, ops, written_bytes)
        if path.remote is not None and path.writes_beyond:
            remote_s = pieces * path.remote.write_s + chunk_bytes / path.remote_stream_bytes_per_s
            seconds = remote_s if self.rules.lands_in_slots else max(seconds, remote_s)
            self.remote_write_bytes += total_bytes
        if not self.rules.lands_in_slots:
            self.d2h_bytes += total_bytes
        return seconds

    def _gather_wait_s(self, batch: Batch) -> NDArray[np.float64]:
        w = self.window
        gemm_s = w.durations_s[w.row, [at.QKV, at.FFN]].sum()
        return self._gather_wait.seconds(max(1, batch.num_decoding), gemm_s, w.attention_s[w.row])

    def _move(self, batch: Batch, share: Share) -> float:
        """Seconds of moving whole KV before the iteration starts, as vLLM v0 swaps before it executes.

        What comes from beyond the host does so in blocks; through host memory, the slower of the two ways counts.
        """
        if not batch.bytes_out and not batch.bytes_in:
            return 0.0
        hardware, numa, path = self.setting.hardware, self.setting.placement.host_numa, self.path
        seconds = batch.bytes_out / d2h_bytes_per_s(hardware, numa)
        in_bytes, remote_s = batch.bytes_in, 0.0
        if path.remote is not None:
            remote_s = batch.remote_bytes_in / path.block_bytes * path.remote.read_s / share.remote
            if self.rules.lands_in_slots:
                in_bytes -= batch.remote_bytes_in
        link_s = in_bytes / (share.link * fetch_cost(hardware, "ce-batched", 0, numa).bytes_per_s)
        seconds += link_s + remote_s if self.rules.lands_in_slots else max(link_s, remote_s)
        tensor_parallel = self.setting.model.tensor_parallel
        self.h2d_bytes += in_bytes * tensor_parallel
        self.d2h_bytes += batch.bytes_out * tensor_parallel
        self.remote_read_bytes += batch.remote_bytes_in * tensor_parallel
        self.window.state.clock[at.NOW] += seconds
        return seconds


def mean_size(total: int | np.int64, count: int) -> int:
    """Mean length, rounded up: a kernel over requests of different lengths takes as long as over as many of the mean.

    Exact where its time is linear in the tokens; that split-K kernels balance lengths is an assumption elsewhere.
    """
    return -(-int(total) // count)
