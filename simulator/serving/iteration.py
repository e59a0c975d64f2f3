"""One iteration of a replica: the batch at hand becomes one row of step work, `run_step` plays it.

The row lives in a window of a few dozen rows that moves along: transfers may still be on their way when later
iterations start, and memory does not grow with the run. Kernel times are remembered by rows and tokens.
`iteration_reference` fills the same row with plain calls; a test holds both equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simulator import cost
from simulator import step_layout as at
from simulator.capacity import KV_BYTES_PER_ELEMENT, slots_per_head
from simulator.links import LinkCost, d2h_bytes_per_s, fetch_cost, write_back_cost
from simulator.serving.batch_kernel import (
    ATTENDED_TOKENS,
    BLOCKS,
    FETCHED,
    FILLED_BLOCKS,
    IN_SLACK,
    NUM_COUNTS,
    NUM_TOTALS,
    REPAIR_RUNS,
    REPAIRED,
    RUNS,
    URGENT,
    URGENT_RUNS,
    WINDOW_TOKENS,
)
from simulator.serving.decode_batch import DecodeBatch
from simulator.serving.work import Batch
from simulator.specs.experiment import EngineSpec, PlacementSpec
from simulator.specs.hardware import HardwareSpec
from simulator.specs.model import ModelSpec
from simulator.specs.policy import PolicySpec
from simulator.step_kernel import run_step
from simulator.step_work import rules_of

Float = NDArray[np.float64]
WINDOW_ROWS = 96
MAX_WRITE_LAG = 32
"""Iterations whose write-back may be outstanding: the staging memory of one prefill chunk each. An assumption; with
it a slow D2H link slows prefill instead of growing a queue without end."""
REMEMBERED = 65_536
"""Kernel times kept by their sizes."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What stays the same from iteration to iteration. `model` is one GPU's part."""

    model: ModelSpec
    hardware: HardwareSpec
    policy: PolicySpec
    placement: PlacementSpec
    engine: EngineSpec


class KernelTimes:
    """Seconds of each kernel by the sizes it depends on; bounded, filled as they are asked for."""

    def __init__(self, setting: Setting) -> None:
        hardware, model, policy = setting.hardware, setting.model, setting.policy
        element = KV_BYTES_PER_ELEMENT[policy.kv_dtype]
        dense, rows = policy.selector == "all", 1 + cost.draft_rows(policy)

        def remembered(function: Callable[..., float], *fixed: object) -> Callable[..., float]:
            return lru_cache(maxsize=REMEMBERED)(partial(function, hardware, model, *fixed))

        self.qkv_s = remembered(cost.qkv_s)
        self.ffn_s = remembered(cost.o_ffn_s)
        self.allreduce_s = remembered(cost.layer_allreduces_s)
        self.collectives_s = remembered(step_collectives_per_layer_s)
        self.lm_head_s = remembered(cost.lm_head_s)
        self.sampling_s = remembered(cost.sampling_s)
        self.score_s = remembered(cost.score_s, policy)
        self.topk_s = remembered(cost.topk_s, policy)
        self.plan_s = remembered(cost.plan_s)
        self.draft_s = remembered(cost.draft_s, policy)
        self.attention_s = lru_cache(maxsize=REMEMBERED)(
            partial(cost.attention_s, hardware, model, rows=rows, kv_bytes_per_element=element, dense_table=dense)
        )
        self.window_attention_s = lru_cache(maxsize=REMEMBERED)(
            partial(cost.attention_s, hardware, model, rows=rows, kv_bytes_per_element=element, dense_table=True)
        )


