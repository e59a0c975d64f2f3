"""From demand sums to the transfers of one iteration, compiled."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simulator.fetch_path import FetchPath, PerBlock
from simulator.links import LinkCost
from simulator.serving.batch_kernel import (
    FETCHED,
    IN_SLACK,
    REPAIR_RUNS,
    REPAIRED,
    RUNS,
    URGENT,
    URGENT_RUNS,
)

Float = NDArray[np.float64]
Coefficients = tuple[float, float, float, int]
Linear = tuple[float, float]
Rules = tuple[int, bool, bool, bool]


def coefficients(link: LinkCost) -> Coefficients:
    """(t0, seconds per operation, seconds per byte, what an operation is: 0 none, 1 block, 2 run, 3 layer)."""
    kinds = {"none": 0, "blocks": 1, "runs": 2, "layers": 3}
    return link.t0_s, link.op_s, 1.0 / link.bytes_per_s, kinds[link.ops_are]


def kernel_coefficients(kernel: PerBlock) -> Linear:
    return kernel.t0_s, kernel.block_s


def kernel_rules(path: FetchPath) -> Rules:
    """(lookahead_k, prefetches, same_step, lands_in_slots)."""
    rules = path.rules
    return rules.lookahead_k, rules.prefetches, rules.same_step, rules.lands_in_slots


@njit(cache=True)
def transfer_s(link: Coefficients, blocks: float, runs: float, num_bytes: float) -> float:
    """As `links.transfer_s`, for one layer."""
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
def kernel_s(kernel: Linear, blocks: float) -> float:
    if blocks <= 0.0:
        return 0.0
    return kernel[0] + kernel[1] * blocks


@njit(cache=True)
def busiest_gpu(sums: NDArray[np.int64], link: Coefficients, block_bytes: float) -> int:
    """Whose prefetches take longest in all layers together."""
    busiest, most_s = 0, -1.0
    for gpu in range(sums.shape[0]):
        total_s = 0.0
        for layer in range(sums.shape[2]):
            ahead = float(sums[gpu, FETCHED, layer] - sums[gpu, URGENT, layer])
            runs = float(sums[gpu, RUNS, layer] - sums[gpu, URGENT_RUNS, layer])
            total_s += transfer_s(link, ahead, runs, ahead * block_bytes)
        if total_s > most_s:
            busiest, most_s = gpu, total_s
    return busiest


@njit(cache=True)
def fill_transfers(
    t: int, rules: Rules, layers: NDArray[np.int64], sums: NDArray[np.int64], gpus_alike: NDArray[np.int64],
    block_bytes: float, link: Coefficients, landing: Linear, fallback: Linear, written_s: float, arriving: Float,
    first_s: Float, prefetch_s: Float, write_s: Float, scatter_s: Float, attention_s: Float,
    waits_for_slots: NDArray[np.bool_],
) -> float:  # fmt: skip
    """Row t of the transfers from demand sums [D, counts, full layers]; returns the blocks that all GPUs fetch over
    their host links. Adds to row t of `attention_s`.

    As in `step_transfers.Transfers.of_the_slowest`: in the first queue each layer waits for the GPU that transfers
    longest; prefetches are those of the GPU with the most.
    """
    lookahead_k, prefetches, same_step, lands_in_slots = rules
    busiest = busiest_gpu(sums, link, block_bytes) if prefetches else 0
    total = 0.0
    for index in range(layers.shape[0]):
        layer = layers[index]
        longest_first = prefetched_s = landing_s = fallback_s = 0.0
        waits = False
        for gpu in range(sums.shape[0]):
            fetched, runs = float(sums[gpu, FETCHED, index]), float(sums[gpu, RUNS, index])
            urgent, urgent_runs = float(sums[gpu, URGENT, index]), float(sums[gpu, URGENT_RUNS, index])
            repaired, repair_runs = float(sums[gpu, REPAIRED, index]), float(sums[gpu, REPAIR_RUNS, index])
            total += gpus_alike[gpu] * (fetched + repaired)
            ahead, now, now_runs = fetched - urgent, urgent + repaired, urgent_runs + repair_runs
            if not prefetches:
                now, now_runs = fetched + repaired, runs + repair_runs
            elif gpu == busiest:
                prefetched_s = transfer_s(link, ahead, runs - urgent_runs, ahead * block_bytes)
            longest_first = max(longest_first, transfer_s(link, now, now_runs, now * block_bytes))
            arriving[t, gpu, 0, index], arriving[t, gpu, 1, index] = ahead, urgent
            arrived = repaired
            if t >= lookahead_k:
                arrived += arriving[t - lookahead_k, gpu, 0, index]
            if t >= 1:
                arrived += arriving[t - 1, gpu, 1, index]
            landing_s = max(landing_s, kernel_s(landing, arrived))
            fallback_s = max(fallback_s, kernel_s(fallback, repaired))
            waits = waits or fetched > sums[gpu, IN_SLACK, index]
        if lands_in_slots:
            longest_first = prefetched_s = 0.0
        first_s[t, layer], prefetch_s[t, layer], write_s[t, layer] = longest_first, prefetched_s, written_s
        scatter_s[t, layer] = landing_s
        attention_s[t, layer] += fallback_s
        waits_for_slots[t, layer] = waits and not same_step
    return 0.0 if lands_in_slots else total


@njit(cache=True)
def fill_remote(
    t: int, rules: Rules, layers: NDArray[np.int64], sums: NDArray[np.int64], gpus_alike: NDArray[np.int64],
    counts: tuple[int, int, int], read_s: float, remote_first_s: Float, remote_prefetch_s: Float,
) -> float:  # fmt: skip
    """Row t of what comes from beyond the host, `read_s` a block; returns the blocks of all GPUs.

    `counts`: rows of `sums` with fetched, urgent and repaired blocks that host memory does not hold.
    """
    fetched, urgent, repaired = counts
    prefetches = rules[1]
    busiest, most, total = 0, -1, 0.0
    for gpu in range(sums.shape[0]):
        ahead = 0
        for index in range(layers.shape[0]):
            ahead += sums[gpu, fetched, index] - sums[gpu, urgent, index]
            total += gpus_alike[gpu] * (sums[gpu, fetched, index] + sums[gpu, repaired, index])
        if ahead > most:
            busiest, most = gpu, ahead
    for index in range(layers.shape[0]):
        most_now = 0
        for gpu in range(sums.shape[0]):
            now = sums[gpu, urgent, index] if prefetches else sums[gpu, fetched, index]
            most_now = max(most_now, now + sums[gpu, repaired, index])
        ahead = sums[busiest, fetched, index] - sums[busiest, urgent, index] if prefetches else 0
        remote_first_s[t, layers[index]] = most_now * read_s
        remote_prefetch_s[t, layers[index]] = ahead * read_s
    return total
