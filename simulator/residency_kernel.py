"""Residency of KV blocks in HBM, compiled: which blocks a step hits, fetches and evicts, and into which slots.

One step of one KV head is `release`, `fill`, `select`, `commit` (and `repair` under the stall rule); `replay_heads`
loops them over a whole trace. `simulator.residency` drives the same functions step by step from Python, and
`simulator.residency_reference` states the same rules in plain Python. The rules are docs/decisions.md §1 and §2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Int32 = NDArray[np.int32]

FREE = -1
NEVER = 2**31 - 1

COUNTS = (
    "hit",
    "missed",
    "overlap",
    "fetched",
    "runs",
    "evicted",
    "in_slack",
    "urgent",
    "urgent_runs",
    "repaired",
    "repair_runs",
)
"""Rows of the counts that `replay_heads` fills, in order."""
HIT, MISSED, OVERLAP, FETCHED, RUNS, EVICTED, IN_SLACK, URGENT, URGENT_RUNS, REPAIRED, REPAIR_RUNS = range(11)


class Slots(NamedTuple):
    """State of `heads` KV heads that share a fetch cap, int32.

    block, due, leaves: [heads, N], per slot its block id (FREE: none) and the steps between which attention reads it.
    future_slot: [heads, blocks], the slot of a block that never leaves (the future set), else FREE.
    last_selected: [heads, blocks], last step with the block in the predictor's top K, −1 before any.
    num_future: [heads], size of the future set.
    """

    block: Int32
    due: Int32
    leaves: Int32
    future_slot: Int32
    last_selected: Int32
    num_future: Int32


class Scratch(NamedTuple):
    """Working memory of plans. A mark holds the stamp of the set that a block was last put into."""

    clock: Int32
    """[1], the last stamp given out"""
    predicted: Int32
    """[heads, blocks]"""
    predicted_stamp: Int32
    """[heads], stamp of the current predicted set"""
    missing: Int32
    """[heads, K]"""
    num_missing: Int32
    """[heads]"""
    num_granted: Int32
    """[heads]"""
    true: Int32
    """[blocks]"""
    attended: Int32
    """[blocks]"""
    rank: Int32
    """[blocks]"""
    ranked: Int32
    """[blocks]"""
    victims: Int32
    """[heads, N], block ids evicted by the last `commit` or `fill`, in slot order"""
    num_victims: Int32
    """[heads]"""
    slots: Int32
    """[2 N], free slots, then victims' slots"""
    keys: NDArray[np.int64]
    """[N]"""


def make_slots(num_heads: int, num_slots: int, max_blocks: int) -> Slots:
    """Empty slots for block ids below `max_blocks`."""

    def full(columns: int, value: int) -> Int32:
        return np.full((num_heads, columns), value, dtype=np.int32)

    return Slots(
        block=full(num_slots, FREE),
        due=full(num_slots, 0),
        leaves=full(num_slots, NEVER),
        future_slot=full(max_blocks, FREE),
        last_selected=full(max_blocks, -1),
        num_future=np.zeros(num_heads, dtype=np.int32),
    )


def make_scratch(num_heads: int, num_kept: int, num_slots: int, max_blocks: int) -> Scratch:
    """Working memory for `make_slots` of the same sizes; marks of 0 are older than any stamp."""

    def zeros(*shape: int) -> Int32:
        return np.zeros(shape, dtype=np.int32)

    return Scratch(
        clock=zeros(1),
        predicted=zeros(num_heads, max_blocks),
        predicted_stamp=zeros(num_heads),
        missing=zeros(num_heads, num_kept),
        num_missing=zeros(num_heads),
        num_granted=zeros(num_heads),
        true=zeros(max_blocks),
        attended=zeros(max_blocks),
        rank=zeros(max_blocks),
        ranked=zeros(max_blocks),
        victims=zeros(num_heads, num_slots),
        num_victims=zeros(num_heads),
        slots=zeros(2 * num_slots),
        keys=np.zeros(num_slots, dtype=np.int64),
    )


@njit(cache=True)
def next_stamp(scratch: Any) -> int:
    scratch.clock[0] += 1
    return int(scratch.clock[0])


@njit(cache=True)
def sort_ascending(values: Any, count: int) -> None:
    """Shell sort of values[:count]: short lists, and numba's own sort costs seconds of compilation."""
    gap = 1
    while 3 * gap + 1 < count:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, count):
            value = values[i]
            j = i
            while j >= gap and values[j - gap] > value:
                values[j] = values[j - gap]
                j -= gap
            values[j] = value
        gap //= 3


