"""What a policy asks of the memory system, per step and layer: blocks hit, fetched and evicted. No bytes, no time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float64 = NDArray[np.float64]

REMOTE_FIELDS = ("remote_fetched", "remote_urgent", "remote_repaired")
COUNT_FIELDS = (
    "hit",
    "missed",
    "fetched",
    "evicted",
    "runs",
    "in_slack",
    "urgent",
    "urgent_runs",
    "repaired",
    "repair_runs",
)
SHARE_FIELDS = ("recall", "recall_upper", "overlap")


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """Demand of one request of the mapped model: arrays [S, L], L its full-attention layers, summed over KV heads.

    Row t of `fetched`, `runs`, `urgent` and `in_slack` is the plan *issued* in step t (used at t + lookahead_k);
    row t of everything else is about attention in step t. Source of the rules: docs/decisions.md §1 and §2.
    """

    hit: Int32
    """Blocks of the true set that attention finds before any fetch of its own step."""
    missed: Int32
    """The rest of the true set."""
    fetched: Int32
    """Blocks that the step's plan transfers, after the cap."""
    evicted: Int32
    """Victims of the plan, of repairs and of blocks that filled."""
    runs: Int32
    """Transfers that `fetched` makes when runs of consecutive blocks in consecutive slots are one."""
    in_slack: Int32
    """Part of `fetched` whose slot is free: its transfer need not wait for attention."""
    urgent: Int32
    """Part of `fetched` that is due at t + 1 (`refine`)."""
    urgent_runs: Int32
    """Part of `runs`."""
    repaired: Int32
    """Missing true blocks fetched before attention (`stall` with a predictor), not in `fetched`."""
    repair_runs: Int32
    """Runs of `repaired`, not in `runs`."""
    recall: Float64
    """Sum over heads of the softmax mass that attention reads, at least."""
    recall_upper: Float64
    """The same, at most; above `recall` only where attention reads blocks whose mass was not recorded."""
    overlap: Float64
    """Sum over heads of |predicted ∩ true| / min(K, n); 0 in the first lookahead_k rows, which have no prediction."""
    num_blocks: Int32
    """[S], n per step, the open block included."""
    num_kv_heads: int
    num_kept: int
    """K, blocks per KV head that attention reads besides the open block."""
    num_slots: int
    """K + slack per KV head."""
    lookahead_k: int
    """Steps from a plan to its attention; 0: on demand."""
    admission_blocks: int
    """Blocks that must be in HBM before step 0, over all layers and heads; 0 where everything is."""
    steady_start: int
    steady_stop: int
    """Rows [start, stop) that means use and long runs repeat: both the plan and its attention lie in the trace."""
    tokens: Int32 | None = None
    """[S], positions that the request advances by in each step; null: one (no drafts are verified)."""
    remote_fetched: Int32 | None = None
    """Part of `fetched` that host memory does not hold (host residency `fetched`). None: it holds nothing."""
    remote_urgent: Int32 | None = None
    """Part of `urgent`, likewise."""
    remote_repaired: Int32 | None = None
    """Part of `repaired`, likewise."""
    corrected_share: float = 0.0
    """Share of (steady row, layer, head) in which the real query selects before attention, on top of a prediction."""
    per_head: Mapping[str, NDArray[np.int32 | np.float64]] | None = None
    """On request: the same fields before the sum, [S, L, H]."""

    def from_remote(self) -> tuple[Int32, Int32, Int32]:
        """(fetched, urgent, repaired) blocks that come from beyond the host, where the full KV lives there."""
        if self.remote_fetched is None or self.remote_urgent is None or self.remote_repaired is None:
            return self.fetched, self.urgent, self.repaired
        return self.remote_fetched, self.remote_urgent, self.remote_repaired

    @property
    def num_steps(self) -> int:
        return len(self.num_blocks)

    @property
    def num_layers(self) -> int:
        return int(self.hit.shape[1])

    def tokens_by_row(self) -> Int32:
        """[S]."""
        return np.ones(self.num_steps, dtype=np.int32) if self.tokens is None else self.tokens

    def tokens_per_step(self) -> float:
        """Mean over steady rows."""
        return float(self.tokens_by_row()[self.steady_start : self.steady_stop].mean())

    def hit_rate(self) -> float:
        """Mean of hits / min(K, n) over heads, layers and steady rows."""
        return self._mean(self.hit / np.minimum(self.num_kept, self.num_blocks)[:, None])

    def mean_overlap(self) -> float:
        """Mean of |predicted ∩ true| / min(K, n)."""
        return self._mean(self.overlap)

    def mean_recall(self) -> float:
        return self._mean(self.recall)

    def mean_recall_upper(self) -> float:
        return self._mean(self.recall_upper)

    def churn(self) -> float:
        """Mean of fetched / K. Repairs are not in it: they follow misses, not the plan."""
        return self._mean(self.fetched / self.num_kept)

    def _mean(self, per_layer: NDArray[np.float64]) -> float:
        rows = per_layer[self.steady_start : self.steady_stop]
        return float(rows.sum() / (rows.size * self.num_kv_heads))
