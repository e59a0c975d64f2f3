"""Rows of step work that move along with a replica's iterations: transfers of earlier ones may still be on their way,
and memory does not grow with the run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator import step_layout as at
from simulator.step_layout import StepState

WINDOW_ROWS = 96
MAX_WRITE_LAG = 32
"""Iterations whose write-back may be outstanding: the staging memory of one prefill chunk each. An assumption; with
it a slow way home slows prefill instead of growing a queue without end."""


class Window:
    """Arrays of `simulator.step_layout.StepWork`, WINDOW_ROWS steps long, and the state that `run_step` carries."""

    def __init__(self, num_layers: int, num_full_layers: int, num_gpus: int, lookahead_k: int) -> None:
        """`num_gpus`: those whose demand differs."""
        self.num_layers, self._ring = num_layers, lookahead_k + 3
        self.durations_s = np.zeros((WINDOW_ROWS, at.NUM_DURATIONS))
        (
            self.attention_s, self.scatter_s, self.first_s, self.prefetch_s, self.write_s, self.remote_first_s,
            self.remote_prefetch_s,
        ) = (np.zeros((WINDOW_ROWS, num_layers)) for _ in range(7))  # fmt: skip
        self.waits_for_slots: NDArray[np.bool_] = np.zeros((WINDOW_ROWS, num_layers), np.bool_)
        self.arriving = np.zeros((WINDOW_ROWS, num_gpus, 2, num_full_layers))
        """Blocks that a row's plan brings to a GPU: prefetched for lookahead_k rows later, urgent for the next row."""
        self.steps_s = np.zeros((WINDOW_ROWS, at.NUM_STEP_COLUMNS))
        self.state: StepState = at.new_state(num_layers, self._ring)
        self._queues = np.arange(len(self.state.counts)) != at.B_PART
        self.row = -1

    def next_row(self) -> None:
        self.row += 1
        if self.row == WINDOW_ROWS:
            self._move()

    def resume(self) -> None:
        """Nothing ran for a while: what was on its way has arrived."""
        self.state.clock[:] = -1.0
        self.state.clock[at.NOW] = 0.0
        self.state.counts[self._queues] = (self.row + 1) * self.num_layers
        self.arriving[:] = 0.0

    def _move(self) -> None:
        """Keeps the rows that transfers, waits and scatters may still read, and moves them to the front."""
        state = self.state
        # Fetches lag by less than the ring.
        kept_from = min(int(state.counts[at.N_WRITTEN]) // self.num_layers, WINDOW_ROWS - self._ring)
        shift = kept_from // self._ring * self._ring  # plans are found by row modulo the ring
        for array in (
            self.durations_s, self.attention_s, self.scatter_s, self.first_s, self.prefetch_s, self.write_s,
            self.remote_first_s, self.remote_prefetch_s, self.waits_for_slots, self.arriving,
        ):  # fmt: skip
            array[: WINDOW_ROWS - shift] = array[shift:].copy()
        state.counts[self._queues] -= shift * self.num_layers
        self.row -= shift
        # A clock that starts again keeps its last digits over hours.
        state.planned_at_s -= state.clock[at.NOW]
        state.clock[at.NOW] = 0.0

    def drain_write_backs(self) -> float:
        """Seconds that the replica waits because write-backs lag too far behind."""
        layers, state, waited_s = self.num_layers, self.state, 0.0
        while self.row - int(state.counts[at.N_WRITTEN]) // layers > MAX_WRITE_LAG:
            done = int(state.counts[at.N_WRITTEN])
            left_s = state.clock[at.LEFT_WRITE]
            waited_s += self.write_s[done // layers, done % layers] if left_s < 0 else left_s
            state.counts[at.N_WRITTEN] += 1
            state.clock[at.LEFT_WRITE] = -1.0
        state.clock[at.NOW] += waited_s
        return waited_s
