"""Residency driven one step at a time: what a live decode, a GPU harness or a test asks of the compiled rules.

residency = Residency(num_heads, num_kept=K, num_slots=K + slack, max_blocks=n_max)
residency.admit(ranking, num_blocks)                 # step 0
residency.plan(ranking_of_step_1, 1, allowed=K)      # after attention of step 0
residency.begin(num_blocks)                          # step 1
residency.attended()                                 # what attention of step 1 reads
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulator import residency_kernel as kernel
from traces.errors import InputError

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One head's part of a plan.

    fetch_ids, fetch_slots: blocks to transfer, ascending, and the slots they go to. victim_ids: blocks that leave, in
    slot order. hit_ids: chosen blocks that need no transfer, by rank. num_runs: transfers when runs of consecutive
    blocks in consecutive slots are one. num_in_slack: fetched blocks that go to slots which nobody was reading.
    """

    fetch_ids: Int32
    fetch_slots: Int32
    victim_ids: Int32
    hit_ids: Int32
    num_runs: int
    num_in_slack: int


class Residency:
    """Slots of KV heads that share a fetch cap. Mutable; `copy` and `step` give the pure form."""

    def __init__(
        self,
        num_heads: int,
        num_kept: int,
        num_slots: int,
        max_blocks: int,
        eviction: str = "least-recently-selected",
    ) -> None:
        if min(num_heads, num_kept, max_blocks) < 1 or num_slots < num_kept:
            raise InputError(
                f"residency needs at least one head, block and slot, and K of its slots: got {num_heads} heads, "
                f"K = {num_kept}, {num_slots} slots, {max_blocks} blocks"
            )
        self.num_heads, self.num_kept, self.num_slots, self.max_blocks = num_heads, num_kept, num_slots, max_blocks
        self.by_score = eviction == "lowest-score"
        self.step, self.num_blocks = -1, 0
        self._slots, self._blocks, self._lists, self._tally = kernel.make_state(num_heads, num_slots, max_blocks)
        self._keys = np.zeros(num_slots, dtype=np.int64)
        self._layers = np.zeros(num_heads, dtype=np.int32)
        self._heads = np.arange(num_heads, dtype=np.int32)
        self._repairs = np.ones((1, 1, num_heads), dtype=np.uint8)
        self._stamp = 0

    def copy(self) -> Residency:
        return deepcopy(self)

    def admit(self, ranking: ArrayLike, num_blocks: int) -> None:
        """Step 0: the first K selectable blocks of each row of `ranking` [heads, W] are resident."""
        self._require_blocks(num_blocks)
        self.step, self.num_blocks = 0, num_blocks
        kernel.admit_heads(
            self._slots, self._blocks, self._lists, self._tally, self.num_kept, num_blocks - 1, self._ids(ranking),
            self._layers, self._heads,
        )  # fmt: skip

    def begin(self, num_blocks: int) -> list[Int32]:
        """Next step, with `num_blocks` blocks: blocks leave, newly filled ones enter. Returns each head's victims."""
        self._require_blocks(num_blocks)
        before, self.num_blocks = self.num_blocks, num_blocks
        self.step += 1
        victims: list[list[int]] = [[] for _ in range(self.num_heads)]
        for head in range(self.num_heads):
            for filled in range(before - 1, max(before, num_blocks - 1)):
                upto = min(filled + 1, num_blocks - 1)
                if kernel.begin_head(
                    self._slots, self._blocks, self._lists, self._tally, head, self.step, self.num_kept, filled, upto
                ):
                    victims[head].append(int(self._lists[head, kernel.VICTIMS, 0]))
        return [np.array(ids, dtype=np.int32) for ids in victims]

    def plan(self, ranking: ArrayLike, due: int, allowed: int, room: int = 0) -> tuple[list[Plan], int]:
        """Plan a fetch for attention of step `due`; `due` = the current step fetches on demand.

        ranking: [heads, W] block ids by rank, −1 past a row's end; a row of −1 alone is no plan. room: blocks that
        fill after this step and up to `due`, for which the plan leaves places. Returns each head's plan and what is
        left of `allowed`, which the heads share by (rank in the missing list, head).
        """
        if due < self.step:
            raise InputError(f"a plan at step {self.step} cannot be due at step {due}")
        self._stamp += 1
        ids = self._ids(ranking)
        num_kept = max(0, self.num_kept - room)
        hits = [self._future_of(head, row, num_kept) for head, row in enumerate(ids[0, 0])]
        left = kernel.plan_heads(
            self._slots, self._blocks, self._lists, self._tally, self._keys, self.step, due, self._stamp,
            num_kept, num_kept, self.num_blocks - 1, ids, 0, self._layers, self._heads, 0, self.num_heads, allowed,
            False, self._repairs, self.by_score,
        )  # fmt: skip
        return [self._plan_of(head, hits[head]) for head in range(self.num_heads)], int(left)

    def repair(self, ranking: ArrayLike) -> list[Plan]:
        """Fetch, before attention and beyond any cap, what the real query selects and attention would not find."""
        self._stamp += 1
        ids = self._ids(ranking)
        attended = self.attended()
        chosen = [self._first(row, self.num_kept) for row in ids[0, 0]]
        for head, blocks in enumerate(chosen):
            self._blocks[head, kernel.TRUE, blocks] = self._stamp
            self._blocks[head, kernel.ATTENDED, attended[head]] = self._stamp
        kernel.plan_heads(
            self._slots, self._blocks, self._lists, self._tally, self._keys, self.step, self.step, self._stamp,
            self.num_kept, self.num_kept, self.num_blocks - 1, ids, 0, self._layers, self._heads, 0, self.num_heads, 0,
            True, self._repairs, self.by_score,
        )  # fmt: skip
        hits = [blocks[np.isin(blocks, attended[head])] for head, blocks in enumerate(chosen)]
        return [self._plan_of(head, hits[head]) for head in range(self.num_heads)]

    def attended(self) -> list[Int32]:
        """Ids that attention of this step reads per head, ascending, without the open block."""
        block, due, leaves = self._slots[:, kernel.BLOCK], self._slots[:, kernel.DUE], self._slots[:, kernel.LEAVES]
        read = (block >= 0) & (due <= self.step) & (leaves > self.step)
        return [np.unique(block[head][read[head]]) for head in range(self.num_heads)]

    def slot_blocks(self) -> Int32:
        """Block id in each slot, int32 [heads, N], −1 where the slot is free; arrivals in flight included."""
        return self._slots[:, kernel.BLOCK].copy()

    def _plan_of(self, head: int, hit_ids: Int32) -> Plan:
        tally = self._tally[head]
        fetch = self._lists[head, kernel.FETCH, : tally[kernel.NUM_FETCHED]].copy()
        return Plan(
            fetch_ids=fetch,
            fetch_slots=self._blocks[head, kernel.FUTURE_SLOT, fetch],
            victim_ids=self._lists[head, kernel.VICTIMS, : tally[kernel.NUM_VICTIMS]].copy(),
            hit_ids=hit_ids,
            num_runs=int(tally[kernel.NUM_RUNS]),
            num_in_slack=int(tally[kernel.NUM_FREE_TAKEN]),
        )

    def _first(self, ranking: Int32, num_kept: int) -> Int32:
        """The first selectable blocks of one row."""
        ends = np.flatnonzero(ranking < 0)
        row = ranking[: ends[0]] if len(ends) else ranking
        return row[row < self.num_blocks - 1][:num_kept]

    def _future_of(self, head: int, ranking: Int32, num_kept: int) -> Int32:
        chosen = self._first(ranking, num_kept)
        resident: Int32 = chosen[self._blocks[head, kernel.FUTURE_SLOT, chosen] >= 0]
        return resident

    def _ids(self, ranking: ArrayLike) -> Int32:
        ids = np.array(ranking, dtype=np.int32, ndmin=2)
        if ids.shape[0] != self.num_heads or ids.ndim != 2:
            raise InputError(f"a ranking of {self.num_heads} heads must be [{self.num_heads}, W], got {ids.shape}")
        ids.flags.writeable = False
        return ids[None, None]

    def _require_blocks(self, num_blocks: int) -> None:
        if not max(1, self.num_blocks) <= num_blocks <= self.max_blocks:
            raise InputError(
                f"blocks must be within {max(1, self.num_blocks)} … {self.max_blocks} and never fewer, got {num_blocks}"
            )


def step(
    state: Residency, ranked_ids: ArrayLike, allowed: int, due: int | None = None, room: int = 0
) -> tuple[Plan, Residency]:
    """One head's plan as a pure function: (plan, next state); `state` stays as it was.

    ranked_ids: [W]; due: the step of the attention served, by default the current one (on demand); room as for
    `Residency.plan`.
    """
    after = state.copy()
    plans, _ = after.plan(np.asarray(ranked_ids)[None], state.step if due is None else due, allowed, room)
    return plans[0], after
