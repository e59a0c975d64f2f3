"""Drafts that ran over a policy's working set: the rules they were recorded under, which alone may replay them."""

from __future__ import annotations

from simulator.fetch_cap import default_slack_blocks
from simulator.specs.policy import PolicySpec
from traces.errors import InputError
from traces.group import TraceGroup

RULES = (
    "selector", "residency", "eviction", "miss_rule", "kv_budget_tokens", "block_size_tokens", "fetch_cap",
    "fetch_cap_scope", "lookahead_k", "lookahead_mode", "slack_blocks",
)  # fmt: skip
"""Keys of a policy that decide what its drafts attend to."""


def residency_rules(policy: PolicySpec) -> dict[str, int | float | str]:
    """`RULES` of a policy, slack in blocks. Raises InputError where the budget is open."""
    if policy.kv_budget_tokens is None:
        raise InputError("policy.kv_budget_tokens must be given: drafts over a working set depend on it")
    values = {name: getattr(policy, name) for name in RULES}
    kept = policy.kv_budget_tokens // policy.block_size_tokens
    if policy.residency != "slack":
        values["slack_blocks"] = 0
    elif policy.slack_blocks is None:
        values["slack_blocks"] = default_slack_blocks(policy.lookahead_k, policy.fetch_cap, kept)
    return values


def require_same_rules(group: TraceGroup, policy: PolicySpec) -> None:
    """Raises InputError where the group has no such drafts, or was recorded under other rules than the policy's."""
    recorded = group.sparse_policy
    if recorded is None:
        raise InputError(
            f"policy.draft_pass sparse: trace group {group.name!r} has no drafts over a working set; "
            "oasis-sim record --sparse-policy makes them"
        )
    for name, value in residency_rules(policy).items():
        if recorded.get(name) != value:
            raise InputError(
                f"policy.draft_pass sparse: the drafts of trace group {group.name!r} were recorded under "
                f"policy.{name} {recorded.get(name)!r}, not {value!r}"
            )
