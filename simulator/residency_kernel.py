"""Residency of KV blocks in HBM, compiled: which blocks a step hits, fetches and evicts, and into which slots.

`begin_heads` and `plan_heads` are one step of the KV heads that share a fetch cap; `replay_heads` loops them over a
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

FETCH, VICTIMS, TARGETS = range(3)
"""Fields of `lists`, int32 [heads, 3, 2 N]: blocks that the last plan fetches and evicts, and destination slots."""

NUM_FUTURE, NUM_MISSING, NUM_BOUND, NUM_FETCHED, NUM_VICTIMS, NUM_FREE_TAKEN, NUM_RUNS = range(7)
"""Fields of `tally`, int32 [heads, 7]: blocks that never leave; the rest is about the last plan."""

COUNTS = (
    "hit", "missed", "overlap", "fetched", "runs", "evicted", "in_slack", "urgent", "urgent_runs", "repaired",
    "repair_runs",
)  # fmt: skip
"""Kinds of the counts that `replay_heads` fills, in order."""
HIT, MISSED, OVERLAP, FETCHED, RUNS, EVICTED, IN_SLACK, URGENT, URGENT_RUNS, REPAIRED, REPAIR_RUNS = range(11)

BEFORE, AHEAD, URGENTLY = range(3)
"""Plans of one step: before attention (on demand, or repairs of misses), then for steps ahead, then what is left."""

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
def sort_ascending(values: Any, count: int) -> None:
    """Shell sort of values[:count]: the lists are short, and numba's own sort takes seconds to compile."""
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
def put_first(
    blocks: Any, mark: int, stamp: int, other: int, ranking: Any, num_kept: int, num_selectable: int
) -> tuple[int, int]:
    """Stamp the first K selectable blocks of a ranking into set `mark`; returns (how many, how many are in `other`)."""
    count = 0
    num_shared = 0
    for rank in range(len(ranking)):
        block = ranking[rank]
        if block < 0 or count == num_kept:
            break
        if block < num_selectable and blocks[mark, block] != stamp:
            blocks[mark, block] = stamp
            count += 1
            num_shared += blocks[other, block] == stamp
    return count, num_shared


@_compiled
def admit(slots: Any, blocks: Any, lists: Any, tally: Any, num_kept: int, num_selectable: int, ranking: Any) -> None:
    """Make the first K selectable blocks of a ranking resident from step 0, ascending ids in slots 0, 1, …"""
    count = np.int64(0)
    fetch = lists[FETCH]
    for rank in range(len(ranking)):
        block = ranking[rank]
        if block < 0 or count == num_kept:
            break
        if block < num_selectable and blocks[FUTURE_SLOT, block] < 0:
            blocks[FUTURE_SLOT, block] = 0
            fetch[count] = block
            count += 1
    sort_ascending(fetch, count)
    for slot in range(count):
        slots[BLOCK, slot] = fetch[slot]
        slots[DUE, slot] = 0
        blocks[FUTURE_SLOT, fetch[slot]] = slot
    tally[NUM_FUTURE] = count


@_compiled
def begin(
    slots: Any, blocks: Any, lists: Any, tally: Any, step: int, num_kept: int, filled_from: int, filled_to: int
) -> int:
    """Free the slots whose blocks leave at `step`, then let newly filled blocks enter; returns the victims of that.

    Blocks filled_from … filled_to − 1 have filled since the last step. Their victims are the least recently selected
    blocks under either eviction, as no ranking is at hand yet; the last one is in lists[VICTIMS, 0].
    """
    num_slots = slots.shape[1]
    max_blocks = blocks.shape[1]
    for slot in range(num_slots):
        if slots[LEAVES, slot] <= step:
            slots[BLOCK, slot] = FREE
            slots[LEAVES, slot] = NEVER
    num_victims = 0
    for filled in range(filled_from, filled_to):
        target = FREE
        victim_slot = FREE
        smallest = np.int64(0)
        for slot in range(num_slots):
            resident = slots[BLOCK, slot]
            if resident < 0:
                if target < 0:
                    target = slot
            elif slots[LEAVES, slot] == NEVER:
                key = np.int64(blocks[LAST_SELECTED, resident]) * max_blocks + resident
                if victim_slot < 0 or key < smallest:
                    smallest = key
                    victim_slot = slot
        if tally[NUM_FUTURE] == num_kept:
            victim = slots[BLOCK, victim_slot]
            blocks[FUTURE_SLOT, victim] = FREE
            slots[BLOCK, victim_slot] = FREE
            lists[VICTIMS, 0] = victim
            num_victims += 1
            if target < 0:
                target = victim_slot
        else:
            tally[NUM_FUTURE] += 1
        slots[BLOCK, target] = filled
        slots[DUE, target] = step
        slots[LEAVES, target] = NEVER
        blocks[FUTURE_SLOT, filled] = target
        blocks[LAST_SELECTED, filled] = step
    tally[NUM_FETCHED] = 0
    return num_victims