@njit(cache=True)
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
                keys[i], keys[j] = keys[j], keys[i]
                i += 1
                j -= 1
        if num_wanted - 1 <= j:
            high = j
        elif num_wanted - 1 >= i:
            low = i
        else:
            return


@njit(cache=True)
def admit(slots: Any, head: int, num_kept: int, num_selectable: int, ranking: Any, scratch: Any) -> int:
    """Make the first K selectable blocks of a ranking resident from step 0, ascending ids in slots 0, 1, …"""
    count = 0
    for rank in range(len(ranking)):
        block = ranking[rank]
        if block < 0 or count == num_kept:
            break
        if block < num_selectable and slots.future_slot[head, block] < 0:
            slots.future_slot[head, block] = 0
            scratch.missing[head, count] = block
            count += 1
    sort_ascending(scratch.missing[head], count)
    for slot in range(count):
        block = scratch.missing[head, slot]
        slots.block[head, slot] = block
        slots.due[head, slot] = 0
        slots.leaves[head, slot] = NEVER
        slots.future_slot[head, block] = slot
    slots.num_future[head] = count
    return count


@njit(cache=True)
def release(slots: Any, head: int, step: int) -> None:
    """Free the slots whose blocks leave at `step`."""
    for slot in range(slots.block.shape[1]):
        if slots.leaves[head, slot] <= step:
            slots.block[head, slot] = FREE
            slots.leaves[head, slot] = NEVER


@njit(cache=True)
def fill(slots: Any, head: int, step: int, num_kept: int, block: int, scratch: Any) -> int:
    """Let a block that has just filled enter without a fetch; returns how many victims that took (0 or 1).

    The victim is the least recently selected block under either eviction: no ranking is at hand yet.
    """
    num_slots = slots.block.shape[1]
    target = FREE
    victim_slot = FREE
    smallest = np.int64(0)
    for slot in range(num_slots):
        resident = slots.block[head, slot]
        if resident < 0:
            if target < 0:
                target = slot
        elif slots.leaves[head, slot] == NEVER:
            key = np.int64(slots.last_selected[head, resident]) * slots.future_slot.shape[1] + resident
            if victim_slot < 0 or key < smallest:
                smallest, victim_slot = key, slot
    num_victims = 0
    if slots.num_future[head] == num_kept:
        victim = slots.block[head, victim_slot]
        slots.future_slot[head, victim] = FREE
        slots.block[head, victim_slot] = FREE
        slots.num_future[head] -= 1
        scratch.victims[head, 0] = victim
        num_victims = 1
        if target < 0:
            target = victim_slot
    slots.block[head, target] = block
    slots.due[head, target] = step
    slots.leaves[head, target] = NEVER
    slots.future_slot[head, block] = target
    slots.last_selected[head, block] = step
    slots.num_future[head] += 1
    scratch.num_victims[head] = num_victims
    return num_victims


@njit(cache=True)
def select(slots: Any, head: int, step: int, num_kept: int, num_selectable: int, ranking: Any, scratch: Any) -> int:
    """Mark the first K selectable blocks as predicted and list those outside the future set, by rank."""
    stamp = next_stamp(scratch)
    scratch.predicted_stamp[head] = stamp
    count = 0
    num_missing = 0
    for rank in range(len(ranking)):
        block = ranking[rank]
        if block < 0 or count == num_kept:
            break
        if block < num_selectable and scratch.predicted[head, block] != stamp:
            scratch.predicted[head, block] = stamp
            slots.last_selected[head, block] = step
            count += 1
            if slots.future_slot[head, block] < 0:
                scratch.missing[head, num_missing] = block
                num_missing += 1
    scratch.num_missing[head] = num_missing
    return num_missing


