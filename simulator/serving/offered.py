"""Whether a run kept up with the work that came: offered against served tokens, and how long it went on afterwards."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from simulator.serving.records import RequestLog

LEAST_SERVED_SHARE = 0.95
"""A run whose `served_share` is below is `overloaded`. A convention."""
FAST_TPOT_QUANTILE = 0.1
"""Of TPOT over requests: the pace of the last ones, around which the batch empties; the median is slow where the run is
overloaded. A convention."""
NEWEST_SHARE = 0.1
"""Of the finished requests: the last to arrive, whose wait in the queue tells how long it was at the last arrival. A
convention."""
OFFERED = ("offered_tokens_per_s", "offered_prompt_tokens_per_s", "served_share", "drain_s", "overloaded")


def offered_load(log: RequestLog) -> dict[str, Any]:
    """The columns OFFERED; null where arrivals have no rate (all at once, or none finished).

    offered_tokens_per_s, offered_prompt_tokens_per_s: output and prompt tokens of the requests that fit, over the time
    from the first arrival to the last. drain_s: from the last arrival to the last finish. served_share: arriving time /
    (arriving time + backlog). overloaded: whether that is below LEAST_SERVED_SHARE.
    """
    arriving_s = log.last_arrival_s - (log.first_arrival_s or 0.0)
    if not log.num_finished or arriving_s <= 0:
        return dict.fromkeys(OFFERED)
    drain_s = max(0.0, log.last_finish_s - log.last_arrival_s)
    served_share = arriving_s / (arriving_s + _backlog_s(log, arriving_s, drain_s))
    return {
        "offered_tokens_per_s": log.output_tokens / arriving_s,
        "offered_prompt_tokens_per_s": log.prompt_tokens / arriving_s,
        "served_share": served_share,
        "drain_s": drain_s,
        "overloaded": bool(served_share < LEAST_SERVED_SHARE),
    }


def _backlog_s(log: RequestLog, arriving_s: float, drain_s: float) -> float:
    """Seconds of work left over at the last arrival: the larger of the newest requests' wait in the queue (median) and
    of what the drain takes beyond the requests' own time, which sees the preempted ones too. Where the drain is longer
    than the arrivals, all of it: a finite number of requests is one burst then."""
    if drain_s > arriving_s:
        return drain_s
    newest_first = np.argsort(-log.finished("arrival_s"), kind="stable")
    num_newest = math.ceil(NEWEST_SHARE * log.num_finished)
    queued_s = float(np.median(log.times_s("queue_s")[newest_first[:num_newest]]))
    return max(queued_s, drain_s - max(0.0, _own_drain_s(log)))


def _own_drain_s(log: RequestLog) -> float:
    """Seconds from the last arrival to the last finish if nobody had queued: each request takes its prefill and its
    output tokens at FAST_TPOT_QUANTILE; negative where all would have finished before."""
    tpot_s = log.times_s("tpot_s")
    fast_tpot_s = float(np.quantile(tpot_s, FAST_TPOT_QUANTILE)) if len(tpot_s) else 0.0
    prefill_s = log.times_s("ttft_s") - log.times_s("queue_s")
    alone_s = prefill_s + fast_tpot_s * (log.finished("output_tokens") - 1)
    return float((log.finished("arrival_s") + alone_s).max()) - log.last_arrival_s
