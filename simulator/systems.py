"""The named systems: one table of policy choices.

A new system whose choices exist already is one row of `SYSTEMS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from simulator.specs.serving import ServingSpec
from simulator.specs.validation import unknown_name, validated
from traces.errors import InputError


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
