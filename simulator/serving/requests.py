"""The requests of a serving run: from a file or drawn, with the arrivals that the experiment asks for."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from simulator.specs.serving import MAX_DURATION_S, NUM_DRAWN_REQUESTS, ServingSpec
from traces.arrivals import batch_interval_s, closed, gamma_bursts, poisson, rescale, spread_batches
from traces.errors import InputError
from traces.importers.formats import load_workload
from traces.lengths import LENGTHS, Fixed, Lengths, draw_workload
from traces.workload import FloatArray, Workload


def make_workload(serving: ServingSpec, seed: int) -> Workload:
    """Requests in arrival order. Arrivals and lengths have streams of their own, so that a sweep of the rate keeps
    the lengths and the pattern.

    Raises InputError: an unreadable file (file, line, field), arrivals stamped in batches that nothing was said
    about, or arrivals later than MAX_DURATION_S.
    """
    arrivals_rng, lengths_rng = (np.random.default_rng([seed, stream]) for stream in (0, 1))
    if serving.requests is None:
        count = serving.num_requests or NUM_DRAWN_REQUESTS
        lengths = _lengths(serving)
        arrival_s = _within_duration(serving, _process(serving, count, arrivals_rng))
        return draw_workload(serving.lengths, arrival_s, lengths, lengths_rng)
    path = Path(serving.requests)
    stamp = path.stat().st_mtime_ns if path.exists() else 0
    workload = _load(str(path), stamp, serving.num_requests)
    if serving.prefix_cache != "none" and workload.hash_ids is None:
        raise InputError(f"serving.prefix_cache {serving.prefix_cache}: {serving.requests} has no hash ids")
    if serving.arrival_process != "file":
        arrival_s = _process(serving, workload.num_requests, arrivals_rng)
        return workload.with_arrivals(_within_duration(serving, arrival_s))
    arrival_s = _unstamped(serving, workload.arrival_s, arrivals_rng)
    if serving.rate_per_s is not None:
        arrival_s = rescale(arrival_s, serving.rate_per_s)
    return workload.with_arrivals(_within_duration(serving, arrival_s))


def _within_duration(serving: ServingSpec, arrival_s: FloatArray) -> FloatArray:
    """`arrival_s` as given. Raises InputError where the last is too late for the clock."""
    if arrival_s[-1] <= MAX_DURATION_S:
        return arrival_s
    cause = f"rate_per_s {serving.rate_per_s:g}" if serving.rate_per_s is not None else f"requests {serving.requests}"
    raise InputError(
        f"serving.{cause}: the last of {len(arrival_s)} requests comes after {arrival_s[-1]:.3g} s, beyond the "
        f"{MAX_DURATION_S:g} s that a run may last; give a higher serving.rate_per_s"
    )


@lru_cache(maxsize=2)
def _load(path: str, stamp: int, max_requests: int | None) -> Workload:
    """A request file, read once per process while it stays the same."""
    return load_workload(path, max_requests=max_requests)


def _lengths(serving: ServingSpec) -> Lengths:
    drawn = LENGTHS[serving.lengths]
    return replace(
        drawn,
        prompt=drawn.prompt if serving.prompt_tokens is None else Fixed(serving.prompt_tokens),
        output=drawn.output if serving.output_tokens is None else Fixed(serving.output_tokens),
    )


def _process(serving: ServingSpec, count: int, rng: np.random.Generator) -> FloatArray:
    process = serving.arrival_process
    if process == "closed":
        return closed(count)
    assert serving.rate_per_s is not None
    if process == "poisson":
        return poisson(count, serving.rate_per_s, rng)
    assert serving.burstiness_cv is not None
    return gamma_bursts(count, serving.rate_per_s, serving.burstiness_cv, rng)


def _unstamped(serving: ServingSpec, arrival_s: FloatArray, rng: np.random.Generator) -> FloatArray:
    interval_s = batch_interval_s(arrival_s)
    if interval_s is None or serving.stamped_batches == "keep":
        return arrival_s
    if serving.stamped_batches == "refuse":
        raise InputError(
            f"serving.requests {serving.requests}: arrivals are stamped in batches every {interval_s:g} s, bursts that "
            "the logging made; set serving.stamped_batches to spread (each batch evenly over its interval) or keep"
        )
    return spread_batches(arrival_s, rng, interval_s)
