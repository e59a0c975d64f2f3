"""What a synthesised trace reached, beside the statistics that it was made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from traces.synth.statistics import HeadStatistics, TraceStatistics

_SHOWN_LAGS = (1, 8, 32)


@dataclass(frozen=True, slots=True)
class Compared:
    """One statistic, mean over layers and heads. target: None where the source does not say."""

    statistic: str
    set_size_blocks: int | None
    target: float | None
    achieved: float | None


def compare(target: TraceStatistics, achieved: TraceStatistics) -> list[Compared]:
    """Churn, persistence, drafts, sink and mass of both, at the set sizes of the target."""
    rows = []
    for size in target.set_sizes:
        for lag in _SHOWN_LAGS:
            name = "churn per step" if lag == 1 else f"still in the set {lag} steps later"
            pair = [_persistence(statistics, size, lag) for statistics in (target, achieved)]
            rows.append(Compared(name, size, *((None if p is None else 1 - p) if lag == 1 else p for p in pair)))
        for j in range(1, len(target.draft_kinds) + 1):
            rows.append(Compared(f"draft{j} overlap", size, _draft(target, size, j), _draft(achieved, size, j)))
    for name, read in _MASS.items():
        rows.append(Compared(name, None, _mean(target, read), _mean(achieved, read)))
    return [row for row in rows if row.target is not None]


_MASS: dict[str, Callable[[HeadStatistics], float]] = {
    "mass of block 0": lambda head: head.sink_mass,
    "mass of the open block": lambda head: head.open_mass,
}


def _mean(statistics: TraceStatistics, read: Callable[[HeadStatistics], float]) -> float:
    return float(np.mean([read(head) for layer in statistics.layers for head in layer.heads]))


def _persistence(statistics: TraceStatistics, size: int, lag: int) -> float | None:
    if size not in statistics.set_sizes or lag not in statistics.lags:
        return None
    at, lag_at = statistics.set_sizes.index(size), statistics.lags.index(lag)
    return _mean(statistics, lambda head: head.persistence[at][lag_at])


def _draft(statistics: TraceStatistics, size: int, distance: int) -> float | None:
    """Overlap of the draft rows with `true`, over rows of every kind."""
    if size not in statistics.set_sizes or distance > len(statistics.draft_kinds):
        return None
    at, shares = statistics.set_sizes.index(size), statistics.draft_kinds[distance - 1].shares
    return _mean(
        statistics,
        lambda head: sum(share * head.drafts[distance - 1][kind].with_true[at] for kind, share in shares.items()),
    )
