"""What of a policy decides its demand, resolved against a trace group; everything else is left out."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

import numpy as np
from numpy.typing import NDArray

from simulator.draft_pass import require_same_rules
from simulator.fetch_cap import default_slack_blocks, exact_share
from simulator.mapping import require_block_size
from simulator.selectors.kept import Keeping
from simulator.selectors.table import SELECTORS
from simulator.specs.policy import PolicySpec
from traces.errors import InputError, TraceError
from traces.group import TraceGroup


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """Two policies with equal settings have the same demand; choices that have no effect are at their defaults."""

    block_size_tokens: int
    selector: str
    residency: str
    """everything, or slots"""
    num_kept: int
    num_slots: int
    capacity: int
    """Blocks that may stay: K, or all slots of a cache, of which attention reads the selected."""
    predictor: str = "current"
    lookahead_k: int = 0
    """0: for the step's own attention, on demand or by the layer before's prediction."""
    lookahead_mode: str = "single"
    draft_pass: str = "dense"
    miss_rule: str = "attend"
    eviction: str = "least-recently-selected"
    fetch_cap: str = "1"
    """Exact fraction."""
    fetch_cap_scope: str = "head"
    host_blocks: int = 0
    """Blocks per KV head that host memory keeps of KV whose home is beyond it; 0: not looked at."""
    host_keeps_new: bool = False
    """Whether blocks that fill are kept there, too."""
    correction_cosine: float | None = None
    """Of miss rule correct."""
    dense_below_recall: float | None = None
    """Of miss rule dense."""
    keeping: Keeping | None = None
    """Of a selector that ranks without a query."""
    steady_start: int = 1
    steady_stop: int = 1


def blocks_per_step(group: TraceGroup, block_size_tokens: int) -> NDArray[np.int32]:
    """n = ceil(kv_len / P), int32 [S]. Raises TraceError where the KV is empty or shrinks."""
    kv_len = np.asarray(group.kv_len, dtype=np.int64)
    faulty = np.flatnonzero((kv_len < 1) | (np.diff(kv_len, prepend=kv_len[:1]) < 0))
    if len(faulty):
        at = int(faulty[0])
        raise TraceError(group.name, "kv_len", f"must be positive and never shrink, is {kv_len[at]}", (at,))
    return (-(-kv_len // block_size_tokens)).astype(np.int32)


def resolve_settings(group: TraceGroup, policy: PolicySpec) -> ReplaySettings:
    """Check a policy against a trace group and keep what replay depends on.

    Raises InputError for a block size or draft distance that was not recorded, a budget below one block or above M
    blocks, a trace too short for the lookahead, and choices that contradict each other.
    """
    block_size = policy.block_size_tokens
    require_block_size(group, block_size)
    num_steps = group.num_positions
    if policy.selector == "all":
        if policy.residency not in ("everything", "streamed"):
            raise InputError(
                f"selector 'all' reads every block: residency must be everything or streamed, is {policy.residency!r}"
            )
        num_blocks = int(blocks_per_step(group, block_size).max())
        _require_steps(num_steps, 0)
        return ReplaySettings(
            block_size, "all", "everything", num_blocks, num_blocks, num_blocks, steady_stop=num_steps
        )  # fmt: skip
    num_kept = _num_kept(group, policy)
    if policy.residency == "drop":
        # Nothing is ever fetched; what ranks lowest after a step's attention leaves room for the block that fills next.
        _require_steps(num_steps, 1)
        return ReplaySettings(
            block_size, policy.selector, "slots", num_kept, num_kept, num_kept,
            predictor="previous", lookahead_k=1, eviction="lowest-score", fetch_cap="0",
            keeping=_keeping(group, policy, num_kept), steady_stop=num_steps - 1,
        )  # fmt: skip
    if SELECTORS[policy.selector].keeps:
        raise InputError(
            f"policy.selector {policy.selector!r} ranks without the step's query: residency must be drop, "
            f"is {policy.residency!r}"
        )
    if policy.residency == "everything":
        _require_steps(num_steps, 0)
        return ReplaySettings(
            block_size, policy.selector, "everything", num_kept, num_kept, num_kept, steady_stop=num_steps
        )  # fmt: skip
    on_demand = policy.predictor == "current"
    k = 0 if policy.predictor in ("current", "previous-layer") else policy.lookahead_k
    _check_choices(policy, on_demand)
    _check_arrays(group, policy)
    if policy.predictor == "draft" and policy.draft_pass == "sparse":
        require_same_rules(group, policy)
    _require_steps(num_steps, k)
    num_slots = num_kept + _slack_blocks(policy, num_kept, max(1, k))
    # On demand a stall is what the plan does anyway.
    miss_rule = "attend" if on_demand and policy.miss_rule == "stall" else policy.miss_rule
    return ReplaySettings(
        block_size_tokens=block_size,
        selector=policy.selector,
        residency="slots",
        num_kept=num_kept,
        num_slots=num_slots,
        capacity=num_slots if policy.residency == "cache" else num_kept,
        predictor=policy.predictor,
        lookahead_k=k,
        lookahead_mode="single" if on_demand else policy.lookahead_mode,
        draft_pass=policy.draft_pass if policy.predictor == "draft" else "dense",
        miss_rule=miss_rule,
        correction_cosine=policy.correction_cosine if miss_rule == "correct" else None,
        dense_below_recall=policy.dense_below_recall if miss_rule == "dense" else None,
        eviction=policy.eviction,
        fetch_cap=str(exact_share(policy.fetch_cap)),
        fetch_cap_scope=policy.fetch_cap_scope if policy.fetch_cap < 1 else "head",
        host_blocks=(policy.host_cache_tokens or 0) // block_size if policy.host_residency == "fetched" else 0,
        steady_start=max(1, k),
        steady_stop=num_steps - k,
    )


def _keeping(group: TraceGroup, policy: PolicySpec, num_kept: int) -> Keeping | None:
    """Raises InputError for a trace without the mass that the selector sums."""
    selector, size = policy.selector, policy.block_size_tokens
    if not SELECTORS[selector].keeps:
        return None
    if selector == "sink-recent":
        return Keeping(selector, size, sink_blocks=policy.sink_blocks)
    if selector == "prompt-window":
        _require_array(group, group.prompt_window_mass(size), "prompt_window_mass", f"selector {selector}", size)
        return Keeping(selector, size)
    if not group.has_block_mass(size):
        raise InputError(
            f"policy.selector {selector!r} needs the softmax mass of every block (block_mass), which trace group "
            f"{group.name!r} does not have at {size} tokens a block"
        )
    from_prompt = selector == "accumulated-mass" and policy.mass_history == "prompt"
    if from_prompt:
        _require_array(group, group.prefill_mass(size), "prefill_mass", "mass_history prompt", size)
    recent_blocks = floor(exact_share(policy.recent_share) * num_kept)
    history_steps = policy.history_steps if selector == "persistence" else 0
    return Keeping(selector, size, recent_blocks, history_steps=history_steps, from_prompt=from_prompt)


def _check_arrays(group: TraceGroup, policy: PolicySpec) -> None:
    """Raises InputError for choices of the miss rule that need what the trace does not hold."""
    size = policy.block_size_tokens
    if policy.miss_rule == "correct":
        _require_array(group, group.query_cos(size), "query_cos", "miss_rule correct", size)
    if policy.miss_rule == "dense" and not group.has_block_mass(size):
        raise InputError(
            f"policy.miss_rule dense needs the softmax mass of every block (block_mass), which trace group "
            f"{group.name!r} does not have at {size} tokens a block"
        )


def _require_array(group: TraceGroup, array: object, name: str, choice: str, block_size_tokens: int) -> None:
    if array is None:
        raise InputError(
            f"policy.{choice} needs {name}, which trace group {group.name!r} does not have at {block_size_tokens} "
            f"tokens a block; oasis-sim record --with {name} makes it"
        )


def _num_kept(group: TraceGroup, policy: PolicySpec) -> int:
    """K = floor(budget / P), within 1 … M where a recorded ranking serves."""
    budget, block_size = policy.kv_budget_tokens, policy.block_size_tokens
    if budget is None:
        raise InputError("policy.kv_budget_tokens must be resolved before replay (default: context / 8)")
    num_kept = budget // block_size
    if num_kept < 1:
        raise InputError(
            f"policy.kv_budget_tokens {budget} is smaller than one block of {block_size} tokens "
            "(policy.block_size_tokens)"
        )
    most = group.max_ranked_blocks(block_size)
    if num_kept > most and not SELECTORS[policy.selector].keeps:
        raise InputError(
            f"policy.kv_budget_tokens {budget} needs {num_kept} ranked blocks of {block_size} tokens; trace group "
            f"{group.name!r} ranks {most}, so the budget is at most {most * block_size} tokens"
        )
    return num_kept


def _check_choices(policy: PolicySpec, on_demand: bool) -> None:
    if on_demand and policy.miss_rule == "stall" and policy.fetch_cap < 1:
        raise InputError(
            f"policy.fetch_cap {policy.fetch_cap} with predictor 'current' and miss_rule 'stall': the stall would "
            "fetch what the cap refuses; use miss_rule attend or fetch_cap 1"
        )
    if policy.lookahead_mode != "single" and (policy.predictor != "draft" or policy.lookahead_k < 2):
        raise InputError(
            f"policy.lookahead_mode {policy.lookahead_mode!r} needs predictor 'draft' and lookahead_k of at least 2, "
            f"got {policy.predictor!r} and {policy.lookahead_k}"
        )
    if policy.miss_rule == "correct" and (policy.predictor != "previous" or policy.lookahead_k != 1):
        raise InputError(
            "policy.miss_rule correct compares with the query of the step before: predictor must be previous and "
            f"lookahead_k 1, got {policy.predictor!r} and {policy.lookahead_k}"
        )
    if policy.residency == "cache" and (not on_demand or policy.miss_rule in ("correct", "dense")):
        raise InputError(
            "policy.residency cache is filled on demand: predictor must be current and miss_rule stall or attend, got "
            f"{policy.predictor!r} and {policy.miss_rule!r}"
        )
    if policy.residency == "exact" and policy.slack_blocks is not None:
        raise InputError(f"policy.slack_blocks {policy.slack_blocks} needs residency 'slack', got 'exact'")


def _slack_blocks(policy: PolicySpec, num_kept: int, k: int) -> int:
    if policy.residency == "exact":
        return 0
    if policy.residency == "cache":
        return policy.slack_blocks or num_kept
    return policy.slack_blocks or default_slack_blocks(k, policy.fetch_cap, num_kept)


def _require_steps(num_steps: int, k: int) -> None:
    """Steady rows max(1, k) … S − 1 − k must exist."""
    need = max(1, k) + k + 1
    if num_steps < need:
        raise InputError(f"lookahead_k {k} needs a trace of at least {need} steps, got {num_steps}")