@njit(cache=True)
def commit(
    slots: Any,
    head: int,
    due: int,
    num_kept: int,
    fetch: Any,
    num_fetched: int,
    kept_mark: Any,
    stamp: int,
    by_score: bool,
    ranking: Any,
    now: int,
    scratch: Any,
) -> tuple[int, int]:
    """Bring fetch[:num_fetched] (sorted here) into the future set from step `due`; returns (victims, into free slots).

    Victims come from the future set without the blocks that carry `stamp` in `kept_mark`.
    """
    scratch.num_victims[head] = 0
    if num_fetched == 0:
        return 0, 0
    num_slots = slots.block.shape[1]
    max_blocks = slots.future_slot.shape[1]
    num_victims = max(0, slots.num_future[head] + num_fetched - num_kept)
    rank_stamp = next_stamp(scratch)
    if by_score and num_victims > 0:
        for rank in range(len(ranking)):
            block = ranking[rank]
            if block < 0:
                break
            if block < max_blocks:
                scratch.rank[block] = rank
                scratch.ranked[block] = rank_stamp
    num_free = 0
    num_candidates = 0
    for slot in range(num_slots):
        block = slots.block[head, slot]
        if block < 0:
            scratch.slots[num_free] = slot
            num_free += 1
        elif slots.leaves[head, slot] == NEVER and kept_mark[block] != stamp:
            if not by_score:
                key = np.int64(slots.last_selected[head, block] + 1) * max_blocks + block
            elif scratch.ranked[block] == rank_stamp:
                key = np.int64(max_blocks + len(ranking) - scratch.rank[block])
            else:
                key = np.int64(block)
            scratch.keys[num_candidates] = key * num_slots + slot
            num_candidates += 1
    if num_victims < num_candidates:
        take_smallest(scratch.keys, num_candidates, num_victims)
    victim_slots = scratch.slots[num_free:]
    for i in range(num_victims):
        victim_slots[i] = scratch.keys[i] % num_slots
    sort_ascending(victim_slots, num_victims)
    sort_ascending(fetch, num_fetched)
    for i in range(num_victims):
        victim = slots.block[head, victim_slots[i]]
        scratch.victims[head, i] = victim
        slots.future_slot[head, victim] = FREE
    for i in range(num_fetched):
        slot = scratch.slots[i]
        block = fetch[i]
        slots.block[head, slot] = block
        slots.due[head, slot] = due
        slots.leaves[head, slot] = NEVER
        slots.future_slot[head, block] = slot
    for i in range(num_fetched, num_free + num_victims):
        if i >= num_free:
            slot = scratch.slots[i]
            if due > now:
                slots.leaves[head, slot] = due
            else:
                slots.block[head, slot] = FREE
    slots.num_future[head] += num_fetched - num_victims
    scratch.num_victims[head] = num_victims
    return num_victims, min(num_fetched, num_free)


@njit(cache=True)
def num_runs(slots: Any, head: int, fetch: Any, num_fetched: int) -> int:
    """Maximal runs of ascending fetch[:num_fetched] with consecutive ids in consecutive slots."""
    count = 0
    last_block = -2
    last_slot = -2
    for i in range(num_fetched):
        block = fetch[i]
        slot = slots.future_slot[head, block]
        if block != last_block + 1 or slot != last_slot + 1:
            count += 1
        last_block, last_slot = block, slot
    return count


@njit(cache=True)
def mark_attended(slots: Any, head: int, step: int, scratch: Any) -> int:
    """Stamp the blocks that attention reads at `step`, the open block apart; returns the stamp."""
    stamp: int = next_stamp(scratch)
    for slot in range(slots.block.shape[1]):
        block = slots.block[head, slot]
        if block >= 0 and slots.due[head, slot] <= step < slots.leaves[head, slot]:
            scratch.attended[block] = stamp
    return stamp


@njit(cache=True)
def repair(
    slots: Any,
    head: int,
    step: int,
    num_kept: int,
    fetch: Any,
    num_fetched: int,
    true_stamp: int,
    by_score: bool,
    ranking: Any,
    scratch: Any,
) -> tuple[int, int]:
    """Fetch the missing true blocks fetch[:num_fetched] before attention; returns (victims, runs).

    A block that is in flight is not waited for: it is fetched again into the slot that it is bound for.
    """
    num_new = 0
    for i in range(num_fetched):
        block = fetch[i]
        slot = slots.future_slot[head, block]
        if slot >= 0:
            slots.due[head, slot] = step
        else:
            fetch[i] = fetch[num_new]
            fetch[num_new] = block
            num_new += 1
    num_victims, _ = commit(
        slots, head, step, num_kept, fetch, num_new, scratch.true, true_stamp, by_score, ranking, step, scratch
    )
    sort_ascending(fetch, num_fetched)
    return num_victims, num_runs(slots, head, fetch, num_fetched)


@njit(cache=True)
def grant(num_missing: Any, num_granted: Any, num_heads: int, allowed: int) -> int:
    """Share `allowed` fetches among heads by (rank in the missing list, head); returns what is left."""
    left: int = allowed
    if num_heads == 1:
        num_granted[0] = min(left, num_missing[0])
        left -= num_granted[0]
        return left
    for head in range(num_heads):
        num_granted[head] = 0
    rank = 0
    granted = True
    while left > 0 and granted:
        granted = False
        for head in range(num_heads):
            if num_missing[head] > rank and left > 0:
                num_granted[head] += 1
                left -= 1
                granted = True
        rank += 1
    return left


