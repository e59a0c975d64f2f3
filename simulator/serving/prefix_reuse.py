"""Prefix cache of one replica: KV of prompts that were prefilled, in the memory that running requests leave free."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.prefix_cache import PrefixCache, Tier, reused_tokens
from simulator.serving.pools import Pools
from simulator.serving.request_state import RequestState
from simulator.specs.model import ModelSpec
from simulator.specs.policy import KV_BYTES_PER_ELEMENT, PolicySpec
from simulator.specs.serving import ServingSpec


@dataclass(slots=True)
class PrefixTally:
    num_blocks: int = 0
    """Of all prompts that started."""
    hit_blocks: int = 0
    host_hit_blocks: int = 0
    """Part of `hit_blocks` that had to cross the host link."""
    reused_tokens: int = 0
    """Prompt tokens whose prefill was skipped."""
    loaded_bytes: int = 0
    """H2D, per GPU."""


class PrefixReuse:
    """Looks a prompt up when it starts and keeps its blocks once they are prefilled.

    Tiers take what the pools have free, block by block, and shrink as requests take more; a block that a running
    request uses counts in its request and in the cache (engines that share it hold it once: they have more room).
    Full KV is loaded for a hit, whatever the policy keeps later: the rest of the prompt attends to all of it.
    """

    def __init__(
        self, serving: ServingSpec, model: ModelSpec, policy: PolicySpec, pools: Pools, block_tokens: int,
        host_has_copy: bool,
    ) -> None:  # fmt: skip
        """`host_has_copy`: running requests keep their full KV in host memory."""
        names = serving.prefix_cache.split("+")
        self.serving, self.pools, self.block_tokens = serving, pools, block_tokens
        self.block_bytes = model.kv_bytes_per_token(KV_BYTES_PER_ELEMENT[policy.kv_dtype]) * block_tokens
        self.names, self.host_has_copy = names, host_has_copy
        self.cache = PrefixCache([Tier(name, 0) for name in names])
        self.tally = PrefixTally()

    def start(self, request: RequestState) -> int:
        """Finds what of a prompt is there: the request's `prefilled_tokens`. Returns bytes to load before it runs."""
        self._resize()
        hit = self.cache.lookup(request.prefix)
        request.prefilled_tokens = reused_tokens(hit.hit_blocks, request.prompt_tokens, self.block_tokens)
        from_host = hit.tier_blocks[self.names.index("host")] if "host" in self.names else 0
        self.tally.num_blocks += hit.num_blocks
        self.tally.hit_blocks += hit.hit_blocks
        self.tally.host_hit_blocks += from_host
        self.tally.reused_tokens += request.prefilled_tokens
        self.tally.loaded_bytes += from_host * self.block_bytes
        return from_host * self.block_bytes

    def keep(self, request: RequestState) -> int:
        """Keeps a prompt that was prefilled. Returns bytes to store in the host tier."""
        self._resize()
        moves = self.cache.touch(request.prefix)
        if self.host_has_copy or "host" not in self.names:
            return 0
        moved = moves.inserted_blocks if self.names[0] == "host" else moves.demoted_blocks[0]
        return moved * self.block_bytes

    def _resize(self) -> None:
        free = {
            "gpu": self.pools.hbm_bytes - self.pools.hbm_used_bytes,
            "host": self.pools.host_bytes - self.pools.host_used_bytes,
        }
        limits = {"gpu": self.serving.prefix_gpu_tokens, "host": self.serving.prefix_host_tokens}
        for name in self.names:
            blocks, limit = free[name] // self.block_bytes, limits[name]
            self.cache.resize(name, blocks if limit is None else min(blocks, limit // self.block_tokens))
