"""Replay of whole traces, compiled: the steps of `residency_kernel` in a loop, and what attention reads at each.

`replay_heads` fills the counts and masses of every replayed head; `simulator.replay` makes a demand of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from simulator.host_cache import empty_host_cache, fetch_through_host
from simulator.residency_kernel import (
    ATTENDED,
    BLOCK,
    DUE,
    FETCH,
    LEAVES,
    NUM_FETCHED,
    NUM_FREE_TAKEN,
    NUM_FUTURE,
    NUM_RUNS,
    NUM_VICTIMS,
    PREDICTED,
    TRUE,
    admit_heads,
    begin_head,
    plan_heads,
)

COUNTS = (
    "hit", "missed", "overlap", "fetched", "runs", "evicted", "in_slack", "urgent", "urgent_runs", "repaired",
    "repair_runs",
)  # fmt: skip
"""Kinds of the counts that `replay_heads` fills, in order."""
REMOTE_FETCHED, REMOTE_URGENT, REMOTE_REPAIRED = range(3)
"""Kinds of what it fills of fetches that host memory does not serve: parts of FETCHED, URGENT and REPAIRED."""
HIT, MISSED, OVERLAP, FETCHED, RUNS, EVICTED, IN_SLACK, URGENT, URGENT_RUNS, REPAIRED, REPAIR_RUNS = range(11)

BEFORE, AHEAD, URGENTLY = range(3)
"""Plans of one step: before attention (on demand, or repairs of misses), then for steps ahead, then what is left."""

_compiled = njit(cache=True, error_model="numpy")


@_compiled
def put_first(
    blocks: Any, head: int, mark: int, stamp: int, other: int, ids: Any, row: int, layer: int, kv_head: int,
    num_kept: int, num_selectable: int,
) -> tuple[int, int]:  # fmt: skip
    """Stamp the first K selectable blocks of a ranking into set `mark`; returns (how many, how many are in `other`)."""
    count = 0
    num_shared = 0
    for rank in range(ids.shape[3]):
        block = ids[row, layer, kv_head, rank]
        if block < 0 or count == num_kept:
            break
        if block < num_selectable and blocks[head, mark, block] != stamp:
            blocks[head, mark, block] = stamp
            count += 1
            num_shared += blocks[head, other, block] == stamp
    return count, num_shared


@_compiled
def read_attended(
    slots: Any, blocks: Any, head: int, step: int, stamp: int, open_block: int, levels: Any, layer: int, kv_head: int,
    weight_of_level: Any, selected: int,
) -> tuple[int, int]:  # fmt: skip
    """Stamp the blocks that attention reads at `step`; returns their (integer mass, coverage).

    selected: 0, or the stamp of the set TRUE, of which it reads no other blocks (a cache holds more).
    Coverage: 1 where it reads a block without a recorded mass, plus 2 where it reads every block.
    """
    level = levels[step, layer, kv_head, open_block]
    mass = weight_of_level[level]
    unrecorded = level == 0
    count = 1
    for slot in range(slots.shape[2]):
        block = slots[head, BLOCK, slot]
        if block < 0 or slots[head, DUE, slot] > step or slots[head, LEAVES, slot] <= step:
            continue
        if blocks[head, ATTENDED, block] == stamp or (selected > 0 and blocks[head, TRUE, block] != selected):
            continue
        blocks[head, ATTENDED, block] = stamp
        level = levels[step, layer, kv_head, block]
        mass += weight_of_level[level]
        unrecorded |= level == 0
        count += 1
    return mass, unrecorded + 2 * (count == open_block + 1)


@_compiled
def count_unread(blocks: Any, head: int, stamp: int, open_block: int) -> tuple[int, int]:
    """(blocks that are not stamped into ATTENDED, runs of consecutive ones) below the open block."""
    count = 0
    num_runs = 0
    last = -2
    for block in range(open_block):
        if blocks[head, ATTENDED, block] != stamp:
            count += 1
            num_runs += block != last + 1
            last = block
    return count, num_runs


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
    capacity: int,
    lookahead_k: int,
    predicts: bool,
    refine: bool,
    stall: bool,
    repairs: Any,
    fallback: bool,
    enough: Any,
    by_score: bool,
    slots: Any,
    blocks: Any,
    lists: Any,
    tally: Any,
    keys: Any,
    counts: Any,
    mass: Any,
    coverage: Any,
    host_blocks: int,
    host_keeps_new: bool,
    host_links: Any,
    host_kept: Any,
    remote: Any,
) -> None:
    """Replay every head of every cap scope over the whole trace; lookahead_k 0 fetches for the step's own attention.

    predicts: with lookahead_k 0, the fetch follows a prediction and is there before attention is ready; else it follows
    the real query. capacity: blocks that may stay; where more than num_kept, attention reads only the true set.
    stall: heads are repaired where repairs [S, L, H] (uint8) is not 0. fallback: a head reads every block where the
    integer mass that it reads is below enough [S, L, H] (int64).
    num_blocks: int32 [S], n per step. true_ids, predicted_ids, near_ids: int32 [S, L, H, M], the selector's ranking,
    the predictor's (of target step r in row r − predicted_shift) and, for `refine`, that of drafts one step ahead.
    levels: uint8 [S, L, H, n_max]. layers, heads: int32 [G], indices of replayed heads into the trace; those from
    scope_start[i] to scope_start[i + 1] share allowed[step]. slots, blocks, lists, tally: `make_state` of the largest
    scope; keys: int64 [N].
    host_blocks: blocks per head that host memory keeps of those fetched, 0: it is not looked at; host_keeps_new: also
    blocks that fill; host_links, host_kept: `make_host_cache` of the largest scope.
    Out: counts int32 [len(COUNTS), G, S]; mass int64 [G, S] of attended blocks; coverage uint8 [G, S] as
    `read_attended` gives it; remote int32 [3, G, S].
    """
    num_steps = len(num_blocks)
    for scope in range(len(scope_start) - 1):
        first = scope_start[scope]
        num_heads = scope_start[scope + 1] - first
        last = first + num_heads
        admit_heads(
            slots, blocks, lists, tally, capacity, num_blocks[0] - 1, true_ids, layers[first:last], heads[first:last]
        )  # fmt: skip
        if host_blocks > 0:  # what is resident at first has come through the host, ascending ids
            empty_host_cache(host_links, host_kept)
            for i in range(num_heads):
                fetch_through_host(host_links, host_kept, i, slots[i, BLOCK], tally[i, NUM_FUTURE], host_blocks)
        for step in range(num_steps):
            n = num_blocks[step]
            filled_from = n - 1 if step == 0 else num_blocks[step - 1] - 1
            whole = num_kept >= n
            stamp = 3 * step + 1
            left = allowed[step]
            for i in range(num_heads):
                counts[EVICTED, first + i, step] = begin_head(
                    slots, blocks, lists, tally, i, step, capacity, filled_from, n - 1
                )  # fmt: skip
                if host_blocks > 0 and host_keeps_new:
                    fetch_through_host(
                        host_links, host_kept, i, np.arange(filled_from, n - 1), n - 1 - filled_from, host_blocks
                    )  # fmt: skip
            if predicts:
                plan_heads(
                    slots, blocks, lists, tally, keys, step, step, stamp + 1, num_kept, capacity, n - 1,
                    predicted_ids, step - predicted_shift, layers, heads, first, num_heads, left, False, repairs,
                    by_score,
                )  # fmt: skip
                for i in range(num_heads):
                    counts[EVICTED, first + i, step] += tally[i, NUM_VICTIMS]
                    counts[FETCHED, first + i, step] = tally[i, NUM_FETCHED]
                    counts[RUNS, first + i, step] = tally[i, NUM_RUNS]
                    counts[IN_SLACK, first + i, step] = tally[i, NUM_FREE_TAKEN]
                    if host_blocks > 0:
                        remote[REMOTE_FETCHED, first + i, step] = fetch_through_host(
                            host_links, host_kept, i, lists[i, FETCH], tally[i, NUM_FETCHED], host_blocks
                        )  # fmt: skip
                    tally[i, NUM_FETCHED] = 0
            for i in range(num_heads):
                g = first + i
                layer = layers[g]
                kv_head = heads[g]
                mass[g, step], coverage[g, step] = read_attended(
                    slots, blocks, i, step, stamp, n - 1, levels, layer, kv_head, weight_of_level, 0
                )
                num_true, num_hits = put_first(
                    blocks, i, TRUE, stamp, ATTENDED, true_ids, step, layer, kv_head, num_kept, n - 1
                )
                counts[HIT, g, step] = num_hits + whole
                counts[MISSED, g, step] = num_true - num_hits
                if lookahead_k == 0 and not predicts:
                    counts[OVERLAP, g, step] = num_true + whole
                elif step >= lookahead_k:
                    num_predicted, num_shared = put_first(
                        blocks, i, PREDICTED, stamp, TRUE, predicted_ids, step - predicted_shift, layer, kv_head,
                        num_kept, n - 1,
                    )  # fmt: skip
                    counts[OVERLAP, g, step] = num_shared + (whole and num_predicted > 0)
            for part in range(3):
                repairing = part == BEFORE and (lookahead_k > 0 or predicts)
                if repairing and not stall:
                    continue
                if part == AHEAD:
                    for i in range(num_heads):
                        g = first + i
                        read_stamp = stamp
                        if tally[i, NUM_FETCHED] > 0 or capacity > num_kept:
                            read_stamp = stamp + 1
                            mass[g, step], coverage[g, step] = read_attended(
                                slots, blocks, i, step, read_stamp, n - 1, levels, layers[g], heads[g],
                                weight_of_level, stamp if capacity > num_kept else 0,
                            )  # fmt: skip
                        if fallback and mass[g, step] < enough[step, layers[g], heads[g]]:
                            counts[REPAIRED, g, step], counts[REPAIR_RUNS, g, step] = count_unread(
                                blocks, i, read_stamp, n - 1
                            )
                            coverage[g, step] |= 2
                    if lookahead_k == 0 or step + lookahead_k >= num_steps:
                        break
                if part == URGENTLY and not refine:
                    break
                ids = predicted_ids
                due = step + lookahead_k
                row = due - predicted_shift
                plan_stamp = stamp + 1
                room = 0
                if part != BEFORE and (lookahead_k == 1 or not stall):
                    room = num_blocks[step + lookahead_k] - n
                if repairing:
                    ids = true_ids
                    due = step
                    row = step
                    plan_stamp = stamp
                elif part == URGENTLY:
                    ids = near_ids
                    due = step + 1
                    row = due
                    plan_stamp = stamp + 2
                left = plan_heads(
                    slots, blocks, lists, tally, keys, step, due, plan_stamp, max(0, num_kept - room),
                    max(0, capacity - room), n - 1, ids, row, layers, heads, first, num_heads, left, repairing, repairs,
                    by_score,
                )  # fmt: skip
                for i in range(num_heads):
                    g = first + i
                    counts[EVICTED, g, step] += tally[i, NUM_VICTIMS]
                    if host_blocks > 0:
                        misses = fetch_through_host(
                            host_links, host_kept, i, lists[i, FETCH], tally[i, NUM_FETCHED], host_blocks
                        )  # fmt: skip
                        remote[REMOTE_REPAIRED if repairing else REMOTE_FETCHED, g, step] += misses
                        if part == URGENTLY:
                            remote[REMOTE_URGENT, g, step] = misses
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
            total = np.int64(0)
            for block in range(levels.shape[3]):
                total += weight_of_level[levels[step, layers[g], heads[g], block]]
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