@njit(cache=True)
def attended_mass(
    slots: Any, head: int, step: int, open_block: int, levels: Any, weight_of_level: Any, scratch: Any
) -> tuple[int, bool, int]:
    """(integer mass of what attention reads, whether that includes a block without a recorded mass, blocks read)."""
    stamp = next_stamp(scratch)
    level = levels[open_block]
    total = weight_of_level[level]
    unrecorded = level == 0
    count = 1
    for slot in range(slots.block.shape[1]):
        block = slots.block[head, slot]
        if block < 0 or not slots.due[head, slot] <= step < slots.leaves[head, slot]:
            continue
        if scratch.attended[block] != stamp:
            scratch.attended[block] = stamp
            level = levels[block]
            total += weight_of_level[level]
            unrecorded |= level == 0
            count += 1
    return total, unrecorded, count


@njit(cache=True)
def replay_heads(
    num_blocks: Any,
    true_ids: Any,
    predicted_ids: Any,
    predicted_shift: int,
    near_ids: Any,
    levels: Any,
    weight_of_level: Any,
    trace_layer: Any,
    trace_head: Any,
    scope_start: Any,
    allowed: Any,
    num_kept: int,
    on_demand: bool,
    lookahead_k: int,
    refine: bool,
    stall: bool,
    by_score: bool,
    slots: Any,
    scratch: Any,
    counts: Any,
    mass: Any,
    coverage: Any,
) -> None:
    """Replay every head of every cap scope over the whole trace.

    num_blocks: int32 [S], n per step. true_ids, predicted_ids, near_ids: int32 [S, L, H, M], the selector's ranking,
    the predictor's (target row r is row r − predicted_shift) and draft1 for `refine`. levels: uint8 [S, L, H, n_max].
    trace_layer, trace_head: int32 [G]; heads scope_start[i] … scope_start[i+1] share allowed[step].
    Out: counts int32 [len(COUNTS), G, S]; mass int64 [G, S] of attended blocks; coverage uint8 [G, S], 1 where
    attention read a block without a recorded mass, plus 2 where it read every block.
    """
    num_steps = len(num_blocks)
    for scope in range(len(scope_start) - 1):
        first = scope_start[scope]
        num_heads = scope_start[scope + 1] - first
        slots.block[:] = FREE
        slots.leaves[:] = NEVER
        slots.future_slot[:] = FREE
        slots.last_selected[:] = -1
        scratch.predicted[:] = 0
        scratch.true[:] = 0
        scratch.attended[:] = 0
        scratch.ranked[:] = 0
        scratch.clock[0] = 0
        for head in range(num_heads):
            layer, kv_head = trace_layer[first + head], trace_head[first + head]
            admit(slots, head, num_kept, num_blocks[0] - 1, true_ids[0, layer, kv_head], scratch)
        for step in range(num_steps):
            n = num_blocks[step]
            filled_from = n - 1 if step == 0 else num_blocks[step - 1] - 1
            for head in range(num_heads):
                release(slots, head, step)
                for block in range(filled_from, n - 1):
                    counts[EVICTED, first + head, step] += fill(slots, head, step, num_kept, block, scratch)
            for head in range(num_heads):
                g = first + head
                layer, kv_head = trace_layer[g], trace_head[g]
                ranking = true_ids[step, layer, kv_head]
                attended = mark_attended(slots, head, step, scratch)
                true_stamp = next_stamp(scratch)
                count = 0
                num_hits = 0
                for rank in range(len(ranking)):
                    block = ranking[rank]
                    if block < 0 or count == num_kept:
                        break
                    if block < n - 1 and scratch.true[block] != true_stamp:
                        scratch.true[block] = true_stamp
                        count += 1
                        if scratch.attended[block] == attended:
                            num_hits += 1
                everything = num_kept >= n
                counts[HIT, g, step] = num_hits + everything
                counts[MISSED, g, step] = count - num_hits
                target = step - predicted_shift
                if on_demand:
                    counts[OVERLAP, g, step] = count + everything
                elif step >= lookahead_k:
                    stamp = next_stamp(scratch)
                    predicted = predicted_ids[target, layer, kv_head]
                    seen = 0
                    agreed = 0
                    for rank in range(len(predicted)):
                        block = predicted[rank]
                        if block < 0 or seen == num_kept:
                            break
                        if block < n - 1 and scratch.predicted[head, block] != stamp:
                            scratch.predicted[head, block] = stamp
                            seen += 1
                            agreed += scratch.true[block] == true_stamp
                    counts[OVERLAP, g, step] = agreed + (everything and seen > 0)
                if stall and not on_demand and num_hits < count:
                    fetch = scratch.missing[head]
                    num_repaired = 0
                    for rank in range(len(ranking)):
                        block = ranking[rank]
                        if block < 0 or num_repaired == count - num_hits:
                            break
                        if block < n - 1 and scratch.attended[block] != attended:
                            scratch.attended[block] = attended
                            fetch[num_repaired] = block
                            num_repaired += 1
                    victims, runs = repair(
                        slots, head, step, num_kept, fetch, num_repaired, true_stamp, by_score, ranking, scratch
                    )
                    counts[REPAIRED, g, step] = num_repaired
                    counts[REPAIR_RUNS, g, step] = runs
                    counts[EVICTED, g, step] += victims
            due = step if on_demand else step + lookahead_k
            if on_demand:
                plan_heads(
                    slots, scratch, counts, first, num_heads, step, due, num_kept, n - 1, predicted_ids, due,
                    trace_layer, trace_head, allowed[step], by_score, False,
                )  # fmt: skip
            for head in range(num_heads):
                g = first + head
                mass[g, step], unrecorded, count = attended_mass(
                    slots, head, step, n - 1, levels[step, trace_layer[g], trace_head[g]], weight_of_level,
                    scratch,
                )  # fmt: skip
                coverage[g, step] = unrecorded + 2 * (count == n)
            if not on_demand and due < num_steps:
                left = plan_heads(
                    slots, scratch, counts, first, num_heads, step, due, num_kept, n - 1, predicted_ids,
                    due - predicted_shift, trace_layer, trace_head, allowed[step], by_score, False,
                )  # fmt: skip
                if refine:
                    plan_heads(
                        slots, scratch, counts, first, num_heads, step, step + 1, num_kept, n - 1, near_ids, step + 1,
                        trace_layer, trace_head, left, by_score, True,
                    )  # fmt: skip