@_compiled
def list_missing(
    blocks: Any, fetch: Any, step: int, stamp: int, ranking: Any, num_kept: int, num_selectable: int
) -> int:
    """Mark the first K selectable blocks as predicted and list those outside the future set, by rank."""
    count = 0
    num_missing = 0
    for rank in range(len(ranking)):
        block = ranking[rank]
        if block < 0 or count == num_kept:
            break
        if block < num_selectable and blocks[PREDICTED, block] != stamp:
            blocks[PREDICTED, block] = stamp
            blocks[LAST_SELECTED, block] = step
            count += 1
            if blocks[FUTURE_SLOT, block] < 0:
                fetch[num_missing] = block
                num_missing += 1
    return num_missing


@_compiled
def list_unattended(
    slots: Any, blocks: Any, lists: Any, step: int, stamp: int, ranking: Any, num_kept: int, num_selectable: int
) -> tuple[int, int]:
    """List the true blocks that attention would not find; returns (how many, how many of them are in flight).

    `stamp` marks the sets TRUE and ATTENDED of this step. A block in flight is not waited for: it is fetched again
    into the slot that it is bound for. Those come last.
    """
    fetch, bound = lists[FETCH], lists[TARGETS]
    num_new = 0
    num_bound = 0
    seen = 0
    for rank in range(len(ranking)):
        block = ranking[rank]
        if block < 0 or seen == num_kept:
            break
        if block >= num_selectable or blocks[TRUE, block] != stamp:
            continue
        seen += 1
        if blocks[ATTENDED, block] == stamp:
            continue
        slot = blocks[FUTURE_SLOT, block]
        if slot >= 0:
            slots[DUE, slot] = step
            bound[num_bound] = block
            num_bound += 1
        else:
            fetch[num_new] = block
            num_new += 1
    for i in range(num_bound):
        fetch[num_new + i] = bound[i]
    return num_new + num_bound, num_bound


