"""How much of a workload's prefill a prefix cache saves, against its size: `python -m simulator.prefix_reuse FILE`.

Time-free: requests go through the cache in arrival order, each looked up before its own blocks are touched, as if it
finished before the next arrives.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from simulator.prefix_cache import PrefixCache, Tier, TouchOrder, reused_tokens
from traces.errors import InputError, OasisError
from traces.importers.formats import load_workload
from traces.workload import Workload

CAPACITIES_BLOCKS = (1_000, 5_000, 10_000, 30_000, 50_000, 100_000)


@dataclass(frozen=True, slots=True)
class PrefixReuse:
    """Totals over a workload; `tier_hit_blocks` has one entry per tier, `demoted_blocks` one fewer."""

    num_blocks: int
    tier_hit_blocks: tuple[int, ...]
    inserted_blocks: int
    demoted_blocks: tuple[int, ...]
    evicted_blocks: int
    prompt_tokens: int
    reused_tokens: int
    num_requests: int
    num_reusing_requests: int
    """Requests that hit more than their first block, which nearly all of a chat service share (the system prompt)."""

    @property
    def hit_share(self) -> float:
        """Blocks that a leading prefix covers / all prompt blocks."""
        return sum(self.tier_hit_blocks) / self.num_blocks

    @property
    def reused_token_share(self) -> float:
        """Prompt tokens whose prefill is skipped / all prompt tokens."""
        return self.reused_tokens / self.prompt_tokens


def replay_prefixes(workload: Workload, tiers: Sequence[Tier], touch_order: TouchOrder = "reverse") -> PrefixReuse:
    """Plays a workload through an empty cache. Raises InputError when the workload has no prefix blocks."""
    if workload.hash_ids is None or workload.hash_block_tokens is None:
        raise InputError(f"{workload.name}: has no hash_ids, so nothing is known about shared prefixes")
    cache = PrefixCache(tiers, touch_order)
    tier_hits, demoted = [0] * len(tiers), [0] * (len(tiers) - 1)
    inserted = evicted = tokens = reusing = 0
    for index, prompt_tokens in enumerate(workload.prompt_tokens.tolist()):
        block_ids = workload.prefix_blocks(index).tolist()
        hit = cache.lookup(block_ids)
        moves = cache.touch(block_ids)
        tier_hits = [total + more for total, more in zip(tier_hits, hit.tier_blocks, strict=True)]
        demoted = [total + more for total, more in zip(demoted, moves.demoted_blocks, strict=True)]
        reusing += hit.hit_blocks > 1
        inserted += moves.inserted_blocks
        evicted += moves.evicted_blocks
        tokens += reused_tokens(hit.hit_blocks, prompt_tokens, workload.hash_block_tokens)
    return PrefixReuse(
        num_blocks=len(workload.hash_ids),
        tier_hit_blocks=tuple(tier_hits),
        inserted_blocks=inserted,
        demoted_blocks=tuple(demoted),
        evicted_blocks=evicted,
        prompt_tokens=int(workload.prompt_tokens.sum()),
        reused_tokens=tokens,
        num_requests=workload.num_requests,
        num_reusing_requests=reusing,
    )


def block_reuse(workload: Workload) -> float:
    """Share of prompt blocks that some earlier request had: what an unlimited cache hits."""
    reuse = replay_prefixes(workload, [Tier("unlimited", None)])
    return (reuse.num_blocks - reuse.inserted_blocks) / reuse.num_blocks


def reuse_table(
    workload: Workload, capacities_blocks: Sequence[int], host_blocks: int = 0, touch_order: TouchOrder = "reverse"
) -> list[str]:
    """Lines of a Markdown table: hit and reused-token share for each GPU capacity, and with no limit."""
    lines = [
        (
            "| GPU blocks | host blocks | hit on GPU % | hit on host % | hit % | prompt tokens reused % "
            "| requests with > 1 block hit % |"
        ),
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for capacity in (*capacities_blocks, None):
        tiers = [Tier("gpu", capacity)]
        if capacity is not None and host_blocks:
            tiers.append(Tier("host", host_blocks))
        reuse = replay_prefixes(workload, tiers, touch_order)
        gpu_percent, host_percent, *_ = (*(100 * hits / reuse.num_blocks for hits in reuse.tier_hit_blocks), 0.0)
        lines.append(
            f"| {'unlimited' if capacity is None else f'{capacity:,}'} | {host_blocks if len(tiers) > 1 else 0:,} "
            f"| {gpu_percent:.1f} | {host_percent:.1f} | {100 * reuse.hit_share:.1f} "
            f"| {100 * reuse.reused_token_share:.1f} | {100 * reuse.num_reusing_requests / reuse.num_requests:.1f} |"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table of a request file with hash_ids; returns 2 and one line on stderr for a file it cannot use."""
    parser = argparse.ArgumentParser(prog="python -m simulator.prefix_reuse", description=(__doc__ or "").split(":")[0])
    parser.add_argument("file", help="request file with hash_ids (Mooncake or plain JSONL)")
    parser.add_argument("--capacity-blocks", type=int, nargs="+", default=CAPACITIES_BLOCKS, metavar="N")
    parser.add_argument(
        "--host-blocks", type=int, default=0, metavar="N", help="capacity of a host tier (default none)"
    )
    parser.add_argument("--touch-order", choices=get_args(TouchOrder), default="reverse")
    options = parser.parse_args(arguments)
    try:
        workload = load_workload(options.file)
        print(
            f"{workload.name}: {workload.num_requests:,} requests, {100 * block_reuse(workload):.1f} % of blocks reused"
        )
        table = reuse_table(workload, options.capacity_blocks, options.host_blocks, options.touch_order)
        print("", *table, sep="\n")
    except OasisError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
