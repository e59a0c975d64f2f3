"""Names of the arrays that a decode step is made of; shared by the compiled kernel and its SimPy reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.engine_rates import Kind

# Phases of the compute stream, in order; SOFTWARE … SAMPLING once, QKV … ALLREDUCE per layer, the rest once.
SOFTWARE, DRAFT, SAMPLING, QKV, SCORE, TOPK, PLAN, WAIT, JOIN = range(9)
SCATTER, ATTENTION, FFN, ALLREDUCE, LM_HEAD, OTHER, END = range(9, 16)
# Durations beyond the compute stream's phases in the same array.
SIDE_SCORE, SIDE_TOPK, SIDE_PLAN, HOP = 16, 17, 18, 19
NUM_DURATIONS = 20

PHASE_KIND = np.array(
    [
        Kind.IDLE,  # software: the GPU is idle
        Kind.GEMM,
        Kind.GEMM,
        Kind.GEMM,
        Kind.SCORE,
        Kind.TOPK,
        Kind.TOPK,
        Kind.IDLE,
        Kind.IDLE,  # launches that side streams' forks and joins hold back
        Kind.ATTENTION,
        Kind.ATTENTION,
        Kind.GEMM,
        Kind.IDLE,  # all-reduce: NVLink, not an engine of this table
        Kind.GEMM,
        Kind.IDLE,
        Kind.IDLE,
    ],
    dtype=np.int64,
)
T_QKV, T_ATTENTION, T_FFN, T_SCORE, T_PLAN, T_GATHER, T_EXPOSED, T_ALLREDUCE, T_DRAFT, T_SAMPLING = range(10)
T_LM_HEAD, T_SOFTWARE, T_OTHER = 10, 11, 12
NUM_PARTS = 13
STEP, H_BUSY, D_BUSY, R_BUSY, NUM_STEP_COLUMNS = 13, 14, 15, 16, 17
"""Columns after the breakdown in what `run_step` writes per step."""
PHASE_PART = np.array(
    [
        T_SOFTWARE, T_DRAFT, T_SAMPLING, T_QKV, T_SCORE, T_PLAN, T_PLAN, T_EXPOSED, T_OTHER, T_GATHER, T_ATTENTION,
        T_FFN, T_ALLREDUCE, T_LM_HEAD, T_OTHER, T_OTHER,
    ],
    dtype=np.int64,
)  # fmt: skip
"""Where a phase's time goes in `simulator.metrics.BREAKDOWN` order (a wait is split by what is missing)."""


@dataclass(frozen=True, slots=True)
class StepRules:
    """What waits for what; constant over a run."""

    num_layers: int
    lookahead_k: int
    """Steps between a prefetch and the attention that waits for it; 0: no prefetch."""
    on_demand: bool
    """Selection runs on the compute stream and attention(t, l) waits for the transfer of (t, l)."""
    urgent: bool
    """Refine: the first queue's transfers serve step t + 1 and are planned on the side stream."""
    plan_waits: bool
    """A plan exists at all: a layer without fetches still waits for it."""
    remote: bool = False
    """Blocks come from beyond the host: engine R (NIC, NVMe) serves a (step, layer) before H2D does."""
    lands_in_slots: bool = False
    """R writes into slots itself, so it waits for attention to have read them; H2D has nothing to do."""
    same_step: bool = False
    """Prefetches serve the step's own attention (lookahead_k 0); a layer is planned as the layer before computes."""
    stream_buffers: int = 0
    """With same_step: no plan at all, a layer's transfer starts when one of so many layer buffers is free."""

    @property
    def prefetches(self) -> bool:
        return self.lookahead_k > 0 or self.same_step

    @property
    def flags(self) -> tuple[int, bool, bool, bool, bool, bool, bool, int]:
        """What `step_kernel.run_step` takes of the rules, in its order."""
        return (
            self.lookahead_k, self.on_demand, self.urgent, self.plan_waits, self.remote, self.lands_in_slots,
            self.same_step, self.stream_buffers,
        )  # fmt: skip


@dataclass(slots=True)
class StepState:
    """What one GPU carries from step to step. Index g = step * num_layers + layer; queues are served in order of g."""

    counts: NDArray[np.int64]
    """Finished: [qkv, selection on C, attention, side plans, first queue, prefetches, write-backs, part of the side
    stream, first queue on R, prefetches on R]."""
    clock: NDArray[np.float64]
    """[now, then what remains of: side stream, first queue, prefetch, write-back, both queues on R]; -1: none."""
    planned_at_s: NDArray[np.float64]
    """When the plan of (step mod ring, layer) was done, [2, ring, L]: on C, on B."""


N_QKV, N_SELECTED, N_ATTENTION, N_PLANNED, N_FIRST, N_PREFETCH, N_WRITTEN, B_PART = range(8)
N_REMOTE_FIRST, N_REMOTE_PREFETCH = 8, 9
NOW, LEFT_SIDE, LEFT_FIRST, LEFT_PREFETCH, LEFT_WRITE, LEFT_REMOTE_FIRST, LEFT_REMOTE_PREFETCH = range(7)


def new_state(num_layers: int, ring: int) -> StepState:
    clock = np.full(7, -1.0)
    clock[NOW] = 0.0
    return StepState(np.zeros(10, dtype=np.int64), clock, np.zeros((2, ring, num_layers)))


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of every step of a run, seconds alone at full link share. T steps, L attention layers."""

    durations_s: NDArray[np.float64]
    """[T, NUM_DURATIONS]."""
    attention_s: NDArray[np.float64]
    """[T, L]."""
    scatter_s: NDArray[np.float64]
    """[T, L]: copying arrivals from the staging buffer into slots, before attention(t, l)."""
    selects: NDArray[np.bool_]
    """[L]: this layer scores, plans and moves blocks (False: sliding-window layers)."""
    first_s: NDArray[np.float64]
    """[T, L]: on-demand, repair or urgent transfers."""
    prefetch_s: NDArray[np.float64]
    """[T, L]."""
    write_s: NDArray[np.float64]
    """[T, L]: write-back of new KV."""
    waits_for_slots: NDArray[np.bool_]
    """[T, L]: a prefetch or urgent transfer lands in slots that attention(t, l) still reads."""
    remote_first_s: NDArray[np.float64]
    """[T, L]: what of the first queue comes from beyond the host; it reaches H2D when all of the layer's has."""
    remote_prefetch_s: NDArray[np.float64]
    """[T, L]: the same of prefetches."""
