"""Whether a run kept up with the work that came: offered against served tokens, and how long it went on afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.serving.records import RequestLog

KEEPS_UP = 0.95
"""Share of the offered tokens from which a run is said to keep up. A convention."""
FAST_TPOT = 0.1
"""Quantile of TPOT at which the last requests are taken to decode: the batch empties around them, while the median is
slow where the run is overloaded. A convention."""
OFFERED = ("offered_tokens_per_s", "offered_prompt_tokens_per_s", "served_share", "drain_s", "overloaded")


def offered_load(log: RequestLog) -> dict[str, Any]:
    """The columns OFFERED; null where arrivals have no rate (all at once, or none finished).

    Offered is what requests that fit bring, over the time from the first arrival to the last. `drain_s` runs from the
    last arrival to the last finish. The backlog at the last arrival is the larger of two times: what the last tenth of
    the requests waited in the queue (median), and what of the drain goes beyond the requests' own time (their prefill
    and their output at FAST_TPOT, the batch empties; a backlog of preempted requests is not in the queue of new ones).
    `served_share` = arriving / (arriving + backlog). Where the drain is longer than the arrivals, all of it counts: a
    finite number of requests is one burst then. `overloaded`: `served_share` is below KEEPS_UP.
    """
    span_s = log.last_arrival_s - (log.first_arrival_s or 0.0)
    if not log.num_finished or span_s <= 0:
        return dict.fromkeys(OFFERED)
    drain_s = max(0.0, log.last_finish_s - log.last_arrival_s)
    tpot_s = log.times_s("tpot_s")
    token_s = float(np.quantile(tpot_s, FAST_TPOT)) if len(tpot_s) else 0.0
    unqueued_s = log.times_s("ttft_s") - log.times_s("queue_s") + token_s * (log.finished("output_tokens") - 1)
    own_s = float((log.finished("arrival_s") + unqueued_s).max()) - log.last_arrival_s
    newest_first = np.argsort(-log.finished("arrival_s"), kind="stable")
    waited_s = float(np.median(log.times_s("queue_s")[newest_first[: -(-log.num_finished // 10)]]))
    backlog_s = max(waited_s, drain_s - max(0.0, own_s))
    if drain_s > span_s:
        backlog_s = drain_s
    served_share = span_s / (span_s + backlog_s)
    return {
        "offered_tokens_per_s": log.output_tokens / span_s,
        "offered_prompt_tokens_per_s": log.prompt_tokens / span_s,
        "served_share": served_share,
        "drain_s": drain_s,
        "overloaded": bool(served_share < KEEPS_UP),
    }
