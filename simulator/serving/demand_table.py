"""Demand rows of a serving run: the steady rows of each trace group that serves, side by side in one array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.demand import REMOTE_FIELDS, Demand
from simulator.serving.batch_kernel import IN_SLACK, OF_ALL, OF_REMOTE, REMOTE_REPAIRED
from simulator.serving.left_behind import with_tail
from simulator.serving.request_state import RequestState

COUNTS = ("fetched", "runs", "urgent", "urgent_runs", "repaired", "repair_runs", "in_slack")
"""Fields of Demand in the order of `batch_kernel`."""
assert len(COUNTS) == IN_SLACK + 1
assert len(COUNTS + REMOTE_FIELDS) == REMOTE_REPAIRED + 1


@dataclass(frozen=True, slots=True)
class Group:
    """A trace group's demand on each GPU of a replica and the KV length at its first step."""

    name: str
    context_tokens: int
    demands: tuple[Demand, ...]
    """One per GPU; those that hold the same heads share one object."""


class DemandTable:
    """Which rows a request draws: those of the group nearest in context, from its own seeded offset, wrapping.

    That blocks change at another context as they do in the trace is an assumption.
    """

    def __init__(
        self, groups: Sequence[Group], num_layers: int, seed: int, attends_all: bool = False, pulls: bool = False
    ) -> None:
        """`attends_all`: dense attention, which has groups only for what its verified drafts gain. `pulls`: requests
        start where the trace does, since what is new of a fetch depends on the steps before (`left_behind`)."""
        self.pulls = pulls
        self.groups, self.seed = tuple(groups), seed
        self.num_kept = groups[0].demands[0].num_kept if groups and not attends_all else 0
        """K, blocks per KV head that attention reads besides the open block; 0: all of them (dense attention)."""
        gpus = _distinct_gpus(groups[0].demands) if groups else {0: 1}
        self.gpus_alike: NDArray[np.int64] = np.array(list(gpus.values()), np.int64)
        """[D]: GPUs that hold the same heads as each of the D whose demand is kept."""
        has_cache = any(group.demands[0].remote_fetched is not None for group in groups)
        self.names = COUNTS + REMOTE_FIELDS if has_cache else COUNTS
        """What is counted, in the order of `batch_kernel`."""
        self.remote_counts = OF_REMOTE if has_cache else OF_ALL
        """Of `names`, blocks fetched, urgent and repaired that come from beyond the host, where the KV lives there."""
        rows = [_rows([group.demands[gpu] for gpu in gpus], self.names) for group in groups]
        if pulls:
            rows = [with_tail(part) for part in rows]
        self.group_rows = rows
        """Of each group, views of `counts`."""
        empty = np.zeros((1, len(gpus), len(self.names), num_layers), np.int32)
        self.counts: NDArray[np.int32] = np.concatenate(rows) if rows else empty
        """[rows, D, counts, full-attention layers], summed over a GPU's KV heads."""
        gained = [np.tile(_steady(group.demands[0], group.demands[0].tokens_by_row()), 1 + pulls) for group in groups]
        self.gained_tokens: NDArray[np.int64] = np.concatenate(gained or [np.ones(1, np.int32)]).astype(np.int64)
        """[rows]: tokens that a step adds: 1, or with verified drafts 1 + accepted."""
        self.starts = np.cumsum([0, *(len(part) for part in rows)])
        self.corrected_share = max((d.corrected_share for group in groups for d in group.demands), default=0.0)
        """Of the heads that miss rule correct repairs: the most of any group and GPU."""
        self.row_uses: NDArray[np.int64] = np.zeros(len(self.counts), np.int64)
        """[rows]: steps of requests that drew each row, for means."""

    def first_row(self, request: RequestState) -> tuple[int, int, int]:
        """(first row, start, stop) of a request that decodes from now on: the same after a preemption."""
        if not self.groups:
            return 0, 0, 1
        nearest = self.group_of(request)
        start, stop = int(self.starts[nearest]), int(self.starts[nearest + 1])
        if self.pulls:
            return start, (start + stop) // 2, stop
        offset = int(np.random.default_rng([self.seed, 2, request.index]).integers(stop - start))
        return start + (offset + request.generated_tokens) % (stop - start), start, stop

    def group_of(self, request: RequestState) -> int:
        """Number of the group nearest in context; 0 where there is none."""
        distances = [abs(group.context_tokens - request.prompt_tokens) for group in self.groups]
        return distances.index(min(distances)) if distances else 0

    def uses(self, group: int) -> NDArray[np.int64]:
        """[steady rows]: steps of requests that drew each row of a group."""
        drawn = self.row_uses[self.starts[group] : self.starts[group + 1]]
        return np.asarray(drawn.reshape(1 + self.pulls, -1).sum(axis=0))

    def mean_counts(self) -> NDArray[np.float64]:
        """[counts, layers]: expected counts of a request's step, over the rows of all groups and the GPUs."""
        return np.asarray(np.average(self.counts.mean(axis=0), axis=0, weights=self.gpus_alike))


def _distinct_gpus(demands: Sequence[Demand]) -> dict[int, int]:
    """First GPU of each demand, and how many have it. Every group of a trace has the same heads, so the same GPUs."""
    first: dict[int, int] = {}
    for gpu, demand in enumerate(demands):
        first.setdefault(id(demand), gpu)
    return {gpu: sum(demand is demands[gpu] for demand in demands) for gpu in first.values()}


def _rows(demands: Sequence[Demand], names: Sequence[str]) -> NDArray[np.int32]:
    """[steady rows, GPUs, counts, layers]."""
    per_gpu = [np.stack([_steady(demand, getattr(demand, name)) for name in names], axis=1) for demand in demands]
    return np.ascontiguousarray(np.stack(per_gpu, axis=1))


def _steady(demand: Demand, rows: NDArray[np.int32]) -> NDArray[np.int32]:
    return rows[demand.steady_start : demand.steady_stop]
