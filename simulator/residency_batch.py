"""Residency of many policies in lockstep over all their KV heads: the step functions of the kernel, in one call.

For a live decode that runs policies side by side. Each (policy, head) has its own slots; the fetch cap is per head.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simulator import residency_kernel as kernel

_compiled = njit(cache=True, error_model="numpy", nogil=True)


@_compiled  # type: ignore[untyped-decorator]
def admit_policies(
    first: int, last: int, slots: Any, blocks: Any, lists: Any, tally: Any, num_kept: Any, num_slots: Any,
    num_selectable: int, ids: Any, layers: Any, heads: Any,
) -> None:  # fmt: skip
    """Step 0 of policies first … last − 1. ids: int32 [A, L, H, W]; each run of B / A policies admits by one."""
    per_ranking = len(num_kept) // len(ids)
    for policy in range(first, last):
        row = policy // per_ranking
        kernel.admit_heads(
            slots[policy, :, :, : num_slots[policy]], blocks[policy], lists[policy], tally[policy], num_kept[policy],
            num_selectable, ids[row : row + 1], layers, heads,
        )  # fmt: skip


@_compiled  # type: ignore[untyped-decorator]
def plan_policies(
    first: int, last: int, slots: Any, blocks: Any, lists: Any, tally: Any, keys: Any, num_kept: Any, num_slots: Any,
    by_score: Any, step: int, stamp: int, due: Any, room: Any, allowed: Any, num_selectable: int, ids: Any,
    unit_first: int, layers: Any, heads: Any, fetched: Any,
) -> None:  # fmt: skip
    """One plan per head of policies first … last − 1.

    ids: int32 [B, L, H, W]; head unit_first + i reads ids[policy, layers[i], heads[i]]. due, room, allowed: int [B], no
    plan where due < 0. Adds each policy's fetches to `fetched`.
    """
    nothing_repaired = np.zeros((1, 1, 1), dtype=np.uint8)
    for policy in range(first, last):
        if due[policy] < 0:
            continue
        places = max(0, num_kept[policy] - room[policy])
        for i in range(len(layers)):
            unit = unit_first + i
            kernel.plan_heads(
                slots[policy, unit : unit + 1, :, : num_slots[policy]], blocks[policy, unit : unit + 1],
                lists[policy, unit : unit + 1], tally[policy, unit : unit + 1], keys[policy], step, due[policy], stamp,
                places, places, num_selectable, ids, policy, layers, heads, i, 1, allowed[policy], False,
                nothing_repaired, by_score[policy],
            )  # fmt: skip
            fetched[policy] += tally[policy, unit, kernel.NUM_FETCHED]


@_compiled  # type: ignore[untyped-decorator]
def begin_policies(
    first: int, last: int, slots: Any, blocks: Any, lists: Any, tally: Any, num_kept: Any, num_slots: Any, step: int,
    filled_from: int, filled_to: int,
) -> None:  # fmt: skip
    """Start `step`: blocks leave, filled_from … filled_to − 1 enter."""
    for policy in range(first, last):
        for unit in range(slots.shape[1]):
            kernel.begin_head(
                slots[policy, :, :, : num_slots[policy]], blocks[policy], lists[policy], tally[policy], unit, step,
                num_kept[policy], filled_from, filled_to,
            )  # fmt: skip


@_compiled  # type: ignore[untyped-decorator]
def read_policies(
    first: int, last: int, slots: Any, num_slots: Any, step: int, unit_first: int, unit_last: int, attended: Any
) -> None:
    """Set attended[policy, unit, block] for the blocks that attention of `step` reads; uint8, cleared before."""
    for policy in range(first, last):
        for unit in range(unit_first, unit_last):
            attended[policy, unit] = 0
            for slot in range(num_slots[policy]):
                block = slots[policy, unit, kernel.BLOCK, slot]
                arrived = block >= 0 and slots[policy, unit, kernel.DUE, slot] <= step
                if arrived and slots[policy, unit, kernel.LEAVES, slot] > step:
                    attended[policy, unit, block] = 1


class ResidencyBatch:
    """Slots of `num_layers` × `num_heads` KV heads for each of B policies of one block size.

    num_kept, num_slots, by_score: [B] as in `simulator.residency.Residency`. Mutable; a step is: `begin`, on-demand
    `plan`, `attended`, then `plan` for later steps.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        num_kept: NDArray[np.int64],
        num_slots: NDArray[np.int64],
        by_score: NDArray[np.bool_],
        max_blocks: int,
        num_threads: int = 1,
    ) -> None:
        self.num_policies, self.num_layers, self.num_heads = len(num_kept), num_layers, num_heads
        self.num_kept, self.num_slots, self.by_score = num_kept, num_slots, by_score
        units = num_layers * num_heads
        state = kernel.make_state(self.num_policies * units, int(num_slots.max()), max_blocks)
        self._state = tuple(array.reshape(self.num_policies, units, *array.shape[1:]) for array in state)
        self._keys = np.zeros((self.num_policies, int(num_slots.max())), dtype=np.int64)
        self._layers = np.repeat(np.arange(num_layers, dtype=np.int32), num_heads)
        self._heads = np.tile(np.arange(num_heads, dtype=np.int32), num_layers)
        self._attended = np.zeros((self.num_policies, units, max_blocks), dtype=np.uint8)
        self._stamp = 0
        self.step, self.num_blocks = -1, 0
        self._pool = ThreadPoolExecutor(num_threads)
        bounds = np.linspace(0, self.num_policies, min(4 * num_threads, self.num_policies) + 1).round().astype(int)
        self._parts = [(int(a), int(b)) for a, b in pairwise(bounds)]

    def admit(self, ranking: NDArray[np.int32], num_blocks: int) -> None:
        """Step 0: the first K selectable blocks of a ranking are resident.

        ranking: [A, L, H, W]; the first B / A policies admit by row 0, the next by row 1, ….
        """
        self.step, self.num_blocks = 0, num_blocks
        ids = _read_only(ranking)
        self._run(
            admit_policies, *self._state, self.num_kept, self.num_slots, num_blocks - 1, ids, self._layers, self._heads
        )

    def begin(self, num_blocks: int) -> None:
        """Next step, with `num_blocks` blocks."""
        before, self.num_blocks = self.num_blocks, num_blocks
        self.step += 1
        self._run(
            begin_policies, *self._state, self.num_kept, self.num_slots, self.step, before - 1,
            max(before - 1, num_blocks - 1),
        )  # fmt: skip

    def plan(
        self,
        ranking: NDArray[np.int32],
        due: NDArray[np.int64],
        allowed: NDArray[np.int64],
        layer: int | None = None,
        room: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """Plan for step due[b] ≥ the current one (−1: no plan); returns blocks fetched per policy, int64 [B].

        ranking: int32 [B, L, H, W]; with `layer` given, [B, 1, H, W] for that layer alone. allowed: per KV head.
        room: [B], places to leave for blocks that fill after this step and up to `due`; none by default.
        """
        self._stamp += 1
        fetched = np.zeros(self.num_policies, dtype=np.int64)
        unit_first, layers, heads = 0, self._layers, self._heads
        if layer is not None:
            unit_first = layer * self.num_heads
            layers, heads = np.zeros(self.num_heads, dtype=np.int32), heads[: self.num_heads]
        self._run(
            plan_policies, *self._state, self._keys, self.num_kept, self.num_slots, self.by_score, self.step,
            self._stamp, due, np.zeros_like(due) if room is None else room, allowed, self.num_blocks - 1,
            _read_only(ranking), unit_first, layers, heads, fetched,
        )  # fmt: skip
        return fetched

    def attended(self, layer: int | None = None) -> NDArray[np.uint8]:
        """Blocks that attention of this step reads without the open block: uint8 [B, L, H, max blocks]; a view."""
        first, last = 0, self.num_layers
        if layer is not None:
            first, last = layer, layer + 1
        self._run(
            read_policies, self._state[0], self.num_slots, self.step, first * self.num_heads, last * self.num_heads,
            self._attended,
        )  # fmt: skip
        shaped = self._attended.reshape(self.num_policies, self.num_layers, self.num_heads, -1)
        return shaped if layer is None else shaped[:, layer : layer + 1]

    def _run(self, function: Any, *arguments: Any) -> None:
        """Over all policies, split among the threads; the compiled functions release the interpreter lock."""
        list(self._pool.map(lambda part: function(*part, *arguments), self._parts))


def _read_only(array: NDArray[np.int32]) -> NDArray[np.int32]:
    view = np.ascontiguousarray(array, dtype=np.int32).view()
    view.flags.writeable = False
    return view
