"""What the residency rules say that a decode run moves, one head at a time by `simulator.residency`: slow and plain.

`realhw.expected_moves` must give the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from realhw.expected_moves import ExpectedMoves
from realhw.flows import Flow
from realhw.step_trace import Int32, StepTrace, moved_hash
from simulator.residency import Residency

HeadMoves = list[tuple[Int32, Int32, int, int]]
"""Per step of one head: fetched (block, slot) [n, 2], evicted blocks, fetched into free slots, runs."""


def expected_moves_reference(flow: Flow, trace: StepTrace, num_steps: int) -> ExpectedMoves:
    """Replay the batch; requests with the same offset move the same blocks."""
    known: dict[tuple[int, int, int], HeadMoves] = {}
    _, num_layers, num_heads, _ = trace.true.shape
    offsets, which = np.unique(trace.offsets, return_inverse=True)
    shape = (num_steps, num_layers)
    fetched, evicted, in_slack, runs = (np.zeros(shape, dtype=np.int64) for _ in range(4))
    fetch_rows: list[list[list[Int32]]] = [[[] for _ in range(num_layers)] for _ in range(num_steps)]
    evict_rows: list[list[list[Int32]]] = [[[] for _ in range(num_layers)] for _ in range(num_steps)]
    for index, offset in enumerate(offsets.tolist()):
        requests = np.flatnonzero(which == index)
        for layer in range(num_layers):
            for head in range(num_heads):
                key = (offset, layer, head)
                if key not in known:
                    known[key] = _replay_head(flow, trace, num_steps, offset, layer, head)
                steps = known[key]
                for t, (fetch, victims, slack, num_runs) in enumerate(steps):
                    fetched[t, layer] += len(fetch) * len(requests)
                    evicted[t, layer] += len(victims) * len(requests)
                    in_slack[t, layer] += slack * len(requests)
                    runs[t, layer] += num_runs * len(requests)
                    heads = requests * num_heads + head
                    fetch_rows[t][layer].append(_with_heads(heads, fetch))
                    evict_rows[t][layer].append(_with_heads(heads, victims[:, None]))
    return ExpectedMoves(
        fetched, evicted, in_slack, runs,
        [[moved_hash(np.concatenate(rows)) for rows in step] for step in fetch_rows],
        [[moved_hash(np.concatenate(rows)) for rows in step] for step in evict_rows],
    )  # fmt: skip


def _with_heads(heads: NDArray[np.int64], rows: Int32) -> Int32:
    """Each head's id before each row: [len(heads) * len(rows), 1 + columns]."""
    repeated = np.repeat(heads, len(rows)).astype(np.int32)[:, None]
    return np.concatenate([repeated, np.tile(rows, (len(heads), 1))], axis=1)


def _replay_head(flow: Flow, trace: StepTrace, num_steps: int, offset: int, layer: int, head: int) -> HeadMoves:
    """One head. Under lookahead a step's plan comes first and then the blocks that the step fills, as in the kernel."""
    size, distance = flow.block_size_tokens, flow.distance

    def num_blocks(step: int) -> int:
        return -(-(int(trace.kv_len[offset]) + step) // size)

    residency = Residency(1, flow.num_kept, flow.num_slots, num_blocks(num_steps))
    residency.admit(trace.true[offset, layer, head][None], num_blocks(0))
    allowed = flow.allowed(num_steps)
    none = np.empty(0, dtype=np.int32)
    steps = []
    for t in range(num_steps):
        victims = [none]
        fetch, slack, num_runs = np.empty((0, 2), dtype=np.int32), 0, 0
        if distance == 0 and t > 0:
            victims.extend(residency.begin(num_blocks(t)))
        row = offset + t + distance - trace.shift
        if t + distance < num_steps and row >= 0:
            room = num_blocks(t + distance) - num_blocks(t)
            plan = residency.plan(trace.predicted[row, layer, head][None], t + distance, allowed[t], room)[0][0]
            fetch = np.stack([plan.fetch_ids, plan.fetch_slots], axis=1).astype(np.int32)
            victims.append(plan.victim_ids)
            slack, num_runs = plan.num_in_slack, plan.num_runs
        if distance:
            victims.extend(residency.begin(num_blocks(t + 1)))
        steps.append((fetch, np.concatenate(victims).astype(np.int32), slack, num_runs))
    return steps
