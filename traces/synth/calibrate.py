"""Fits heads and corrects what the closed form leaves out, by running the process at the source's own geometry.

The closed form takes sets as what lies above a fixed threshold, and blocks as ageing smoothly. The K best of few
blocks compete for K places, and change a little more. The mean difference over all heads is measured once, with a
seed of its own, and taken from every head's target; single heads are not fitted to what one run gave them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from traces.codec import Ids
from traces.synth.fit import Bias, HeadFit, HeadProcess
from traces.synth.kinds import draft_kinds
from traces.synth.measure import draft_overlaps, members, overlap, stale_losses
from traces.synth.normal import FloatArray
from traces.synth.process import LayerProcess
from traces.synth.runs import best_blocks, ranked_rows
from traces.synth.statistics import HeadStatistics, TraceStatistics

DraftOverlaps = Mapping[tuple[int, str, str], FloatArray]
"""[K] by distance, kind and field of DraftState."""

_SEED = 20011
_STEPS = 160
_LEAST_PAIRS = 48
_HEADS = 48
"""About so many heads a run averages over, at least; few are run as several copies."""
_GAINS = (1.0, 1.0, 0.5, 0.33)
"""Of each round's correction: later rounds average what single runs differ by."""
_FOLLOWS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Tried for `HeadProcess.mass_follows`."""
_MASS_EVERY = 4
"""Steps between two at which a run's mass is looked at."""


def fit_heads(statistics: TraceStatistics, layers: Iterable[int]) -> dict[int, list[HeadProcess]]:
    """Fitted heads of these rows of `statistics.layers`. Kept for the next trace from the same statistics."""
    return _fit_heads(statistics.model_dump_json(), tuple(sorted(set(layers))))


@lru_cache(maxsize=4)
def _fit_heads(statistics_json: str, rows: tuple[int, ...]) -> dict[int, list[HeadProcess]]:
    statistics = TraceStatistics.model_validate_json(statistics_json)
    heads = [head for row in rows for head in statistics.layers[row].heads]
    fits = [HeadFit(statistics, head) for head in heads]
    target = np.array([head.persistence for head in heads]).mean(axis=0)
    drafted = _mean_drafts(heads)
    bias = Bias(np.zeros(target.shape), {key: np.zeros(len(row)) for key, row in drafted.items()})
    for step, gain in enumerate(_GAINS):
        run = _run(statistics, [fit.process(bias) for fit in fits], seed=_SEED + step)
        bias = Bias(
            bias.persistence + gain * _excess(statistics, run.best, target),
            {key: of + gain * (run.drafts.get(key, drafted[key]) - drafted[key]) for key, of in bias.drafts.items()},
        )
    processes = [fit.process(bias) for fit in fits]
    losses = np.array([head.stale_loss for head in heads if head.stale_loss])
    if len(losses) == len(heads):
        follows = _mass_follows(statistics, processes, losses.mean(axis=0), seed=_SEED + len(_GAINS))
        processes = [replace(process, mass_follows=follows) for process in processes]
    fitted = iter(processes)
    return {row: [next(fitted) for _ in statistics.layers[row].heads] for row in rows}


def _mean_drafts(heads: Sequence[HeadStatistics]) -> DraftOverlaps:
    """Of all heads; every head has the same fields."""
    found: dict[tuple[int, str, str], list[FloatArray]] = {}
    for head in heads:
        for j, states in enumerate(head.drafts, start=1):
            for kind, state in states.items():
                for name, row in state.model_dump().items():
                    if row:
                        found.setdefault((j, kind, name), []).append(np.array(row))
    return {key: np.mean(rows, axis=0) for key, rows in found.items()}


