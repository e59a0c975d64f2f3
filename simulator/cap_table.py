"""Recall, hit rate and churn of a trace under fetch caps: a table by predictor, distance and cap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from simulator.demand import Demand
from simulator.mapping import Mapping
from simulator.replay import replay
from simulator.specs.policy import PolicySpec, Predictor
from traces.group import TraceGroup
from traces.schema import draft_distance

FETCH_CAPS = (0.02, 0.05, 0.1, 0.2, 1.0)
RESIDENCY = "slack"
"""Of every row, so that predictors differ in what they predict only (the residency of system oasiskv)."""


def cap_rows(
    group: TraceGroup,
    block_size_tokens: int,
    budget_tokens: int,
    max_distance: int = 4,
    fetch_caps: Sequence[float] = FETCH_CAPS,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """A row per predictor, distance and cap; means over steady rows, recorded layers and KV heads.

    Predictors: current (on demand, distance 0), previous and draft at 1 … `max_distance`, oracle and random at 1. Where
    drafts were also recorded over a policy's working set: draft and draft_sparse under that policy (`rules` says
    which) besides. hit_rate: of the true set, before any fetch of its own step; churn: fetched / K per step.
    Columns are as `simulator.metrics` names them. Raises InputError for a budget that is not ranked.
    """
    size = block_size_tokens
    recorded = {draft_distance(name) for name in group.rankings(size)} - {0}
    farthest = min(max_distance, (group.num_positions - 1) // 2)
    cases: list[tuple[Predictor, int]] = [("current", 1), ("oracle", 1)]
    cases += [("previous", k) for k in range(1, farthest + 1)]
    cases += [("draft", k) for k in range(1, farthest + 1) if k in recorded]
    cases += [("random", 1)]
    mapping = _as_recorded(group, size)
    for predictor, k in cases:
        for cap in fetch_caps:
            policy = PolicySpec(
                predictor=predictor,
                lookahead_k=k,
                residency=RESIDENCY,
                kv_budget_tokens=budget_tokens,
                block_size_tokens=size,
                fetch_cap=cap,
            )
            distance = 0 if predictor == "current" else k
            demand = replay(group, policy, mapping, seed, use_cache=False)
            yield {"predictor": predictor, "distance": distance, "fetch_cap": cap, "rules": "table", **_means(demand)}
    rules = group.sparse_policy
    if rules is None or rules["block_size_tokens"] != size:
        return
    for draft_pass in ("dense", "sparse"):
        policy = PolicySpec.model_validate({**rules, "predictor": "draft", "draft_pass": draft_pass})
        name = "draft" if draft_pass == "dense" else "draft_sparse"
        demand = replay(group, policy, mapping, seed, use_cache=False)
        yield {
            "predictor": name,
            "distance": policy.lookahead_k,
            "fetch_cap": policy.fetch_cap,
            "rules": "recorded",
            **_means(demand),
        }


def least_steps(group: TraceGroup) -> int:
    """Steps without which `cap_rows` has no steady row at distance 1, or at that of the recorded rules."""
    ahead = 1 if group.sparse_policy is None else int(group.sparse_policy["lookahead_k"])
    return 2 * max(1, ahead) + 1


def _as_recorded(group: TraceGroup, block_size_tokens: int) -> Mapping:
    """Each recorded layer and KV head once."""
    layers = np.arange(len(group.layers(block_size_tokens)), dtype=np.int32)
    return Mapping("recorded", layers, np.arange(group.num_kv_heads, dtype=np.int32), "each recorded layer and head")


def _means(demand: Demand) -> dict[str, float]:
    return {
        "hit_rate": demand.hit_rate(),
        "overlap": demand.mean_overlap(),
        "recall": demand.mean_recall(),
        "recall_upper": demand.mean_recall_upper(),
        "churn": demand.churn(),
    }
