"""Fits heads and corrects what the closed form leaves out, by running the process at the source's own geometry.

The closed form takes sets as what lies above a fixed threshold, and blocks as ageing smoothly. The K best of few
blocks compete for K places, and change a little more. The mean difference over all heads is measured once, with a
seed of its own, and taken from every head's target; single heads are not fitted to what one run gave them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from traces.synth.fit import HeadFit, HeadProcess
from traces.synth.measure import members, overlap
from traces.synth.normal import FloatArray
from traces.synth.process import LayerProcess
from traces.synth.statistics import TraceStatistics

_SEED = 20011
_STEPS = 160
_LEAST_PAIRS = 48
_LEAST_HEADS = 48
"""Heads that a run averages over; few sources are run as several copies."""
_ROUNDS = 2


def fit_heads(statistics: TraceStatistics, layers: Iterable[int]) -> dict[int, list[HeadProcess]]:
    """Fitted heads of these rows of `statistics.layers`. Kept for the next trace from the same statistics."""
    return _fit_heads(statistics.model_dump_json(), tuple(sorted(set(layers))))


@lru_cache(maxsize=4)
def _fit_heads(statistics_json: str, rows: tuple[int, ...]) -> dict[int, list[HeadProcess]]:
    statistics = TraceStatistics.model_validate_json(statistics_json)
    fits = [HeadFit(statistics, head) for row in rows for head in statistics.layers[row].heads]
    target = np.array([head.persistence for row in rows for head in statistics.layers[row].heads])
    bias = np.zeros(target.shape[1:])
    for step in range(_ROUNDS):
        processes = [fit.process(bias) for fit in fits]
        bias = bias + _mean_bias(statistics, processes, target, seed=_SEED + step)
    fitted = iter([fit.process(bias) for fit in fits])
    return {row: [next(fitted) for _ in statistics.layers[row].heads] for row in rows}


def _mean_bias(statistics: TraceStatistics, processes: list[HeadProcess], target: FloatArray, seed: int) -> FloatArray:
    """Persistence of a run minus the measured one, mean over heads, [K, lags]."""
    copies = -(-_LEAST_HEADS // len(processes))
    heads = processes * copies
    size, context = statistics.block_size_tokens, statistics.context_tokens
    capacity = -(-(context + _STEPS - 1) // size)
    run = LayerProcess(heads, capacity, np.array(statistics.mass_ranks, np.float64), 0, np.random.default_rng(seed))
    most = statistics.set_sizes[-1]
    best = np.empty((_STEPS, 1, len(heads), most), np.int32)
    for step in range(_STEPS):
        selectable = (context + step - 1) // size
        run.advance(selectable)
        scores = run.scores[:, :selectable]
        top = np.argpartition(-scores, most - 1, axis=-1)[:, :most]
        order = np.argsort(-np.take_along_axis(scores, top, axis=-1), axis=-1)
        best[step, 0] = np.take_along_axis(top, order, axis=-1)
    measured = np.empty((len(heads), *target.shape[1:]))
    lags = [lag for lag in statistics.lags if _STEPS - lag >= _LEAST_PAIRS]
    for i, set_size in enumerate(statistics.set_sizes):
        sets = members(best, set_size, capacity)
        for j in range(len(statistics.lags)):
            lag = lags[min(j, len(lags) - 1)]
            measured[:, i, j] = overlap(sets[lag:], sets[:-lag], set_size)[0]
    last = len(lags) - 1
    bias: FloatArray = measured.mean(axis=0) - target.mean(axis=0)
    bias[:, last + 1 :] = bias[:, last : last + 1]
    return bias
