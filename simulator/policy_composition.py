"""A system's policy with what the user overrides: composed, made numbers, refused where choices contradict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulator.fetch_cap import default_slack_blocks
from simulator.ignored_parameters import ignored_parameters
from simulator.selectors.table import SELECTORS
from simulator.specs.experiment import IN_HOST_MEMORY, PlacementSpec
from simulator.specs.policy import PolicySpec
from simulator.specs.validation import validated
from simulator.systems import get_system
from traces.errors import InputError

BUDGET_SHARE = 8
"""Default KV budget: context / 8, an assumption; every output prints the budget."""
HOST_CACHE_SHARE = 2
"""Default host cache of fetched blocks: context / 2."""


def compose_policy(system: str, overrides: Mapping[str, Any], placement: PlacementSpec = IN_HOST_MEMORY) -> PolicySpec:
    """The system's policy with overrides, ignored keys at their defaults, budget and derived slack still open.

    Two policies that act alike are equal. Raises InputError: unknown system or key, bad value, or choices that do
    not go together.
    """
    choices = {**get_system(system).policy, **overrides}
    policy = validated(PolicySpec, choices, key_prefix="policy")
    # A system at rest ignores what it was given; only what remains can conflict.
    defaults = {
        key.removeprefix("policy."): PolicySpec.model_fields[key.removeprefix("policy.")].default
        for key in ignored_parameters(policy, placement)
        if key.startswith("policy.") and not (key == "policy.slack_blocks" and policy.offloads)
    }
    policy = policy.model_copy(update=defaults)
    _require_coherent(policy, system)
    if policy.residency == "streamed" and placement.kv_tier != "host":
        raise InputError(
            f"placement.kv_tier: the KV is streamed from host memory only, not {placement.kv_tier} (system {system})"
        )
    if policy.miss_rule == "dense" and policy.host_residency == "fetched":
        raise InputError(
            f"policy.miss_rule: dense reads past the host's cache; use host_residency full or none (system {system})"
        )
    if policy.host_residency == "fetched" and placement.remote_path == "direct":
        raise InputError(
            "policy.host_residency: fetched keeps what passes through host memory, so placement.remote_path must be "
            f"staged, not direct (system {system})"
        )
    return policy


def resolve_policy(
    system: str, overrides: Mapping[str, Any], context_tokens: int, placement: PlacementSpec = IN_HOST_MEMORY
) -> PolicySpec:
    """`compose_policy` with numbers: the budget (default context / 8 in whole blocks) and the slots beyond K: with
    residency slack those for everything in flight, ceil(k c K), with cache another K. Where everything is attended the
    budget stays null.

    Raises InputError as `compose_policy`, and for a budget that is no positive multiple of the block size.
    """
    policy = compose_policy(system, overrides, placement)
    if policy.selector == "all":
        return policy
    size = policy.block_size_tokens
    budget = policy.kv_budget_tokens
    if budget is None:
        budget = context_tokens // BUDGET_SHARE // size * size
        if budget == 0:
            raise InputError(
                f"policy.kv_budget_tokens: the default, {context_tokens} context tokens / {BUDGET_SHARE}, is smaller "
                f"than one block of {size} tokens"
            )
    elif budget < size:
        raise InputError(f"policy.kv_budget_tokens: {budget} is smaller than one block of {size} tokens")
    elif budget % size:
        below = budget // size * size
        raise InputError(
            f"policy.kv_budget_tokens: {budget} is no multiple of the block size {size}; "
            f"nearest are {below} and {below + size}"
        )
    slack = policy.slack_blocks
    if policy.residency == "slack" and slack is None:
        slack = max(1, default_slack_blocks(policy.plan_distance, policy.fetch_cap, budget // size))
    if policy.residency == "cache" and slack is None:
        slack = budget // size
    cache = policy.host_cache_tokens
    if policy.host_residency == "fetched":
        cache = cache or max(1, context_tokens // HOST_CACHE_SHARE // size) * size
        if cache % size:
            nearest = f"{cache // size * size} and {cache // size * size + size}" if cache > size else str(size)
            raise InputError(
                f"policy.host_cache_tokens: {cache} is no multiple of the block size {size}; nearest: {nearest}"
            )
    return policy.model_copy(update={"kv_budget_tokens": budget, "slack_blocks": slack, "host_cache_tokens": cache})


def _require_coherent(policy: PolicySpec, system: str) -> None:
    """Raises InputError for choices that contradict each other."""

    def refuse(key: str, problem: str) -> InputError:
        return InputError(f"policy.{key}: {problem} (system {system})")

    if policy.selector == "all" and policy.residency not in ("everything", "streamed"):
        raise refuse("residency", "selector all reads every block, so residency must be everything or streamed")
    if policy.residency == "streamed" and policy.selector != "all":
        raise refuse("residency", f"streamed brings every block, so the selector must be all, not {policy.selector}")
    if policy.selector != "all" and SELECTORS[policy.selector].keeps and policy.residency != "drop":
        raise refuse("residency", f"selector {policy.selector} ranks without the step's query, so it must be drop")
    if (not policy.offloads or policy.residency == "streamed") and policy.predictor != "current":
        raise refuse("predictor", f"residency {policy.residency} predicts nothing, so the predictor must be current")
    if policy.predictor in ("current", "previous-layer") and policy.residency == "slack":
        raise refuse(
            "residency",
            f"slack holds arrivals ahead of their step; predictor {policy.predictor} has none, use exact or cache",
        )
    if policy.residency == "cache" and (policy.predictor != "current" or policy.miss_rule in ("correct", "dense")):
        raise refuse(
            "residency",
            f"a cache is filled on demand, with miss_rule stall or attend, not {policy.predictor} and "
            f"{policy.miss_rule}",
        )
    if policy.miss_rule == "correct" and (policy.predictor != "previous" or policy.lookahead_k != 1):
        raise refuse(
            "miss_rule",
            "correct compares with the query of the step before, so predictor must be previous and lookahead_k 1, got "
            f"{policy.predictor} and {policy.lookahead_k}",
        )
    if policy.slack_blocks is not None and policy.residency not in ("slack", "cache"):
        raise refuse("slack_blocks", f"needs residency slack or cache, not {policy.residency}")
    if policy.verify_drafts and (
        policy.residency in ("cache", "drop") or policy.predictor == "previous-layer" or policy.miss_rule == "dense"
    ):
        raise refuse(
            "verify_drafts",
            "is not modelled with residency cache or drop, predictor previous-layer or miss_rule dense",
        )
    if policy.predictor == "current" and policy.miss_rule == "stall" and policy.fetch_cap < 1.0:
        raise refuse("fetch_cap", "on demand, miss rule stall fetches what the cap would hold back; use 1 or attend")
    if policy.verify_drafts and policy.selector in SELECTORS and SELECTORS[policy.selector].reads == "attention":
        raise refuse("verify_drafts", f"selector {policy.selector} counts attention by position, not by iteration")
    if policy.verify_drafts and policy.lookahead_mode != "single":
        raise refuse("lookahead_mode", f"{policy.lookahead_mode} plans by position, verified drafts by iteration")
    if policy.lookahead_mode != "single" and (policy.predictor != "draft" or policy.lookahead_k < 2):
        raise refuse(
            "lookahead_mode",
            f"{policy.lookahead_mode} needs predictor draft and lookahead_k of at least 2, "
            f"got {policy.predictor} and {policy.lookahead_k}",
        )
