"""Compiled loops over the decoding requests of a batch: what they hold, read and fetch, and one token more of each."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
Float = NDArray[np.float64]

FETCHED, RUNS, URGENT, URGENT_RUNS, REPAIRED, REPAIR_RUNS, IN_SLACK = range(7)
"""Rows of demand sums: the counts of `simulator.demand.Demand` that cost time."""
REMOTE_FETCHED, REMOTE_URGENT, REMOTE_REPAIRED = range(7, 10)
"""Rows that follow where host memory holds a part of what is fetched: the rest, which comes from beyond it."""
OF_ALL, OF_REMOTE = (FETCHED, URGENT, REPAIRED), (REMOTE_FETCHED, REMOTE_URGENT, REMOTE_REPAIRED)
BLOCKS, SLOTS, ATTENDED_TOKENS, WINDOW_TOKENS, FILLED_BLOCKS, NEW_TOKENS, NUM_TOTALS = range(7)
"""Totals over a batch: of blocks, of filled slots per KV head (the open block's aside), of tokens that attention reads
(in layers with a window), of blocks that the step fills and of tokens that it gains."""


@njit(cache=True)
def behind(gap: Int64, brought: Int64, group: int, prompt_blocks: int, blocks: int) -> int:
    """Bytes that host memory does not hold of a request's prompt (`left_behind.LeftBehind`)."""
    since = min(max(0, blocks - prompt_blocks), brought.shape[1] - 1)
    left: int = max(0, gap[prompt_blocks] - brought[group, since])
    return left


@njit(cache=True)
def growth(
    n: int, kv_len: Int64, held_blocks: Int64, prompt_blocks: Int64, group: Int64, block_size: int, table: Int64,
    gap: Int64, brought: Int64, host: int, out: Int64,
) -> bool:  # fmt: skip
    """out [pools]: bytes that requests 0 … n − 1 need beyond what they hold, to hold `kv_len` tokens; False: none.

    `host`: the pool of which a part was left behind.
    """
    out[:] = 0
    grows = False
    for i in range(n):
        blocks = (kv_len[i] + block_size - 1) // block_size
        if blocks != held_blocks[i]:
            grows = True
            for pool in range(out.shape[0]):
                out[pool] += table[blocks, pool] - table[held_blocks[i], pool]
            out[host] += behind(gap, brought, group[i], prompt_blocks[i], held_blocks[i])
            out[host] -= behind(gap, brought, group[i], prompt_blocks[i], blocks)
    return grows


@njit(cache=True)
def hold(n: int, kv_len: Int64, held_blocks: Int64, block_size: int) -> None:
    for i in range(n):
        held_blocks[i] = (kv_len[i] + block_size - 1) // block_size


@njit(cache=True)
def measure(
    n: int, kv_len: Int64, left: Int64, row: Int64, block_size: int, num_kept: int, num_slots: int, window: int,
    demand: Int32, gained: Int64, row_uses: Int64, gpus_alike: Int64, pulls: bool, pulled: Int64,
    totals: Int64, sums: Int64,
) -> None:  # fmt: skip
    """totals [NUM_TOTALS] and demand sums [D, counts, L] of a step; counts the use of each demand row.

    `num_kept` 0: all tokens are attended. A request of at most K blocks has all of them and fetches nothing.
    `num_slots`: K + slack per KV head. `gained` [rows]: tokens that a step adds. `pulls`: blocks from beyond the host
    are new ones of a prompt, and count as far as they have not come by themselves; `pulled` [4, requests], of all GPUs:
    blocks that are still there, that no step has fetched yet, what rounding owes, and, counted here, those pulled.
    """
    totals[:] = 0
    sums[:] = 0
    num_gpus, num_counts, num_layers = sums.shape
    for i in range(n):
        tokens = kv_len[i]
        blocks = (tokens + block_size - 1) // block_size
        attended = tokens
        if num_kept > 0:
            attended = min(tokens, num_kept * block_size + tokens - (blocks - 1) * block_size)
        totals[BLOCKS] += blocks
        totals[SLOTS] += min(num_slots, blocks - 1)
        totals[ATTENDED_TOKENS] += attended
        totals[WINDOW_TOKENS] += min(tokens, window)
        new = min(gained[row[i]], left[i])
        totals[NEW_TOKENS] += new
        totals[FILLED_BLOCKS] += (tokens - 1 + new) // block_size - (tokens - 1) // block_size
        if num_kept > 0 and blocks > num_kept:
            at = row[i]
            row_uses[at] += 1
            counted = REMOTE_FETCHED if pulls else num_counts
            for gpu in range(num_gpus):
                for count in range(counted):
                    for layer in range(num_layers):
                        sums[gpu, count, layer] += demand[at, gpu, count, layer]
            if pulls and pulled[0, i] > 0:
                pull(demand[at], gpus_alike, pulled[:, i], sums)


@njit(cache=True)
def pull(row: Int32, gpus_alike: Int64, pulled: Int64, sums: Int64) -> None:
    """Adds a request's blocks from the prefill side to `sums`: of the new blocks of its row [D, counts, L] the share
    that is still there, in whole blocks whose running sum is right.

    `pulled`: [still there, fetched by no step yet, remainder, pulled so far].
    """
    there, of = pulled[0], pulled[1]
    if there >= of:  # nothing came by itself
        there = of = 1
        pulled[2] = 0
    new_blocks = 0
    for gpu in range(sums.shape[0]):
        for layer in range(sums.shape[2]):
            urgent, repaired = row[gpu, REMOTE_URGENT, layer], row[gpu, REMOTE_REPAIRED, layer]
            ahead = row[gpu, REMOTE_FETCHED, layer] - urgent
            new_blocks += gpus_alike[gpu] * (ahead + urgent + repaired)
            for kind in range(3):
                blocks = ahead if kind == 0 else urgent if kind == 1 else repaired
                owed = blocks * there + pulled[2]
                now = min(blocks, owed // of)
                pulled[2] = owed - now * of
                pulled[0] -= gpus_alike[gpu] * now
                pulled[3] += gpus_alike[gpu] * now
                if kind < 2:
                    sums[gpu, REMOTE_FETCHED, layer] += now
                if kind == 1:
                    sums[gpu, REMOTE_URGENT, layer] += now
                if kind == 2:
                    sums[gpu, REMOTE_REPAIRED, layer] += now
    pulled[1] = max(0, pulled[1] - new_blocks)


@njit(cache=True)
def advance(
    n: int, kv_len: Int64, left: Int64, row: Int64, row_start: Int64, row_stop: Int64, tokens: Int64, finished: Int64
) -> int:  # fmt: skip
    """`tokens` [rows] more of each request; indices of those with none left go to `finished`, their number returned.

    `row` moves to the next row of demand and wraps from `row_stop` to `row_start`.
    """
    num_finished = 0
    for i in range(n):
        gained = min(tokens[row[i]], left[i])
        kv_len[i] += gained
        left[i] -= gained
        row[i] += 1
        if row[i] == row_stop[i]:
            row[i] = row_start[i]
        if left[i] == 0:
            finished[num_finished] = i
            num_finished += 1
    return num_finished


@njit(cache=True)
def remove(gone: Int64, n: int, columns: Int64) -> int:
    """Takes out entries `gone` (ascending) of every row of `columns` [fields, capacity], keeping the order."""
    kept = int(gone[0])
    skip = 0
    for i in range(gone[0], n):
        if skip < gone.shape[0] and gone[skip] == i:
            skip += 1
            continue
        for field in range(columns.shape[0]):
            columns[field, kept] = columns[field, i]
        kept += 1
    return kept
