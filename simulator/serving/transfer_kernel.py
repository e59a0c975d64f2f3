"""From demand sums to the transfers of one iteration, compiled."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simulator.links import LinkCost
from simulator.serving.batch_kernel import FETCHED, IN_SLACK, REPAIR_RUNS, REPAIRED, RUNS, URGENT, URGENT_RUNS

Float = NDArray[np.float64]
Coefficients = tuple[float, float, float, int]


def coefficients(link: LinkCost) -> Coefficients:
    """(t0, seconds per operation, seconds per byte, what an operation is: 0 none, 1 block, 2 run, 3 layer)."""
    kinds = {"none": 0, "blocks": 1, "runs": 2, "layers": 3}
    return link.t0_s, link.op_s, 1.0 / link.bytes_per_s, kinds[link.ops_are]


@njit(cache=True)
def transfer_s(link: Coefficients, blocks: float, runs: float, num_bytes: float) -> float:
    """As `step_work.transfer_s`, for one layer."""
    if blocks <= 0.0:
        return 0.0
    t0_s, op_s, byte_s, kind = link
    operations = 0.0
    if kind == 1:
        operations = blocks
    elif kind == 2:
        operations = runs
    elif kind == 3:
        operations = 1.0
    return t0_s + operations * op_s + num_bytes * byte_s


@njit(cache=True)
def fill_transfers(
    t: int, lookahead_k: int, layers: NDArray[np.int64], sums: NDArray[np.int64], gpus_alike: NDArray[np.int64],
    block_bytes: float, fetch_link: Coefficients, staged: bool, scatter: tuple[float, float], write_ops: float,
    write_bytes: float, write_link: Coefficients, arriving: Float, first_s: Float, prefetch_s: Float, write_s: Float,
    scatter_s: Float, waits_for_slots: NDArray[np.bool_],
) -> float:  # fmt: skip
    """Row t of the transfers from demand sums [D, NUM_COUNTS, full layers]; returns the blocks that all GPUs fetch.

    As in `step_work.Transfers.of_the_slowest`: in the first queue each layer waits for the GPU that transfers longest;
    prefetches are those of the GPU with the most.
    """
    busiest, most_s = 0, -1.0
    for gpu in range(sums.shape[0]):
        total_s = 0.0
        for index in range(layers.shape[0]):
            ahead = float(sums[gpu, FETCHED, index] - sums[gpu, URGENT, index])
            ahead_runs = float(sums[gpu, RUNS, index] - sums[gpu, URGENT_RUNS, index])
            total_s += transfer_s(fetch_link, ahead, ahead_runs, ahead * block_bytes)
        if total_s > most_s:
            busiest, most_s = gpu, total_s
    total = 0.0
    written_s = transfer_s(write_link, write_ops, write_ops, write_bytes)
    for index in range(layers.shape[0]):
        layer = layers[index]
        longest_first = prefetched_s = most_landing = 0.0
        waits = False
        for gpu in range(sums.shape[0]):
            fetched, runs = float(sums[gpu, FETCHED, index]), float(sums[gpu, RUNS, index])
            urgent, urgent_runs = float(sums[gpu, URGENT, index]), float(sums[gpu, URGENT_RUNS, index])
            repaired, repair_runs = float(sums[gpu, REPAIRED, index]), float(sums[gpu, REPAIR_RUNS, index])
            total += gpus_alike[gpu] * (fetched + repaired)
            landing = repaired
            if lookahead_k == 0:
                first = transfer_s(fetch_link, fetched, runs, fetched * block_bytes)
                landing += fetched
            else:
                ahead, now = fetched - urgent, urgent + repaired
                prefetch = transfer_s(fetch_link, ahead, runs - urgent_runs, ahead * block_bytes)
                if gpu == busiest:
                    prefetched_s = prefetch
                first = transfer_s(fetch_link, now, urgent_runs + repair_runs, now * block_bytes)
                arriving[t, gpu, 0, index], arriving[t, gpu, 1, index] = ahead, urgent
                if t >= lookahead_k:
                    landing += arriving[t - lookahead_k, gpu, 0, index] + arriving[t - 1, gpu, 1, index]
            longest_first, most_landing = max(longest_first, first), max(most_landing, landing)
            waits = waits or fetched > sums[gpu, IN_SLACK, index]
        first_s[t, layer], prefetch_s[t, layer], write_s[t, layer] = longest_first, prefetched_s, written_s
        if staged:
            scatter_s[t, layer] = scatter[0] + most_landing * scatter[1] if most_landing > 0.0 else 0.0
        waits_for_slots[t, layer] = waits
    return total