def _mass_follows(statistics: TraceStatistics, processes: list[HeadProcess], target: FloatArray, seed: int) -> float:
    """How much of its score's noise a block's mass has, one for all heads, so that the sets of the step before lose the
    measured mass, a mean over K weighted by K: what a run loses rises with it."""
    run = _layer_process(statistics, processes, 0, np.random.default_rng(seed))
    sizes, most = statistics.set_sizes, statistics.set_sizes[-1]
    lost, number = np.zeros(len(_FOLLOWS)), 0
    weights = np.array(sizes) / sum(sizes)
    before: Ids | None = None
    known = 0
    for step in range(_STEPS):
        selectable = (_first_context(statistics) + step - 1) // statistics.block_size_tokens
        run.advance(selectable)
        best = best_blocks(run.scores[:, :selectable], most)
        if before is not None and step % _MASS_EVERY == 0 and selectable == known:
            number += 1
            for at, follows in enumerate(_FOLLOWS):
                mass = np.exp2(run.log2_mass(follows))
                lost[at] += stale_losses(mass, best, before, sizes).mean(axis=1) @ weights
        before, known = best, selectable
    return float(np.interp(target @ weights, np.maximum.accumulate(lost / max(1, number)), _FOLLOWS))


@dataclass(frozen=True, slots=True)
class _Run:
    best: Ids
    """[S, 1, H, K], the largest K, best first."""
    drafts: DraftOverlaps


def _run(statistics: TraceStatistics, processes: list[HeadProcess], seed: int) -> _Run:
    """The processes at the source's geometry and context, several copies of few heads."""
    size, context = statistics.block_size_tokens, _first_context(statistics)
    capacity = -(-(context + _STEPS - 1) // size)
    rng = np.random.default_rng(seed)
    kinds = draft_kinds(statistics, _STEPS, rng)
    run = _layer_process(statistics, processes, len(kinds), rng)
    best = ranked_rows(run, kinds, context, _STEPS, size, statistics.set_sizes[-1])[:, :, None]
    rows = {
        (j, kind): j + np.flatnonzero(of_step[j:] == kind)
        for j, of_step in enumerate(kinds, start=1)
        for kind in np.unique(of_step[j:]).tolist()
    }
    overlaps: dict[tuple[int, str, str], list[float]] = {}
    for set_size in statistics.set_sizes:
        sets = members(best[0], set_size, capacity)
        for (j, kind), at in rows.items():
            for name, values in draft_overlaps(best[j], sets, at, rows.get((j, "right")), set_size).items():
                overlaps.setdefault((j, kind, name), []).append(float(values.mean()))
    return _Run(best[0], {key: np.array(row) for key, row in overlaps.items()})


def _first_context(statistics: TraceStatistics) -> int:
    """Tokens at a run's first step, such that it is the middle of the source: blocks come, and churn grows a little."""
    return statistics.context_tokens + max(0, statistics.num_steps - _STEPS) // 2


def _layer_process(
    statistics: TraceStatistics, processes: list[HeadProcess], num_distances: int, rng: np.random.Generator
) -> LayerProcess:
    heads = processes * max(1, round(_HEADS / len(processes)))
    size, context = statistics.block_size_tokens, _first_context(statistics)
    capacity, ranks = -(-(context + _STEPS - 1) // size), np.array(statistics.mass_ranks, np.float64)
    return LayerProcess(heads, capacity, (context - 1) // size, ranks, num_distances, rng)


def _excess(statistics: TraceStatistics, best: Ids, target: FloatArray) -> FloatArray:
    """Persistence of a run minus the target, mean over heads, [K, lags]; at lags that leave too few pairs it is that
    of the last one that does not."""
    lags = [lag for lag in statistics.lags if _STEPS - lag >= _LEAST_PAIRS]
    excess = np.empty(target.shape)
    for i, set_size in enumerate(statistics.set_sizes):
        sets = members(best, set_size, int(best.max()) + 1)
        for j, lag in enumerate(lags):
            excess[i, j] = overlap(sets[lag:], sets[:-lag], set_size).mean() - target[i, j]
    excess[:, len(lags) :] = excess[:, len(lags) - 1 : len(lags)]
    return excess
