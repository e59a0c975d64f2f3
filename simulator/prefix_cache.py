"""Prefix cache: a tree of KV blocks under one least-recently-used order that runs through the tiers.

A block's place in the tree is the path of block ids from the first block of the prompt to it, so equal ids under
different predecessors are different blocks. Its KV is usable only as part of a leading prefix: all blocks before it
must be resident too. A block that is touched moves to the first tier; each tier passes its least recently used block
to the next one, and the last tier drops it. Tiers are exclusive. A host tier of H blocks that keeps a copy of all
G blocks on the GPU (write-through) hits like an exclusive one of H - G; its device-to-host traffic is then the
inserted blocks, not the demoted ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from traces.errors import InputError

TouchOrder = Literal["forward", "reverse"]
"""forward: first block first, so a prompt's last block is its most recent and eviction may cut a prefix at its head.
reverse: last block first, so that a block is never older than its successors and only leaves of the tree are evicted,
as vLLM (freed blocks are queued in reverse order) and SGLang (leaves only) do."""

_ABSENT = -1


@dataclass(frozen=True, slots=True)
class Tier:
    name: str
    capacity_blocks: int | None
    """None: unlimited."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What a prompt finds: leading blocks that are resident, by tier."""

    num_blocks: int
    tier_blocks: tuple[int, ...]

    @property
    def hit_blocks(self) -> int:
        return sum(self.tier_blocks)


@dataclass(frozen=True, slots=True)
class PrefixMoves:
    """What touching a prompt moved. Resident blocks after = before + inserted - evicted."""

    inserted_blocks: int
    """Computed anew: resident in no tier before."""
    raised_blocks: int
    """Resident below the first tier before, now in the first."""
    demoted_blocks: tuple[int, ...]
    """Passed from tier i to tier i + 1; one entry fewer than there are tiers."""
    evicted_blocks: int
    """Dropped by the last tier."""


class _Node:
    """A block: its predecessor, its id under it, its successors, and the tier that holds its KV."""

    __slots__ = ("block_id", "children", "parent", "tier")

    def __init__(self, parent: _Node | None, block_id: int) -> None:
        self.parent = parent
        self.block_id = block_id
        self.children: dict[int, _Node] = {}
        self.tier = _ABSENT


class PrefixCache:
    """The cache as a serving loop uses it: `lookup` at admission, `touch` once the prompt's KV exists.

    It holds only resident blocks and the predecessors that they need, so memory follows capacity and not the length
    of the workload. KV that running requests hold is the scheduler's pool, not this cache's; `resize` follows it.
    Raises InputError for no tiers, a negative capacity or an unlimited tier above another.
    """

    def __init__(self, tiers: Sequence[Tier], touch_order: TouchOrder = "reverse") -> None:
        if not tiers:
            raise InputError("prefix cache: needs at least one tier")
        if touch_order not in ("forward", "reverse"):
            raise InputError(f"prefix cache: touch_order must be forward or reverse, got {touch_order!r}")
        for tier in tiers[:-1]:
            if tier.capacity_blocks is None:
                raise InputError(f"prefix cache: tier {tier.name} is unlimited, so the tiers below it would stay empty")
        self._names = tuple(tier.name for tier in tiers)
        self._capacity = [self._checked(tier.name, tier.capacity_blocks) for tier in tiers]
        self._lru: list[OrderedDict[_Node, None]] = [OrderedDict() for _ in tiers]
        self._reverse = touch_order == "reverse"
        self._root = _Node(None, _ABSENT)

    def resident_blocks(self) -> tuple[int, ...]:
        """Blocks in each tier."""
        return tuple(len(lru) for lru in self._lru)

    def lookup(self, block_ids: Iterable[int]) -> PrefixHit:
        """Leading blocks of a prompt that are resident. Changes nothing."""
        tier_blocks = [0] * len(self._lru)
        num_blocks = 0
        node: _Node | None = self._root
        for block_id in block_ids:
            num_blocks += 1
            if node is not None:
                node = node.children.get(block_id)
                if node is not None and node.tier == _ABSENT:
                    node = None
                if node is not None:
                    tier_blocks[node.tier] += 1
        return PrefixHit(num_blocks, tuple(tier_blocks))

    def touch(self, block_ids: Iterable[int]) -> PrefixMoves:
        """Brings all blocks of a prompt into the first tier in the touch order, then passes on what no longer fits."""
        node, path = self._root, []
        for block_id in block_ids:
            child = node.children.get(block_id)
            if child is None:
                child = node.children[block_id] = _Node(node, block_id)
            node = child
            path.append(node)
        if self._reverse:
            path.reverse()
        inserted = raised = 0
        first = self._lru[0]
        for node in path:
            if node.tier == 0:
                first.move_to_end(node)
                continue
            if node.tier == _ABSENT:
                inserted += 1
            else:
                raised += 1
                del self._lru[node.tier][node]
            node.tier = 0
            first[node] = None
        return self._settle(inserted, raised)

    def resize(self, tier: str, capacity_blocks: int | None) -> PrefixMoves:
        """Gives a tier another capacity; what no longer fits moves down or out, least recently used first."""
        if tier not in self._names:
            raise InputError(f"prefix cache: no tier {tier!r}; there are {', '.join(self._names)}")
        index = self._names.index(tier)
        if capacity_blocks is None and index + 1 < len(self._names):
            raise InputError(f"prefix cache: tier {tier} is not the last and cannot be unlimited")
        self._capacity[index] = self._checked(tier, capacity_blocks)
        return self._settle(0, 0)

    def _settle(self, inserted: int, raised: int) -> PrefixMoves:
        """Passes blocks down until every tier holds at most its capacity."""
        last = len(self._lru) - 1
        demoted, evicted = [0] * last, 0
        for index, lru in enumerate(self._lru):
            capacity = self._capacity[index]
            while capacity is not None and len(lru) > capacity:
                node, _ = lru.popitem(last=False)
                if index < last:
                    node.tier = index + 1
                    self._lru[index + 1][node] = None
                    demoted[index] += 1
                else:
                    node.tier = _ABSENT
                    evicted += 1
                    _prune(node)
        return PrefixMoves(inserted, raised, tuple(demoted), evicted)

    @staticmethod
    def _checked(name: str, capacity_blocks: int | None) -> int | None:
        if capacity_blocks is not None and capacity_blocks < 0:
            raise InputError(f"prefix cache: tier {name} has capacity_blocks = {capacity_blocks}, expected >= 0")
        return capacity_blocks


def reused_tokens(hit_blocks: int, prompt_tokens: int, block_tokens: int) -> int:
    """Prompt tokens whose prefill a hit saves: all but the last, whose logits give the first output token."""
    return min(hit_blocks * block_tokens, prompt_tokens - 1)


def _prune(node: _Node) -> None:
    """Takes an absent block out of the tree, with predecessors that are absent too and lead nowhere else."""
    while node.tier == _ABSENT and not node.children and node.parent is not None:
        del node.parent.children[node.block_id]
        node = node.parent