@_compiled
def commit(
    slots: Any,
    blocks: Any,
    lists: Any,
    tally: Any,
    keys: Any,
    step: int,
    due: int,
    num_kept: int,
    keep: int,
    stamp: int,
    by_score: bool,
    ranking: Any,
) -> None:
    """Fetch the first NUM_FETCHED blocks of FETCH for step `due` and evict what is one too many; sorts the list.

    Victims come from the future set without the blocks stamped into the set `keep`. The last NUM_BOUND blocks have
    their slots already. Writes the rest of `lists` and `tally`.
    """
    fetch, victims, targets = lists[FETCH], lists[VICTIMS], lists[TARGETS]
    num_slots = slots.shape[1]
    max_blocks = blocks.shape[1]
    num_fetched = np.int64(tally[NUM_FETCHED])
    num_new = num_fetched - tally[NUM_BOUND]
    num_victims = tally[NUM_FUTURE] + num_new - num_kept
    if num_victims < 0:
        num_victims = 0
    if by_score and num_victims > 0:
        for rank in range(len(ranking)):
            block = ranking[rank]
            if block < 0:
                break
            if block < max_blocks:
                blocks[RANK, block] = rank
                blocks[RANKED, block] = stamp
    num_free = np.int64(0)
    num_candidates = np.int64(0)
    for slot in range(num_slots):
        block = slots[BLOCK, slot]
        if block < 0:
            targets[num_free] = slot
            num_free += 1
        elif slots[LEAVES, slot] == NEVER and blocks[keep, block] != stamp:
            if not by_score:
                key = np.int64(blocks[LAST_SELECTED, block] + 1) * max_blocks + block
            elif blocks[RANKED, block] == stamp:
                key = np.int64(max_blocks + len(ranking) - blocks[RANK, block])
            else:
                key = np.int64(block)
            keys[num_candidates] = key * num_slots + slot
            num_candidates += 1
    if num_victims < num_candidates:
        take_smallest(keys, num_candidates, num_victims)
    for i in range(num_victims):
        targets[num_free + i] = keys[i] % num_slots
    sort_ascending(targets[num_free:], num_victims)
    sort_ascending(fetch, num_new)
    for i in range(num_victims):
        slot = targets[num_free + i]
        victims[i] = slots[BLOCK, slot]
        blocks[FUTURE_SLOT, victims[i]] = FREE
        if due > step:
            slots[LEAVES, slot] = due
        else:
            slots[BLOCK, slot] = FREE
    for i in range(num_new):
        slot = targets[i]
        slots[BLOCK, slot] = fetch[i]
        slots[DUE, slot] = due
        slots[LEAVES, slot] = NEVER
        blocks[FUTURE_SLOT, fetch[i]] = slot
    if tally[NUM_BOUND] > 0:
        sort_ascending(fetch, num_fetched)
    num_runs = 0
    last_block = -2
    last_slot = -2
    for i in range(num_fetched):
        slot = blocks[FUTURE_SLOT, fetch[i]]
        if fetch[i] != last_block + 1 or slot != last_slot + 1:
            num_runs += 1
        last_block = fetch[i]
        last_slot = slot
    tally[NUM_FUTURE] += num_new - num_victims
    tally[NUM_VICTIMS] = num_victims
    tally[NUM_FREE_TAKEN] = min(num_new, num_free)
    tally[NUM_RUNS] = num_runs


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
    num_selectable: int,
    rankings: Any,
    layers: Any,
    heads: Any,
    allowed: int,
    repairing: bool,
    by_score: bool,
) -> int:
    """Plan a fetch for step `due` on every head of a cap scope; returns the allowance that is left.

    rankings: int32 [L, H, W]; head i reads rankings[layers[i], heads[i]]. The allowance is granted by (rank in the
    missing list, head). When repairing, the rankings are the selector's, `stamp` marks the sets TRUE and ATTENDED and
    the cap does not hold. Results are in `lists` and `tally`.
    """
    num_heads = len(layers)
    left = allowed
    most = 0
    for i in range(num_heads):
        ranking = rankings[layers[i], heads[i]]
        if repairing:
            missing, bound = list_unattended(
                slots[i], blocks[i], lists[i], step, stamp, ranking, num_kept, num_selectable
            )
            tally[i, NUM_BOUND] = bound
            tally[i, NUM_FETCHED] = missing
        else:
            missing = list_missing(blocks[i], lists[i, FETCH], step, stamp, ranking, num_kept, num_selectable)
            tally[i, NUM_BOUND] = 0
            tally[i, NUM_FETCHED] = min(left, missing) if num_heads == 1 else 0
        tally[i, NUM_MISSING] = missing
        most = max(most, missing)
    if num_heads == 1 and not repairing:
        left -= tally[0, NUM_FETCHED]
    elif not repairing:
        for rank in range(most):
            for i in range(num_heads):
                if left > 0 and rank < tally[i, NUM_MISSING]:
                    tally[i, NUM_FETCHED] += 1
                    left -= 1
    for i in range(num_heads):
        tally[i, NUM_VICTIMS:] = 0
        if tally[i, NUM_FETCHED] > 0:
            commit(
                slots[i], blocks[i], lists[i], tally[i], keys, step, due, num_kept, TRUE if repairing else PREDICTED,
                stamp, by_score, rankings[layers[i], heads[i]],
            )  # fmt: skip
    return left


@_compiled
def read_attended(
    slots: Any, blocks: Any, step: int, stamp: int, open_block: int, levels: Any, weight_of_level: Any
) -> tuple[int, int]:
    """Stamp the blocks that attention reads at `step`; returns their (integer mass, coverage).

    Coverage: 1 where it reads a block without a recorded mass, plus 2 where it reads every block.
    """
    level = levels[open_block]
    mass = weight_of_level[level]
    unrecorded = level == 0
    count = 1
    for slot in range(slots.shape[1]):
        block = slots[BLOCK, slot]
        if block < 0 or slots[DUE, slot] > step or slots[LEAVES, slot] <= step or blocks[ATTENDED, block] == stamp:
            continue
        blocks[ATTENDED, block] = stamp
        level = levels[block]
        mass += weight_of_level[level]
        unrecorded |= level == 0
        count += 1
    return mass, unrecorded + 2 * (count == open_block + 1)


