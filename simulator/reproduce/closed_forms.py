"""Published ratios of bytes that need no timeline: functions of geometry, context and policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from simulator.specs.model import ModelSpec
from simulator.specs.policy import KV_BYTES_PER_ELEMENT, PolicySpec


@dataclass(frozen=True, slots=True)
class Setting:
    """What a closed form is a function of."""

    model: ModelSpec
    policy: PolicySpec
    """With a budget in numbers."""
    context_tokens: int


def full_over_admission(setting: Setting) -> float:
    """Bytes of the whole KV, divided by those that admit a request: first working set, compressed keys, draft KV.

    The draft head keeps one layer's KV of the whole context.
    """
    model, policy, context_tokens = setting.model, setting.policy, setting.context_tokens
    assert policy.kv_budget_tokens is not None
    size, element = policy.block_size_tokens, KV_BYTES_PER_ELEMENT[policy.kv_dtype]
    num_blocks = -(-context_tokens // size)
    working_set = model.working_set_bytes(min(policy.kv_budget_tokens // size + 1, num_blocks), size, element)
    keys = model.metadata_bytes(num_blocks, policy.metadata_vectors_per_block, policy.metadata_bytes_per_element)
    draft_kv = context_tokens * model.kv_bytes_per_token_per_layer(2)
    return model.kv_bytes(context_tokens, element) / (working_set + keys + draft_kv)


CLOSED_FORMS: Mapping[str, Callable[[Setting], float]] = MappingProxyType({"full_over_admission": full_over_admission})