@njit(cache=True)
def plan_heads(
    slots: Any,
    scratch: Any,
    counts: Any,
    first: int,
    num_heads: int,
    step: int,
    due: int,
    num_kept: int,
    num_selectable: int,
    ids: Any,
    row: int,
    trace_layer: Any,
    trace_head: Any,
    allowed: int,
    by_score: bool,
    urgent: bool,
) -> int:
    """Plan one fetch for every head of a cap scope; returns the allowance that is left."""
    for head in range(num_heads):
        ranking = ids[row, trace_layer[first + head], trace_head[first + head]]
        select(slots, head, step, num_kept, num_selectable, ranking, scratch)
    left: int = grant(scratch.num_missing, scratch.num_granted, num_heads, allowed)
    for head in range(num_heads):
        num_fetched = scratch.num_granted[head]
        scratch.num_victims[head] = 0
        if num_fetched == 0:
            continue
        g = first + head
        ranking = ids[row, trace_layer[g], trace_head[g]]
        fetch = scratch.missing[head]
        victims, into_free = commit(
            slots, head, due, num_kept, fetch, num_fetched, scratch.predicted[head], scratch.predicted_stamp[head],
            by_score, ranking, step, scratch,
        )  # fmt: skip
        runs = num_runs(slots, head, fetch, num_fetched)
        counts[FETCHED, g, step] += num_fetched
        counts[RUNS, g, step] += runs
        counts[EVICTED, g, step] += victims
        counts[IN_SLACK, g, step] += into_free
        if urgent:
            counts[URGENT, g, step] += num_fetched
            counts[URGENT_RUNS, g, step] += runs
    return left


@njit(cache=True)
def drop_duplicates(rows: Any, num_ids: int) -> None:
    """Keep the first of equal ids in each row of int32 [R, W] and close the gaps, in place; −1 fills the end."""
    seen = np.full(num_ids, -1, dtype=np.int64)
    for row in range(rows.shape[0]):
        kept = 0
        for column in range(rows.shape[1]):
            block = rows[row, column]
            if block >= 0 and seen[block] != row:
                seen[block] = row
                rows[row, kept] = block
                kept += 1
        rows[row, kept:] = -1


@njit(cache=True)
def total_mass(levels: Any, weight_of_level: Any, trace_layer: Any, trace_head: Any, totals: Any) -> None:
    """Integer mass of all recorded blocks, into totals int64 [G, S]."""
    for g in range(len(trace_layer)):
        for step in range(levels.shape[0]):
            row = levels[step, trace_layer[g], trace_head[g]]
            total = np.int64(0)
            for block in range(len(row)):
                total += weight_of_level[row[block]]
            totals[g, step] = total
