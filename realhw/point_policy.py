"""A decode run as the simulator's policy."""

from __future__ import annotations

from typing import Any

from realhw.decode_point import Point
from simulator.policy_composition import resolve_policy
from simulator.specs.policy import PolicySpec


def policy_of(point: Point) -> PolicySpec:
    """The policy of the point's system with the point's own figures."""
    own: dict[str, Any] = {
        "kv_budget_tokens": point.num_kept * point.block_size_tokens, "block_size_tokens": point.block_size_tokens,
        "gather_ctas": point.gather_ctas, "fetch_cap": point.fetch_cap, "lookahead_k": point.lookahead_k,
        "transport": point.transport,
    }  # fmt: skip
    return resolve_policy(point.system, own, point.context_tokens)
