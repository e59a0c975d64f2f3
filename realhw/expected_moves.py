"""What the simulator's residency rules say that a decode run moves: counts and order-free hashes to compare with.

All heads of a batch at once, on the compiled rules; `realhw.expected_moves_reference` says the same head by head.
"""
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from realhw.flows import Flow
from realhw.step_trace import StepTrace
from simulator import residency_kernel as kernel


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedMoves:
    """Per step and layer: fetched and evicted blocks of the batch, and their hashes as `moved_hash` makes them."""

    fetched: NDArray[np.int64]
    evicted: NDArray[np.int64]
    in_slack: NDArray[np.int64]
    runs: NDArray[np.int64]
    fetched_hash: list[list[str]]
    evicted_hash: list[list[str]]


def mismatches(row: Mapping[str, Any], expected: ExpectedMoves) -> int:
    """(step, layer) plans of a campaign's row whose ids, slots or counts differ from the rules'."""
    pairs = (
        (row["fetched"], expected.fetched.tolist()),
        (row["evicted"], expected.evicted.tolist()),
        (row["fetched_hash"], expected.fetched_hash),
        (row["evicted_hash"], expected.evicted_hash),
    )
    wrong = [np.array([[a != b for a, b in zip(x, y, strict=True)] for x, y in zip(*p, strict=True)]) for p in pairs]
    return int(np.logical_or.reduce(wrong).sum())


def expected_moves(flow: Flow, trace: StepTrace, num_steps: int) -> ExpectedMoves:
    """Replay the batch by the rules of `simulator.residency`; requests with the same offset move the same blocks."""
    shape = (num_steps, trace.true.shape[1])
    counts = np.zeros((4, *shape), dtype=np.int64)
    codes = np.zeros((2, *shape), dtype=np.uint64)
    offsets, which = np.unique(trace.offsets, return_inverse=True)
    for index, offset in enumerate(offsets.tolist()):
        _replay(flow, trace, offset, np.flatnonzero(which == index), counts, codes)
    fetched, evicted = ([[f"{code:016x}" for code in step] for step in kind] for kind in codes.tolist())
    return ExpectedMoves(counts[0], counts[1], counts[2], counts[3], fetched_hash=fetched, evicted_hash=evicted)


def _replay(
    flow: Flow, trace: StepTrace, offset: int, requests: NDArray[np.int64], counts: NDArray[np.int64],
    codes: NDArray[np.uint64],
) -> None:  # fmt: skip
    """Add what `requests`, which start at row `offset`, move: `counts` [4, T, L] (fetched, evicted, in slack, runs) and
    sums of hashes `codes` [2, T, L] (fetched, evicted).

    Under lookahead a step's plan comes first and then the blocks that the step fills, as in the kernel.
    """
    num_steps, num_layers, num_heads = counts.shape[1], counts.shape[2], trace.true.shape[2]
    size, distance, kept = flow.block_size_tokens, flow.distance, flow.num_kept

    def num_blocks(step: int) -> int:
        return -(-(int(trace.kv_len[offset]) + step) // size)

    state = kernel.make_state(num_layers * num_heads, flow.num_slots, num_blocks(num_steps))
    layers, heads = (x.ravel().astype(np.int32) for x in np.indices((num_layers, num_heads)))
    kernel.admit_heads(*state, kept, num_blocks(0) - 1, np.ascontiguousarray(trace.true[offset][None]), layers, heads)
    allowed = flow.allowed(num_steps)
    for t in range(num_steps):
        to = (requests, layers, heads, num_heads, counts[:, t], codes[:, t])
        if distance == 0 and t > 0:
            _begin(*state, t, kept, num_blocks(t - 1), num_blocks(t), *to)
        row = offset + t + distance - trace.shift
        if t + distance < num_steps and row >= 0:
            ranked = np.ascontiguousarray(trace.predicted[row][None])
            room = num_blocks(t + distance) - num_blocks(t)
            _plan(*state, t, t + distance, max(0, kept - room), num_blocks(t) - 1, ranked, allowed[t], *to)
        if distance:
            _begin(*state, t + 1, kept, num_blocks(t), num_blocks(t + 1), *to)


@njit(cache=True)
def _begin(
    slots: Any, blocks: Any, lists: Any, tally: Any, step: int, num_kept: int, before: int, num_blocks: int,
    requests: Any, layers: Any, heads: Any, num_heads: int, counts: Any, codes: Any,
) -> None:  # fmt: skip
    """Every head's next step: blocks leave, newly filled ones enter; their victims are counted."""
    for i in range(len(layers)):
        for filled in range(before - 1, max(before, num_blocks - 1)):
            until = min(filled + 1, num_blocks - 1)
            if kernel.begin_head(slots, blocks, lists, tally, i, step, num_kept, filled, until) > 0:
                counts[1, layers[i]] += len(requests)
                for request in requests:
                    codes[1, layers[i]] += _code(request * num_heads + heads[i], lists[i, kernel.VICTIMS, 0], -1)


@njit(cache=True)
def _plan(
    slots: Any, blocks: Any, lists: Any, tally: Any, step: int, due: int, num_kept: int, num_selectable: int, ids: Any,
    allowed: int, requests: Any, layers: Any, heads: Any, num_heads: int, counts: Any, codes: Any,
) -> None:  # fmt: skip
    """Every head's plan, each with an allowance of its own, and what it moves."""
    keys = np.zeros(slots.shape[2], dtype=np.int64)
    repairs = np.ones((1, 1, 1), dtype=np.uint8)
    for i in range(len(layers)):
        mine = slice(i, i + 1)
        kernel.plan_heads(
            slots[mine], blocks[mine], lists[mine], tally[mine], keys, step, due, step + 1, num_kept, num_kept,
            num_selectable, ids, 0, layers, heads, i, 1, allowed, False, repairs, False,
        )  # fmt: skip
        layer = layers[i]
        counts[0, layer] += tally[i, kernel.NUM_FETCHED] * len(requests)
        counts[1, layer] += tally[i, kernel.NUM_VICTIMS] * len(requests)
        counts[2, layer] += tally[i, kernel.NUM_FREE_TAKEN] * len(requests)
        counts[3, layer] += tally[i, kernel.NUM_RUNS] * len(requests)
        for request in requests:
            head = request * num_heads + heads[i]
            for n in range(tally[i, kernel.NUM_FETCHED]):
                block = lists[i, kernel.FETCH, n]
                codes[0, layer] += _code(head, block, blocks[i, kernel.FUTURE_SLOT, block])
            for n in range(tally[i, kernel.NUM_VICTIMS]):
                codes[1, layer] += _code(head, lists[i, kernel.VICTIMS, n], -1)


@njit(cache=True)
def _code(head: int, block: int, slot: int) -> Any:
    """One row's part of `step_trace.moved_hash`; without a slot where that is -1."""
    bits = np.uint64(21)
    x = (np.uint64(head) << bits) | np.uint64(block)
    if slot >= 0:
        x = (x << bits) | np.uint64(slot)
    x += np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
