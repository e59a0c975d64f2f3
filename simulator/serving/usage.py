"""Who waited and ran when, and what the pools held: means over intervals of one length, in a file beside a run's rows.

At most MAX_INTERVALS are kept. When a run outgrows them, neighbours are merged: memory does not grow with the run, and
a mean over an interval stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simulator.results import published
from simulator.serving.pools import Pool, Pools
from simulator.serving.scheduler import Scheduler

MAX_INTERVALS = 1024
FIRST_INTERVAL_S = 2.0**-10
"""Powers of two: ends of intervals are exact."""
COUNTS = ("waiting", "prefilling", "decoding")
POOLS = tuple(f"{pool.name.lower()}_bytes" for pool in Pool)
CAPACITIES = ("hbm_capacity_bytes", "host_capacity_bytes", "remote_capacity_bytes")
COLUMNS = ("role", "start_s", "seconds", *COUNTS, *POOLS, *CAPACITIES)
"""Of `usage.parquet`: requests of all replicas of a role (one whose KV is on its way decodes), bytes per GPU as the
mean over replicas, and what a GPU's pools hold at most (HBM: what weights and activations leave)."""


class Usage:
    """Of the replicas of one role."""

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self.interval_s = FIRST_INTERVAL_S
        self._held = np.zeros((num_replicas, len(COUNTS) + len(Pool)))
        self._total = np.zeros(self._held.shape[1])
        self._sums = np.zeros((MAX_INTERVALS, self._held.shape[1]))
        self._at, self._since_s = 0, 0.0

    def record(self, replica: int, now_s: float, scheduler: Scheduler) -> None:
        """What `replica` holds from now on."""
        self._advance(now_s)
        held = self._held[replica]
        self._total -= held
        held[0], held[1] = len(scheduler.waiting), len(scheduler.prefilling)
        held[2] = len(scheduler.decode) + len(scheduler.pulling)
        held[3:] = scheduler.pools.used
        self._total += held

    def _advance(self, now_s: float) -> None:
        while now_s >= (end_s := (self._at + 1) * self.interval_s):
            self._sums[self._at] += self._total * (end_s - self._since_s)
            self._since_s = end_s
            self._at += 1
            if self._at == MAX_INTERVALS:
                self._merge()
        if now_s > self._since_s:
            self._sums[self._at] += self._total * (now_s - self._since_s)
            self._since_s = now_s

    def _merge(self) -> None:
        half = MAX_INTERVALS // 2
        self._sums[:half] = self._sums[0::2] + self._sums[1::2]
        self._sums[half:] = 0.0
        self._at, self.interval_s = half, 2 * self.interval_s

    def means(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(starts and lengths [n, 2] in seconds, means [n, COUNTS and POOLS]); the last interval ends with the run."""
        num = self._at + 1 if self._since_s > self._at * self.interval_s else self._at
        start_s = np.arange(num) * self.interval_s
        seconds = np.minimum(self.interval_s, self._since_s - start_s)
        means = self._sums[:num] / seconds[:, None]
        means[:, len(COUNTS) :] /= self.num_replicas
        return np.stack([start_s, seconds], axis=1), means


def write_usage(path: Path, roles: Sequence[tuple[str, Usage, Pools]]) -> None:
    """One table of all roles, each with the pools of one of its replicas."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, list[NDArray[np.float64]]] = {name: [] for name in COLUMNS[1:]}
    names: list[str] = []
    for role, usage, pools in roles:
        spans, means = usage.means()
        names += [role] * len(spans)
        limits = np.array([pools.hbm_bytes, pools.host_bytes, pools.remote_bytes], float)
        table = np.concatenate([spans, means, np.broadcast_to(limits, (len(spans), 3))], axis=1)
        for name, values in zip(columns, table.T, strict=True):
            columns[name].append(values)
    joined = {name: pa.array(np.concatenate(values)) for name, values in columns.items()}
    with published(path) as part:
        pq.write_table(pa.table({"role": pa.array(names), **joined}), part)
