"""Which parameters a policy makes meaningless: null in its rows, no point of their own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from simulator.cost import drafts
from simulator.selectors.table import SELECTORS
from simulator.specs.experiment import IN_HOST_MEMORY, PlacementSpec
from simulator.specs.policy import PolicySpec

_MOVES = (
    "policy.slack_blocks",
    "policy.eviction",
    "policy.transport",
    "policy.gather_ctas",
    "policy.miss_rule",
    "policy.fetch_cap",
    "policy.fetch_cap_scope",
    "policy.lookahead_k",
    "policy.lookahead_mode",
    "policy.draft_pass",
    "policy.write_back",
    "policy.draft_head",
    "policy.key_rank",
    "placement.host_numa",
    "placement.kv_tier",
)
"""Matter only where blocks cross the host link."""
_REMOTE = ("placement.remote_path", "placement.nic_numa", "policy.host_residency", "policy.host_cache_tokens")
"""Matter only where blocks come from beyond the host."""
_STAGED = ("policy.transport", "policy.gather_ctas", "placement.host_numa")
"""Matter only where blocks pass through host memory."""
_STREAMS = (
    "policy.block_size_tokens",
    "policy.transport",
    "policy.gather_ctas",
    "policy.write_back",
    "placement.host_numa",
    "placement.kv_tier",
)
"""What matters of both lists where the whole KV is streamed."""
_SELECTS = (
    "policy.kv_budget_tokens",
    "policy.block_size_tokens",
    "policy.metadata_vectors_per_block",
    "policy.metadata_bytes_per_element",
    "mapping.rule",
    "mapping.layers",
)
"""Matter only where blocks are selected."""
_METADATA = ("policy.metadata_vectors_per_block", "policy.metadata_bytes_per_element")
_ONLY_WITH: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "policy.recent_share": ("accumulated-mass", "persistence"),
        "policy.history_steps": ("persistence",),
        "policy.sink_tokens": ("sink-recent",),
        "policy.mass_history": ("accumulated-mass",),
        "policy.correction_cosine": ("correct",),
        "policy.dense_below_recall": ("dense",),
    }
)
"""Keys of single selectors and miss rules."""


def ignored_parameters(policy: PolicySpec, placement: PlacementSpec = IN_HOST_MEMORY) -> frozenset[str]:
    """Dotted parameters that cannot change a result under this policy and placement: null in its rows, no point of
    their own."""
    ignored: set[str] = set()
    if not policy.offloads:
        ignored.update(_MOVES)
    if not policy.offloads or placement.kv_tier == "host":
        ignored.update(_REMOTE)
    else:
        if placement.kv_tier == "nvme":
            ignored.add("placement.nic_numa")
        if policy.host_residency == "full":
            ignored.update(("placement.remote_path", "placement.nic_numa"))
        elif placement.remote_path == "direct":
            ignored.update(_STAGED)
        if policy.host_residency != "fetched":
            ignored.add("policy.host_cache_tokens")
    if policy.residency == "streamed":
        ignored.update(set(_MOVES) - set(_STREAMS))
    if policy.selector == "all":
        ignored.update(set(_SELECTS) - (set(_STREAMS) if policy.residency == "streamed" else set()))
    elif SELECTORS[policy.selector].reads != "keys":
        ignored.update(_METADATA)
    chosen = {policy.selector, policy.miss_rule if policy.offloads else None}
    ignored.update(key for key, choices in _ONLY_WITH.items() if not chosen & {*choices})
    if policy.predictor in ("current", "previous-layer"):
        ignored.update(("policy.lookahead_k", "policy.lookahead_mode"))
    if policy.predictor == "current" and policy.fetch_cap == 1.0 and policy.miss_rule in ("stall", "attend"):
        ignored.add("policy.miss_rule")
    if policy.predictor != "draft":
        ignored.add("policy.draft_pass")
    if policy.residency not in ("slack", "cache"):
        ignored.add("policy.slack_blocks")
    if policy.fetch_cap == 1.0:
        ignored.add("policy.fetch_cap_scope")
    if policy.transport != "gather":
        ignored.add("policy.gather_ctas")
    if policy.verify_drafts:
        ignored -= {"policy.lookahead_k", "policy.draft_head"}
    elif not drafts(policy):
        ignored.add("policy.draft_head")
    return frozenset(ignored)
