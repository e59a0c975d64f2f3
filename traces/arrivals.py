"""When requests arrive: all at once, by a renewal process, or as a file says.

Every function returns arrival_s, float64 [N], non-decreasing and >= 0; randomness comes only from the generator
passed in, so the same seed gives the same bytes.
"""

from __future__ import annotations

import math

import numpy as np

from traces.errors import InputError
from traces.workload import FloatArray, Workload

BATCH_WINDOW_S = 3.0
"""Spacing of the time stamps of Mooncake's conversation trace. Source: that file; 1,174 of its 1,179 gaps between
distinct stamps are 2.999 to 3.001 s."""


def closed(num_requests: int) -> FloatArray:
    """A closed batch: every request waits at time 0."""
    return np.zeros(_positive_count(num_requests), np.float64)


def poisson(num_requests: int, rate_per_s: float, rng: np.random.Generator) -> FloatArray:
    """Exponential gaps of mean 1 / rate, also before the first request."""
    return gamma_bursts(num_requests, rate_per_s, 1.0, rng)


def gamma_bursts(
    num_requests: int, rate_per_s: float, coefficient_of_variation: float, rng: np.random.Generator
) -> FloatArray:
    """Gamma gaps of mean 1 / rate and the given standard deviation / mean: 1 is Poisson, more comes in bursts.

    Production gaps are better described by Gamma or Weibull than by a Poisson process. Source: ServeGen
    (arXiv 2505.09999), arrival patterns.
    """
    _positive("rate_per_s", rate_per_s)
    _positive("coefficient_of_variation", coefficient_of_variation)
    shape = coefficient_of_variation**-2
    gaps_s = rng.gamma(shape, 1.0 / (rate_per_s * shape), _positive_count(num_requests))
    return np.cumsum(gaps_s)


def rescale(arrival_s: FloatArray, rate_per_s: float) -> FloatArray:
    """The same pattern played faster or slower, so that N requests come in N / rate seconds."""
    _positive("rate_per_s", rate_per_s)
    if len(arrival_s) == 0 or arrival_s[-1] <= 0:
        raise InputError("rescale: the requests arrive at time 0 only and have no rate to change")
    return arrival_s * (len(arrival_s) / rate_per_s / float(arrival_s[-1]))


def batch_interval_s(arrival_s: FloatArray) -> float | None:
    """The interval at which arrivals were stamped in batches, or None if they were not.

    Called batched (a heuristic): two requests or more a stamp on average, and 95 % of the gaps between distinct
    stamps within 1 % of their median.
    """
    stamps_s = np.unique(arrival_s)
    if len(stamps_s) < 3 or len(arrival_s) < 2 * len(stamps_s):
        return None
    gaps_s = np.diff(stamps_s)
    median_s = float(np.median(gaps_s))
    regular = np.abs(gaps_s - median_s) <= 0.01 * median_s
    return median_s if regular.mean() >= 0.95 else None


def spread_batches(arrival_s: FloatArray, rng: np.random.Generator, window_s: float = BATCH_WINDOW_S) -> FloatArray:
    """Undoes batched time stamps: a batch's requests arrive uniformly between its stamp and the next one.

    Without it a queue sees bursts that the logging made. No request moves by more than `window_s` or past the next
    stamp, and the file's order is kept. That batches are uniform inside, and that a stamp is the start of its window,
    are assumptions: the file does not say. Raises InputError when the arrivals are not stamped in batches
    of that window.
    """
    _positive("window_s", window_s)
    interval_s = batch_interval_s(arrival_s)
    if interval_s is None or abs(interval_s - window_s) > 0.01 * window_s:
        found = "are not stamped in batches" if interval_s is None else f"are stamped every {interval_s:g} s"
        raise InputError(f"spread_batches: the arrivals {found}, expected batches every {window_s:g} s")
    stamps_s, batch = np.unique(arrival_s, return_inverse=True)
    room_s = np.minimum(np.diff(stamps_s, append=np.inf), window_s)
    spread_s = arrival_s + rng.random(len(arrival_s)) * room_s[batch]
    return np.sort(np.minimum(spread_s, np.append(stamps_s[1:], np.inf)[batch]))


def spread_workload(workload: Workload, seed: int, window_s: float = BATCH_WINDOW_S) -> Workload:
    """The workload with its batched arrivals spread, by its own seed. Raises InputError as `spread_batches`."""
    return workload.with_arrivals(spread_batches(workload.arrival_s, np.random.default_rng(seed), window_s))


def _positive_count(num_requests: int) -> int:
    if num_requests < 1:
        raise InputError(f"num_requests must be >= 1, got {num_requests}")
    return num_requests


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{name} must be finite and > 0, got {value}")