class Iteration:
    """Plays the iterations of one replica (one of its GPUs stands for all) and adds up what they did."""

    def __init__(self, setting: Setting, decode: DecodeBatch, rates: Float) -> None:
        model, policy = setting.model, setting.policy
        self.setting, self.decode, self._rates = setting, decode, rates
        self.rules = rules_of(model, policy)
        self.link = fetch_cost(setting.hardware, policy.transport, policy.gather_ctas, setting.placement.host_numa)
        self.write_link = write_back_cost(setting.hardware, policy.transport, setting.placement.host_numa)
        self.kernels = KernelTimes(setting)
        self.moves = policy.residency != "everything"
        self.element = KV_BYTES_PER_ELEMENT[policy.kv_dtype]
        self.block_bytes = model.block_bytes(policy.block_size_tokens, self.element)
        self.sliding = np.isin(np.arange(model.num_layers), model.sliding_layers)
        self.full_layers = np.array(model.full_attention_layers)
        self.window_tokens = model.sliding_window or 0
        layers, ring = model.num_layers, self.rules.lookahead_k + 3
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
        self.row = -1
        self.totals: NDArray[np.int64] = np.zeros(NUM_TOTALS, np.int64)
        self.sums: NDArray[np.int64] = np.zeros((num_distinct, NUM_COUNTS, len(self.full_layers)), np.int64)
        self._fetch_link, self._write_link = _coefficients(self.link), _coefficients(self.write_link)
        self._durations_fixed()
        self.done_s = np.zeros(at.NUM_STEP_COLUMNS)
        """Sum of all iterations' columns."""
        self.num_iterations = self.measured_decoding = 0
        self.h2d_bytes = self.d2h_bytes = 0.0
        """Over all GPUs of the replica."""

    def _durations_fixed(self) -> None:
        self.durations_s[:, at.SOFTWARE] = self.setting.engine.software_overhead_s
        self.durations_s[:, at.HOP] = self.link.hop_s

    def resume(self, now_s: float) -> None:
        """The replica was idle until now: what was on its way has arrived."""
        self.state.clock[:] = now_s, -1.0, -1.0, -1.0, -1.0
        self.state.counts[: at.B_PART] = (self.row + 1) * len(self.selects)
        self.arriving[:] = 0.0

    def run(self, batch: Batch, link_share: float) -> float:
        """Seconds of the iteration that starts now; `link_share` in (0, 1] scales H2D."""
        self._next_row()
        self.decode.measure(self.window_tokens, self.totals, self.sums)
        self.measured_decoding = batch.num_decoding
        self.fill(batch)
        t = self.row
        self.steps_s[t] = 0.0
        waited_s = self._drain_write_backs() + self._swap(batch, link_share)
        rules, state = self.rules, self.state
        step_s: float = run_step(
            t, rules.lookahead_k, rules.on_demand, rules.urgent, rules.plan_waits, link_share, self.durations_s,
            self.attention_s, self.scatter_s, self.selects, self.first_s, self.prefetch_s, self.write_s,
            self.waits_for_slots, state.counts, state.clock, state.planned_at_s, self._rates, self.steps_s,
        )  # fmt: skip
        self.done_s += self.steps_s[t]
        self.done_s[at.T_OTHER] += waited_s
        self.done_s[at.STEP] += waited_s
        self.num_iterations += 1
        return waited_s + step_s

    @property
    def transfers(self) -> bool:
        """Whether replicas share anything through the host link."""
        return self.moves

    def fill(self, batch: Batch) -> None:
        """Fills the current row of the window for `batch`, from the totals of the decoding requests."""
        self._fill_durations(batch)
        self._fill_attention(batch)
        if self.moves:
            self._fill_transfers(batch)

    def _fill_durations(self, batch: Batch) -> None:
        kernels, policy, dur = self.kernels, self.setting.policy, self.durations_s[self.row]
        decoding, sampled = batch.num_decoding, batch.num_sampled
        rows = decoding * (1 + cost.draft_rows(policy)) + batch.prefill_tokens
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
        plan_s = kernels.plan_s(decoding, slots_per_head(policy)) if self.moves else 0.0
        selection = kernels.score_s(decoding, blocks), kernels.topk_s(decoding, blocks), plan_s
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
            float(self.block_bytes), self._fetch_link, self.link.staged, scatter, ops + chunk_ops, written_bytes, self._write_link, self.arriving, self.first_s,
            self.prefetch_s, self.write_s, self.scatter_s, self.waits_for_slots,
        )  # fmt: skip
        self.h2d_bytes += h2d_blocks * self.block_bytes
        self.d2h_bytes += written_bytes * len(self.full_layers) * model.tensor_parallel

    def _next_row(self) -> None:
        self.row += 1
        if self.row == WINDOW_ROWS:
            self._move_window()

    def _move_window(self) -> None:
        """Keeps the rows that transfers, waits and scatters may still read, and moves them to the front."""
        layers, state = len(self.selects), self.state
        kept_from = min(
            int(state.counts[at.N_WRITTEN]) // layers, WINDOW_ROWS - self._ring
        )  # fetches lag by less than the ring
        shift = kept_from // self._ring * self._ring  # plans are found by row modulo the ring
        for array in (
            self.durations_s, self.attention_s, self.scatter_s, self.first_s, self.prefetch_s, self.write_s,
            self.waits_for_slots, self.arriving,
        ):  # fmt: skip
            array[: WINDOW_ROWS - shift] = array[shift:].copy()
        state.counts[: at.B_PART] -= shift * layers
        self.row -= shift

    def _drain_write_backs(self) -> float:
        """Seconds that the replica waits because write-backs lag too far behind."""
        layers, state, waited_s = len(self.selects), self.state, 0.0
        while self.row - int(state.counts[at.N_WRITTEN]) // layers > MAX_WRITE_LAG:
            done = int(state.counts[at.N_WRITTEN])
            left_s = state.clock[at.R_WRITE]
            waited_s += self.write_s[done // layers, done % layers] if left_s < 0 else left_s
            state.counts[at.N_WRITTEN] += 1
            state.clock[at.R_WRITE] = -1.0
        state.clock[at.NOW] += waited_s
        return waited_s

    def _swap(self, batch: Batch, link_share: float) -> float:
        """Seconds of moving swapped KV, before the iteration starts. Source: vLLM v0 swaps before it executes."""
        out_bytes, in_bytes = batch.swapped_out_bytes, batch.swapped_in_bytes
        if not out_bytes and not in_bytes:
            return 0.0
        hardware, numa = self.setting.hardware, self.setting.placement.host_numa
        seconds = out_bytes / d2h_bytes_per_s(hardware, numa)
        seconds += in_bytes / (link_share * fetch_cost(hardware, "ce-batched", 0, numa).bytes_per_s)
        self.h2d_bytes += in_bytes * self.setting.model.tensor_parallel
        self.d2h_bytes += out_bytes * self.setting.model.tensor_parallel
        self.state.clock[at.NOW] += seconds
        return seconds


def step_collectives_per_layer_s(hardware: HardwareSpec, model: ModelSpec, rows: int, batch_size: int) -> float:
    """As in a closed batch, the collectives of a step are spread over its layers."""
    return cost.step_collectives_s(hardware, model, rows, batch_size) / model.num_layers


def mean_size(total: int | np.int64, count: int) -> int:
    """Mean length, rounded up: a kernel over requests of different lengths takes as long as over as many of the mean.

    Exact where its time is linear in the tokens; that split-K kernels balance lengths is an assumption elsewhere.
    """
    return -(-int(total) // count)


Coefficients = tuple[float, float, float, int]


def _coefficients(link: LinkCost) -> Coefficients:
    """(t0, seconds per operation, seconds per byte, what an operation is: 0 none, 1 block, 2 run, 3 layer)."""
    kinds = {"none": 0, "blocks": 1, "runs": 2, "layers": 3}
    return link.t0_s, link.op_s, 1.0 / link.bytes_per_s, kinds[link.ops_are]


@njit(cache=True)
def transfer_s(link: Coefficients, blocks: float, runs: float, num_bytes: float) -> float:
    """As `step_work.transfer_s`, for one layer."""
    if blocks <= 0.0:
        return 0.0
    t0_s, op_s, byte_s, kind = link
    operations = 0.0
    if kind == 1:
        operations = blocks
    elif kind == 2:
        operations = runs
    elif kind == 3:
        operations = 1.0
    return t0_s + operations * op_s + num_bytes * byte_s


@njit(cache=True)
def fill_transfers(
    t: int, lookahead_k: int, layers: NDArray[np.int64], sums: NDArray[np.int64], gpus_alike: NDArray[np.int64],
    block_bytes: float, fetch_link: Coefficients, staged: bool, scatter: tuple[float, float], write_ops: float,
    write_bytes: float, write_link: Coefficients, arriving: Float, first_s: Float, prefetch_s: Float, write_s: Float,
    scatter_s: Float, waits_for_slots: NDArray[np.bool_],
) -> float:  # fmt: skip
    """Row t of the transfers from demand sums [D, NUM_COUNTS, full layers]; returns the blocks that all GPUs fetch.

    GPUs run in lockstep: each layer waits for the GPU that transfers longest.
    """
    total = 0.0
    written_s = transfer_s(write_link, write_ops, write_ops, write_bytes)
    for index in range(layers.shape[0]):
        layer = layers[index]
        longest_first = longest_prefetch = most_landing = 0.0
        waits = False
        for gpu in range(sums.shape[0]):
            fetched, runs = float(sums[gpu, FETCHED, index]), float(sums[gpu, RUNS, index])
            urgent, urgent_runs = float(sums[gpu, URGENT, index]), float(sums[gpu, URGENT_RUNS, index])
            repaired, repair_runs = float(sums[gpu, REPAIRED, index]), float(sums[gpu, REPAIR_RUNS, index])
            total += gpus_alike[gpu] * (fetched + repaired)
            landing = repaired
            if lookahead_k == 0:
                first = transfer_s(fetch_link, fetched, runs, fetched * block_bytes)
                landing += fetched
            else:
                ahead, now = fetched - urgent, urgent + repaired
                prefetch = transfer_s(fetch_link, ahead, runs - urgent_runs, ahead * block_bytes)
                longest_prefetch = max(longest_prefetch, prefetch)
                first = transfer_s(fetch_link, now, urgent_runs + repair_runs, now * block_bytes)
                arriving[t, gpu, 0, index], arriving[t, gpu, 1, index] = ahead, urgent
                if t >= lookahead_k:
                    landing += arriving[t - lookahead_k, gpu, 0, index] + arriving[t - 1, gpu, 1, index]
            longest_first, most_landing = max(longest_first, first), max(most_landing, landing)
            waits = waits or fetched > sums[gpu, IN_SLACK, index]
        first_s[t, layer], prefetch_s[t, layer], write_s[t, layer] = longest_first, longest_prefetch, written_s
        if staged:
            scatter_s[t, layer] = scatter[0] + most_landing * scatter[1] if most_landing > 0.0 else 0.0
        waits_for_slots[t, layer] = waits
    return total
