"""Published ratios of bytes that need no timeline: functions of geometry, context, policy and trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from simulator.fetch_cap import allowed_blocks, exact_share
from simulator.replay_settings import blocks_per_step
from simulator.residency import Residency
from simulator.specs.model import ModelSpec
from simulator.specs.policy import KV_BYTES_PER_ELEMENT, PolicySpec
from traces.group import TraceGroup


@dataclass(frozen=True, slots=True)
class Setting:
    """What a closed form is a function of; the trace is opened only by those that replay it."""

    model: ModelSpec
    policy: PolicySpec
    """With a budget in numbers."""
    context_tokens: int
    trace: Callable[[], TraceGroup]


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


def full_over_held(setting: Setting) -> float:
    """Blocks of the whole KV after the trace's last step, divided by those that the decode side has come to hold.

    It holds what admission and prefetches (one draft token, capped) brought, and what decode wrote; nothing is dropped.
    """
    group, policy = setting.trace(), setting.policy
    assert policy.kv_budget_tokens is not None
    size = policy.block_size_tokens
    num_kept = policy.kv_budget_tokens // size
    num_blocks = blocks_per_step(group, size).astype(int).tolist()
    true, draft = group.ranking("true", size), group.ranking("draft1", size)
    allowed = allowed_blocks(exact_share(policy.fetch_cap), num_kept, len(num_blocks)).tolist()
    written = num_blocks[-1] - num_blocks[0]
    held = []
    for layer in range(true.shape[1]):
        for head in range(true.shape[2]):
            residency = Residency(1, num_kept, num_kept + (policy.slack_blocks or 0), num_blocks[-1])
            residency.admit(true[0, layer, head][None], num_blocks[0])
            brought = set(true[0, layer, head, :num_kept].tolist())
            for step in range(len(num_blocks) - 1):
                if step:
                    residency.begin(num_blocks[step])
                room = num_blocks[step + 1] - num_blocks[step]
                (plan,), _ = residency.plan(draft[step + 1, layer, head][None], step + 1, allowed[step], room)
                brought.update(plan.fetch_ids.tolist())
            held.append(sum(0 <= block < num_blocks[0] for block in brought) + written)
    return float(num_blocks[-1] / np.mean(held))


CLOSED_FORMS: Mapping[str, Callable[[Setting], float]] = MappingProxyType(
    {"full_over_admission": full_over_admission, "full_over_held": full_over_held}
)