@_compiled
def replay_heads(
    num_blocks: Any,
    true_ids: Any,
    predicted_ids: Any,
    predicted_shift: int,
    near_ids: Any,
    levels: Any,
    weight_of_level: Any,
    layers: Any,
    heads: Any,
    scope_start: Any,
    allowed: Any,
    num_kept: int,
    lookahead_k: int,
    refine: bool,
    stall: bool,
    by_score: bool,
    slots: Any,
    blocks: Any,
    lists: Any,
    tally: Any,
    keys: Any,
    counts: Any,
    mass: Any,
    coverage: Any,
) -> None:
    """Replay every head of every cap scope over the whole trace; lookahead_k 0 fetches on demand.

    num_blocks: int32 [S], n per step. true_ids, predicted_ids, near_ids: int32 [S, L, H, M], the selector's ranking,
    the predictor's (of target step r in row r − predicted_shift) and, for `refine`, that of drafts one step ahead.
    levels: uint8 [S, L, H, n_max]. layers, heads: int32 [G], indices of replayed heads into the trace; those from
    scope_start[i] to scope_start[i + 1] share allowed[step]. slots, blocks, lists, tally: `make_state` of the largest
    scope; keys: int64 [N].
    Out: counts int32 [len(COUNTS), G, S]; mass int64 [G, S] of attended blocks; coverage uint8 [G, S] as
    `read_attended` gives it.
    """
    num_steps = len(num_blocks)
    for scope in range(len(scope_start) - 1):
        first = scope_start[scope]
        last = scope_start[scope + 1]
        slots[:, BLOCK] = FREE
        slots[:, LEAVES] = NEVER
        blocks[:] = 0
        blocks[:, FUTURE_SLOT] = FREE
        blocks[:, LAST_SELECTED] = -1
        for g in range(first, last):
            i = g - first
            ranking = true_ids[0, layers[g], heads[g]]
            admit(slots[i], blocks[i], lists[i], tally[i], num_kept, num_blocks[0] - 1, ranking)
        for step in range(num_steps):
            n = num_blocks[step]
            filled_from = n - 1 if step == 0 else num_blocks[step - 1] - 1
            whole = num_kept >= n
            stamp = 3 * step + 1
            for g in range(first, last):
                i = g - first
                counts[EVICTED, g, step] = begin(
                    slots[i], blocks[i], lists[i], tally[i], step, num_kept, filled_from, n - 1
                )
                ranking = true_ids[step, layers[g], heads[g]]
                mass[g, step], coverage[g, step] = read_attended(
                    slots[i], blocks[i], step, stamp, n - 1, levels[step, layers[g], heads[g]], weight_of_level
                )
                num_true, num_hits = put_first(blocks[i], TRUE, stamp, ATTENDED, ranking, num_kept, n - 1)
                counts[HIT, g, step] = num_hits + whole
                counts[MISSED, g, step] = num_true - num_hits
                if step >= lookahead_k:
                    predicted = predicted_ids[step - predicted_shift, layers[g], heads[g]]
                    num_predicted, num_shared = put_first(blocks[i], PREDICTED, stamp, TRUE, predicted, num_kept, n - 1)
                    counts[OVERLAP, g, step] = num_shared + (whole and (num_predicted > 0 or lookahead_k == 0))
            left = allowed[step]
            for part in range(3):
                repairing = part == BEFORE and lookahead_k > 0
                if repairing and not stall:
                    continue
                if part == AHEAD:
                    for g in range(first, last):
                        if tally[g - first, NUM_FETCHED] > 0:
                            mass[g, step], coverage[g, step] = read_attended(
                                slots[g - first], blocks[g - first], step, stamp + 1, n - 1,
                                levels[step, layers[g], heads[g]], weight_of_level,
                            )  # fmt: skip
                    if lookahead_k == 0 or step + lookahead_k >= num_steps:
                        break
                if part == URGENTLY and not refine:
                    break
                if part == BEFORE:
                    due, rankings, plan_stamp = step, true_ids[step], stamp + (lookahead_k == 0)
                elif part == AHEAD:
                    due, plan_stamp = step + lookahead_k, stamp + 1
                    rankings = predicted_ids[due - predicted_shift]
                else:
                    due, rankings, plan_stamp = step + 1, near_ids[step + 1], stamp + 2
                left = plan_heads(
                    slots, blocks, lists, tally, keys, step, due, plan_stamp, num_kept, n - 1, rankings,
                    layers[first:last], heads[first:last], left, repairing, by_score,
                )  # fmt: skip
                for g in range(first, last):
                    i = g - first
                    counts[EVICTED, g, step] += tally[i, NUM_VICTIMS]
                    if repairing:
                        counts[REPAIRED, g, step] = tally[i, NUM_FETCHED]
                        counts[REPAIR_RUNS, g, step] = tally[i, NUM_RUNS]
                        continue
                    counts[FETCHED, g, step] += tally[i, NUM_FETCHED]
                    counts[RUNS, g, step] += tally[i, NUM_RUNS]
                    counts[IN_SLACK, g, step] += tally[i, NUM_FREE_TAKEN]
                    if part == URGENTLY:
                        counts[URGENT, g, step] = tally[i, NUM_FETCHED]
                        counts[URGENT_RUNS, g, step] = tally[i, NUM_RUNS]


@_compiled
def total_mass(levels: Any, weight_of_level: Any, layers: Any, heads: Any, totals: Any) -> None:
    """Integer mass of all recorded blocks, into totals int64 [G, S]."""
    for g in range(len(layers)):
        for step in range(levels.shape[0]):
            row = levels[step, layers[g], heads[g]]
            total = np.int64(0)
            for block in range(len(row)):
                total += weight_of_level[row[block]]
            totals[g, step] = total


@_compiled
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
        for column in range(kept, rows.shape[1]):
            rows[row, column] = -1
