"""The named systems: one table of policy choices, and what a policy makes meaningless or impossible.

A new system whose choices exist already is one row of `SYSTEMS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from simulator.cost import drafts
from simulator.fetch_cap import default_slack_blocks
from simulator.selectors.table import SELECTORS
from simulator.specs.experiment import IN_HOST_MEMORY, PlacementSpec
from simulator.specs.policy import PolicySpec
from simulator.specs.serving import ServingSpec
from simulator.specs.validation import unknown_name, validated
from traces.errors import InputError

BUDGET_SHARE = 8
"""Default KV budget: context / 8, an assumption; every output prints the budget."""
HOST_CACHE_SHARE = 2
"""Default host cache of fetched blocks: context / 2."""


@dataclass(frozen=True, slots=True)
class System:
    """Choices that differ from the defaults of PolicySpec and ServingSpec, and whose system they are."""

    description: str
    citation: str
    policy: Mapping[str, Any] = field(default_factory=dict)
    serving: Mapping[str, Any] = field(default_factory=dict)
    """A system that has any is one of serving runs."""


_DENSE = {"selector": "all", "predictor": "current", "residency": "everything"}
SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        "dense": System(
            "every token attended, the whole KV in HBM",
            "vLLM PagedAttention, arXiv 2309.06180",
            _DENSE,
        ),
        "vllm-offload": System(
            "dense with the KV in paged blocks on the host, all of it streamed in layer by layer in every step",
            "vLLM PagedAttention, arXiv 2309.06180, with its KV on the host",
            {"selector": "all", "predictor": "current", "residency": "streamed", "transport": "ce-batched"},
        ),
        "flexgen": System(
            "dense with the KV on the host, all of it streamed in every step, one contiguous copy a layer",
            "FlexGen, arXiv 2303.06865",
            {"selector": "all", "predictor": "current", "residency": "streamed", "transport": "ce-contiguous"},
        ),
        "quest": System(
            "the whole KV in HBM, attention reads the blocks that min/max scores select",
            "Quest, arXiv 2406.10774",
            {"predictor": "current", "residency": "everything"},
        ),
        "retrieval": System(
            "selected blocks that are not in HBM are fetched from the host before attention, on demand",
            "on-demand retrieval, the baseline of OasisKV, arXiv 2608.08097",
            {"predictor": "current"},
        ),
        "prefetch-previous": System(
            "blocks selected by the previous step's query are prefetched for the next",
            "the previous-token baseline of OasisKV, arXiv 2608.08097",
            {"predictor": "previous"},
        ),
        "oasiskv": System(
            "blocks that a draft token's query selects are prefetched for the step that will need them",
            "OasisKV, arXiv 2608.08097",
            {"predictor": "draft", "residency": "slack", "fetch_cap": 0.05},
        ),
        "oasiskv-oracle": System(
            "oasiskv with every draft token right: the bound on what better drafts can give",
            "OasisKV, arXiv 2608.08097, with a perfect predictor",
            {"predictor": "oracle", "residency": "slack", "fetch_cap": 0.05},
        ),
        "h2o": System(
            "half of the budget: the newest blocks; half: those with the most attention mass so far; the rest is gone",
            "H2O, arXiv 2306.14048",
            {"selector": "accumulated-mass", "predictor": "current", "residency": "drop"},
        ),
        "scissorhands": System(
            "the blocks that were important in most steps of a history stay, the others are gone",
            "Scissorhands, arXiv 2305.17118",
            {"selector": "persistence", "recent_share": 0.0, "predictor": "current", "residency": "drop"},
        ),
        "snapkv": System(
            "the prompt blocks that its last queries attended to, and what was generated since; the rest is gone",
            "SnapKV, arXiv 2404.14469",
            {"selector": "prompt-window", "predictor": "current", "residency": "drop"},
        ),
        "streamingllm": System(
            "the first tokens and the newest, nothing between",
            "StreamingLLM, arXiv 2309.17453",
            {"selector": "sink-recent", "predictor": "current", "residency": "drop"},
        ),
        "arkvale": System(
            "evicted pages are recalled where their keys' bounding volume scores high; HBM caches more than is read",
            "ArkVale, NeurIPS 2024",
            {"predictor": "current", "residency": "cache", "eviction": "lowest-score", "transport": "ce-per-block"},
        ),
        "sparseserve": System(
            "HBM as a cache of blocks, least recently selected out first; misses are read from the host by the GPU",
            "SparseServe, arXiv 2509.24626",
            {"predictor": "current", "residency": "cache", "transport": "gather"},
        ),
        "hisparse": System(
            "sparseserve's cache, with every new token backed up to the host at once",
            "HiSparse of SGLang, lmsys.org/blog/2026-04-10-sglang-hisparse",
            {"predictor": "current", "residency": "cache", "transport": "gather", "write_back": "token"},
        ),
        "infinigen": System(
            "what the layer before predicts is fetched while that layer computes",
            "InfiniGen, arXiv 2406.19707",
            {"predictor": "previous-layer", "transport": "ce-contiguous", "metadata_vectors_per_block": 5},
        ),
        "shadowkv": System(
            "low-rank keys stay in HBM, mean keys select, only values are fetched, on demand",
            "ShadowKV, arXiv 2410.21465",
            {"selector": "mean", "metadata_vectors_per_block": 1, "predictor": "current", "key_rank": 160},
        ),
        "freekv": System(
            "the previous step's selection is prefetched, and corrected for heads whose query has moved",
            "FreeKV, arXiv 2505.13109",
            {"predictor": "previous", "miss_rule": "correct", "transport": "ce-batched"},
        ),
        "specache": System(
            "a draft row over a low-bit copy of the KV in HBM says what to prefetch for the next step",
            "SpeCache, arXiv 2503.16163",
            {"predictor": "draft", "draft_head": "self", "metadata_vectors_per_block": 4},
        ),
        "radix": System(
            "dense; KV of prompts stays in the HBM that running requests leave free, least recently used out first",
            "SGLang RadixAttention, arXiv 2312.07104",
            _DENSE,
            {"prefix_cache": "gpu"},
        ),
        "distserve": System(
            "dense; prompts are prefilled on other GPUs, all of their KV crosses the network before they decode",
            "DistServe, arXiv 2401.09670",
            _DENSE,
            {"disaggregation": "full-push"},
        ),
        "mooncake": System(
            "dense; prompts are prefilled elsewhere with a prefix cache in host memory, their KV is pushed as computed",
            "Mooncake, arXiv 2407.00079",
            _DENSE,
            {"disaggregation": "layer-push", "prefix_cache": "host"},
        ),
    }
)

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


def get_system(name: str) -> System:
    """Raises InputError with the nearest names for one that does not exist; case does not matter."""
    system = SYSTEMS.get(name.casefold())
    if system is None:
        raise unknown_name("system", name, SYSTEMS)
    return system


def serving_of(system: str, serving: ServingSpec | None) -> ServingSpec | None:
    """`serving` with the system's own keys where none is given. Raises InputError: a system of serving runs without
    requests to serve, and keys that do not go together."""
    own = get_system(system).serving
    if not own:
        return serving
    if serving is None:
        raise InputError(
            f"serving: {system} is a system of serving runs: say what it serves, e.g. serving.requests=FILE or "
            "serving.rate_per_s"
        )
    return validated(ServingSpec, {**own, **serving.model_dump(exclude_unset=True)}, f"system {system}", "serving")


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
