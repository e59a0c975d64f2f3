"""Residency of KV blocks in HBM, compiled: which blocks a step hits, fetches and evicts, and into which slots.

`begin_head` and `plan_heads` are one step of the KV heads that share a fetch cap; `replay_kernel` loops them over a
whole trace and `simulator.residency` drives them from Python. `simulator.residency_reference` states the same rules
in plain Python. The rules are docs/decisions.md §1 and §2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

FREE = -1
NEVER = 2**31 - 1

BLOCK, DUE, LEAVES = range(3)
"""Fields of `slots`, int32 [heads, 3, N]: a slot's block (FREE: none), the step from which attention reads it and the
step from which it no longer does."""

FUTURE_SLOT, LAST_SELECTED, PREDICTED, TRUE, ATTENDED, RANKED, RANK = np.arange(7)
"""Fields of `blocks`, int32 [heads, 7, B]: the slot of a block that never leaves (else FREE); the last step with the
block in the predictor's top K (−1 before any); for four sets the stamp with which the block was last put into it; and
its rank when it was last put into RANKED."""

FETCH, VICTIMS, TARGETS = np.arange(3)
"""Fields of `lists`, int32 [heads, 3, 2 N]: blocks that the last plan fetches and evicts, and destination slots."""

NUM_FUTURE, NUM_MISSING, NUM_BOUND, NUM_FETCHED, NUM_VICTIMS, NUM_FREE_TAKEN, NUM_RUNS = range(7)
"""Fields of `tally`, int32 [heads, 7]: blocks that never leave; the rest is about the last plan."""

_compiled = njit(cache=True, error_model="numpy")


def make_state(num_heads: int, num_slots: int, max_blocks: int) -> tuple[NDArray[np.int32], ...]:
    """(slots, blocks, lists, tally) of heads with empty slots, for block ids below `max_blocks`."""
    slots = np.full((num_heads, 3, num_slots), FREE, dtype=np.int32)
    slots[:, LEAVES] = NEVER
    blocks = np.zeros((num_heads, 7, max_blocks), dtype=np.int32)
    blocks[:, FUTURE_SLOT] = FREE
    blocks[:, LAST_SELECTED] = -1
    lists = np.zeros((num_heads, 3, 2 * num_slots), dtype=np.int32)
    return slots, blocks, lists, np.zeros((num_heads, 7), dtype=np.int32)


@_compiled
def sort_ascending(lists: Any, head: int, which: int, start: int, count: int) -> None:
    """Shell sort of `count` entries of a list: they are few, and numba's own sort takes seconds to compile."""
    gap = 1
    while 3 * gap + 1 < count:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(start + gap, start + count):
            value = lists[head, which, i]
            j = i
            while j >= start + gap and lists[head, which, j - gap] > value:
                lists[head, which, j] = lists[head, which, j - gap]
                j -= gap
            lists[head, which, j] = value
        gap //= 3


