"""Figures of a policy that the model or the context bounds."""

from __future__ import annotations

from simulator.specs.model import ModelSpec
from simulator.specs.policy import PolicySpec
from traces.errors import InputError


def require_rank(policy: PolicySpec, model: ModelSpec) -> None:
    """Raises InputError for a `key_rank` above that of the keys themselves, num_kv_heads · head_dim."""
    largest = model.num_kv_heads * model.head_dim
    if policy.key_rank is not None and policy.key_rank > largest:
        raise InputError(
            f"policy.key_rank {policy.key_rank}: keys of {model.name} have {largest} dimensions in a layer "
            f"({model.num_kv_heads} KV heads of {model.head_dim}), so at most that"
        )


def require_sinks(policy: PolicySpec) -> None:
    """Raises InputError where sinks, in whole blocks, are more than the budget; `policy` is resolved."""
    budget = policy.kv_budget_tokens
    if policy.selector == "sink-recent" and budget is not None and policy.sink_tokens > budget:
        raise InputError(
            f"policy.sink_tokens {policy.sink_tokens} exceeds the budget of {budget} tokens, so at most that"
        )


def require_slots(policy: PolicySpec, kv_len: int) -> None:
    """Raises InputError for more slots beyond K than the longest KV, `kv_len` tokens, has blocks."""
    blocks = -(-kv_len // policy.block_size_tokens)
    if policy.slack_blocks is not None and policy.slack_blocks > blocks:
        raise InputError(
            f"policy.slack_blocks {policy.slack_blocks}: {kv_len} tokens have {blocks} blocks of "
            f"{policy.block_size_tokens}, so at most that"
        )