@_compiled
def take_smallest(keys: Any, count: int, num_wanted: int) -> None:
    """Reorder keys[:count] so that its `num_wanted` smallest come first (Hoare's quickselect; keys are distinct)."""
    low, high = 0, count - 1
    while low < high:
        pivot = keys[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while keys[i] < pivot:
                i += 1
            while keys[j] > pivot:
                j -= 1
            if i <= j:
                key = keys[i]
                keys[i] = keys[j]
                keys[j] = key
                i += 1
                j -= 1
        if num_wanted - 1 <= j:
            high = j
        elif num_wanted - 1 >= i:
            low = i
        else:
            return


@_compiled
def admit_heads(
    slots: Any, blocks: Any, lists: Any, tally: Any, num_kept: int, num_selectable: int, ids: Any, layers: Any,
    heads: Any,
) -> None:  # fmt: skip
    """Empty the slots, then make the first K selectable blocks of row 0 resident, ascending ids in slots 0, 1, …

    ids: int32 [rows, L, H, W]; head i reads ids[0, layers[i], heads[i]].
    """
    slots[:, BLOCK] = FREE
    slots[:, LEAVES] = NEVER
    blocks[:] = 0
    blocks[:, FUTURE_SLOT] = FREE
    blocks[:, LAST_SELECTED] = -1
    for i in range(len(layers)):
        count = np.int64(0)
        for rank in range(ids.shape[3]):
            block = ids[0, layers[i], heads[i], rank]
            if block < 0 or count == num_kept:
                break
            if block < num_selectable and blocks[i, FUTURE_SLOT, block] < 0:
                blocks[i, FUTURE_SLOT, block] = 0
                lists[i, FETCH, count] = block
                count += 1
        sort_ascending(lists, i, FETCH, np.int64(0), count)
        for slot in range(count):
            block = lists[i, FETCH, slot]
            slots[i, BLOCK, slot] = block
            slots[i, DUE, slot] = 0
            blocks[i, FUTURE_SLOT, block] = slot
        tally[i, NUM_FUTURE] = count


@_compiled
def begin_head(
    slots: Any, blocks: Any, lists: Any, tally: Any, head: int, step: int, capacity: int, filled_from: int,
    filled_to: int,
) -> int:  # fmt: skip
    """Free the slots whose blocks leave at `step`, then let newly filled blocks enter; returns the victims of that.

    capacity: blocks that may stay, K or a cache's size. Blocks filled_from … filled_to − 1 have filled since the last
    step. Where no plan has left room, the least recently selected block is the victim under either eviction, as no
    ranking is at hand; the last one is in VICTIMS. Where room is left but no slot is free yet, the filled block takes
    the slot of the block that leaves soonest.
    """
    num_slots = slots.shape[2]
    max_blocks = blocks.shape[2]
    for slot in range(num_slots):
        if slots[head, LEAVES, slot] <= step:
            slots[head, BLOCK, slot] = FREE
            slots[head, LEAVES, slot] = NEVER
    num_victims = 0
    for filled in range(filled_from, filled_to):
        target = FREE
        victim_slot = FREE
        smallest = np.int64(0)
        leaving_slot = FREE
        soonest = NEVER
        for slot in range(num_slots):
            resident = slots[head, BLOCK, slot]
            if resident < 0:
                if target < 0:
                    target = slot
            elif slots[head, LEAVES, slot] == NEVER:
                key = np.int64(blocks[head, LAST_SELECTED, resident]) * max_blocks + resident
                if victim_slot < 0 or key < smallest:
                    smallest = key
                    victim_slot = slot
            elif slots[head, LEAVES, slot] < soonest:
                soonest = slots[head, LEAVES, slot]
                leaving_slot = slot
        if tally[head, NUM_FUTURE] == capacity:
            victim = slots[head, BLOCK, victim_slot]
            blocks[head, FUTURE_SLOT, victim] = FREE
            slots[head, BLOCK, victim_slot] = FREE
            lists[head, VICTIMS, 0] = victim
            num_victims += 1
            if target < 0:
                target = victim_slot
        else:
            tally[head, NUM_FUTURE] += 1
            if target < 0:
                target = leaving_slot
        slots[head, BLOCK, target] = filled
        slots[head, DUE, target] = step
        slots[head, LEAVES, target] = NEVER
        blocks[head, FUTURE_SLOT, filled] = target
        blocks[head, LAST_SELECTED, filled] = step
    tally[head, NUM_FETCHED] = 0
    return num_victims


@_compiled
def list_missing(
    blocks: Any, lists: Any, tally: Any, head: int, step: int, stamp: int, ids: Any, row: int, layer: int,
    kv_head: int, num_kept: int, num_selectable: int,
) -> None:  # fmt: skip
    """Mark the first K selectable blocks as predicted and list those outside the future set, by rank."""
    count = 0
    num_missing = 0
    for rank in range(ids.shape[3]):
        block = ids[row, layer, kv_head, rank]
        if block < 0 or count == num_kept:
            break
        if block < num_selectable and blocks[head, PREDICTED, block] != stamp:
            blocks[head, PREDICTED, block] = stamp
            blocks[head, LAST_SELECTED, block] = step
            count += 1
            if blocks[head, FUTURE_SLOT, block] < 0:
                lists[head, FETCH, num_missing] = block
                num_missing += 1
    tally[head, NUM_MISSING] = num_missing
    tally[head, NUM_BOUND] = 0
    tally[head, NUM_FETCHED] = 0


@_compiled
def list_unattended(
    slots: Any, blocks: Any, lists: Any, tally: Any, head: int, step: int, stamp: int, ids: Any, row: int, layer: int,
    kv_head: int, num_kept: int, num_selectable: int,
) -> None:  # fmt: skip
    """List the true blocks that attention would not find; those in flight come last.

    `stamp` marks the sets TRUE and ATTENDED of this step. A block in flight is not waited for: it is fetched again
    into the slot that it is bound for.
    """
    num_new = 0
    num_bound = 0
    seen = 0
    for rank in range(ids.shape[3]):
        block = ids[row, layer, kv_head, rank]
        if block < 0 or seen == num_kept:
            break
        if block >= num_selectable or blocks[head, TRUE, block] != stamp:
            continue
        seen += 1
        if blocks[head, ATTENDED, block] == stamp:
            continue
        slot = blocks[head, FUTURE_SLOT, block]
        if slot >= 0:
            slots[head, DUE, slot] = step
            lists[head, TARGETS, num_bound] = block
            num_bound += 1
        else:
            lists[head, FETCH, num_new] = block
            num_new += 1
    for i in range(num_bound):
        lists[head, FETCH, num_new + i] = lists[head, TARGETS, i]
    tally[head, NUM_MISSING] = num_new + num_bound
    tally[head, NUM_BOUND] = num_bound
    tally[head, NUM_FETCHED] = num_new + num_bound


@_compiled
def commit(
    slots: Any, blocks: Any, lists: Any, tally: Any, keys: Any, head: int, step: int, due: int, capacity: int,
    keep: int, stamp: int, by_score: bool, ids: Any, row: int, layer: int, kv_head: int,
) -> None:  # fmt: skip
    """Fetch the first NUM_FETCHED blocks of FETCH for step `due` and evict what is one too many; sorts the list.

    Victims come from the future set without the blocks stamped into the set `keep`. The last NUM_BOUND blocks have
    their slots already. Writes the rest of `lists` and `tally`.
    """
    num_slots = slots.shape[2]
    max_blocks = blocks.shape[2]
    width = ids.shape[3]
    num_fetched = np.int64(tally[head, NUM_FETCHED])
    num_new = num_fetched - tally[head, NUM_BOUND]
    num_victims = tally[head, NUM_FUTURE] + num_new - capacity
    if num_victims < 0:
        num_victims = 0
    if by_score and num_victims > 0:
        for rank in range(width):
            block = ids[row, layer, kv_head, rank]
            if block < 0:
                break
            if block < max_blocks:
                blocks[head, RANK, block] = rank
                blocks[head, RANKED, block] = stamp
    num_free = np.int64(0)
    num_candidates = np.int64(0)
    for slot in range(num_slots):
        block = slots[head, BLOCK, slot]
        if block < 0:
            lists[head, TARGETS, num_free] = slot
            num_free += 1
        elif slots[head, LEAVES, slot] == NEVER and blocks[head, keep, block] != stamp:
            if not by_score:
                key = np.int64(blocks[head, LAST_SELECTED, block] + 1) * max_blocks + block
            elif blocks[head, RANKED, block] == stamp:
                key = np.int64(max_blocks + width - blocks[head, RANK, block])
            else:
                key = np.int64(block)
            keys[num_candidates] = key * num_slots + slot
            num_candidates += 1
    if num_victims < num_candidates:
        take_smallest(keys, num_candidates, num_victims)
    for i in range(num_victims):
        lists[head, TARGETS, num_free + i] = keys[i] % num_slots
    sort_ascending(lists, head, TARGETS, num_free, num_victims)
    sort_ascending(lists, head, FETCH, np.int64(0), num_new)
    for i in range(num_victims):
        slot = lists[head, TARGETS, num_free + i]
        victim = slots[head, BLOCK, slot]
        lists[head, VICTIMS, i] = victim
        blocks[head, FUTURE_SLOT, victim] = FREE
        if due > step:
            slots[head, LEAVES, slot] = due
        else:
            slots[head, BLOCK, slot] = FREE
    for i in range(num_new):
        slot = lists[head, TARGETS, i]
        block = lists[head, FETCH, i]
        slots[head, BLOCK, slot] = block
        slots[head, DUE, slot] = due
        slots[head, LEAVES, slot] = NEVER
        blocks[head, FUTURE_SLOT, block] = slot
    if num_new < num_fetched:
        sort_ascending(lists, head, FETCH, np.int64(0), num_fetched)
    num_runs = 0
    last_block = -2
    last_slot = -2
    for i in range(num_fetched):
        block = lists[head, FETCH, i]
        slot = blocks[head, FUTURE_SLOT, block]
        if block != last_block + 1 or slot != last_slot + 1:
            num_runs += 1
        last_block = block
        last_slot = slot
    tally[head, NUM_FUTURE] += num_new - num_victims
    tally[head, NUM_VICTIMS] = num_victims
    tally[head, NUM_FREE_TAKEN] = num_new if num_new < num_free else num_free
    tally[head, NUM_RUNS] = num_runs


@_compiled
def plan_heads(
    slots: Any,
    blocks: Any,
    lists: Any,
    tally: Any,
    keys: Any,
    step: int,
    due: int,
    stamp: int,
    num_kept: int,
    capacity: int,
    num_selectable: int,
    ids: Any,
    row: int,
    layers: Any,
    heads: Any,
    first: int,
    num_heads: int,
    allowed: int,
    repairing: bool,
    repairs: Any,
    by_score: bool,
) -> int:
    """Plan a fetch for step `due` on every head of a cap scope; returns the allowance that is left.

    ids: int32 [rows, L, H, W]; head i reads ids[row, layers[first + i], heads[first + i]]. The allowance is granted
    by (rank in the missing list, head). num_kept: how many blocks of the ranking are wanted; capacity: how many may
    stay; both without the room that the plan leaves. A head whose row is masked has no plan. When repairing, the
    ranking is the selector's, `stamp` marks the sets TRUE and ATTENDED, the cap does not hold, and a head is repaired
    where repairs[row, layer, head] (uint8) is not 0. Results are in `lists` and `tally`.
    """
    left = allowed
    most = 0
    for i in range(num_heads):
        layer = layers[first + i]
        kv_head = heads[first + i]
        if repairing and repairs[row, layer, kv_head] == 0:
            tally[i, NUM_MISSING] = 0
            tally[i, NUM_BOUND] = 0
            tally[i, NUM_FETCHED] = 0
        elif repairing:
            list_unattended(
                slots, blocks, lists, tally, i, step, stamp, ids, row, layer, kv_head, num_kept, num_selectable
            )  # fmt: skip
        else:
            list_missing(blocks, lists, tally, i, step, stamp, ids, row, layer, kv_head, num_kept, num_selectable)
            if tally[i, NUM_MISSING] > most:
                most = tally[i, NUM_MISSING]
    for rank in range(most):
        if left == 0:
            break
        if num_heads == 1:
            tally[0, NUM_FETCHED] = most if most < left else left
            left -= tally[0, NUM_FETCHED]
            break
        for i in range(num_heads):
            if left > 0 and rank < tally[i, NUM_MISSING]:
                tally[i, NUM_FETCHED] += 1
                left -= 1
    for i in range(num_heads):
        leaves_room = tally[i, NUM_FUTURE] > capacity and ids[row, layers[first + i], heads[first + i], 0] >= 0
        if tally[i, NUM_FETCHED] == 0 and not leaves_room:
            tally[i, NUM_VICTIMS] = 0
            tally[i, NUM_FREE_TAKEN] = 0
            tally[i, NUM_RUNS] = 0
        else:
            keep = TRUE if repairing else PREDICTED
            commit(
                slots, blocks, lists, tally, keys, i, step, due, capacity, keep, stamp, by_score, ids, row,
                layers[first + i], heads[first + i],
            )  # fmt: skip
    return left
