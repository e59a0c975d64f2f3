"""The prefix cache against a slow plain reference, its invariants, and hand-worked cases."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.prefix_cache import PrefixCache, PrefixHit, PrefixMoves, Tier, TouchOrder, reused_tokens
from traces.errors import InputError

Path = tuple[int, ...]


class PlainPrefixCache:
    """Reference: each tier is a list of block paths, most recent first; everything is searched linearly."""

    def __init__(self, capacities: list[int | None], touch_order: TouchOrder) -> None:
        self.capacities = capacities
        self.touch_order = touch_order
        self.tiers: list[list[Path]] = [[] for _ in capacities]

    def lookup(self, block_ids: list[int]) -> PrefixHit:
        tier_blocks = [0] * len(self.tiers)
        for length in range(1, len(block_ids) + 1):
            holders = [index for index, tier in enumerate(self.tiers) if tuple(block_ids[:length]) in tier]
            if not holders:
                break
            tier_blocks[holders[0]] += 1
        return PrefixHit(len(block_ids), tuple(tier_blocks))

    def touch(self, block_ids: list[int]) -> PrefixMoves:
        inserted = raised = 0
        lengths = range(1, len(block_ids) + 1)
        for length in reversed(lengths) if self.touch_order == "reverse" else lengths:
            path = tuple(block_ids[:length])
            holders = [index for index, tier in enumerate(self.tiers) if path in tier]
            if not holders:
                inserted += 1
            else:
                raised += holders[0] > 0
                self.tiers[holders[0]].remove(path)
            self.tiers[0].insert(0, path)
        return self.settle(inserted, raised)

    def settle(self, inserted: int, raised: int) -> PrefixMoves:
        evicted, demoted = 0, [0] * (len(self.tiers) - 1)
        for index, tier in enumerate(self.tiers):
            capacity = self.capacities[index]
            while capacity is not None and len(tier) > capacity:
                victim = tier.pop()
                if index + 1 < len(self.tiers):
                    self.tiers[index + 1].insert(0, victim)
                    demoted[index] += 1
                else:
                    evicted += 1
        return PrefixMoves(inserted, raised, tuple(demoted), evicted)

    def resize(self, index: int, capacity: int | None) -> PrefixMoves:
        self.capacities[index] = capacity
        return self.settle(0, 0)


def make_cache(capacities: list[int | None], touch_order: TouchOrder) -> PrefixCache:
    return PrefixCache([Tier(f"t{index}", capacity) for index, capacity in enumerate(capacities)], touch_order)


def resident_paths(cache: PrefixCache) -> list[set[Path]]:
    """By walking the tree, which must lead nowhere in vain: every leaf is resident."""
    found: list[set[Path]] = [set() for _ in cache.resident_blocks()]
    stack = [(cache._root, ())]
    while stack:
        node, path = stack.pop()
        if node.tier >= 0:
            found[node.tier].add(path)
        else:
            assert node.children or node is cache._root
        stack += [(child, (*path, block_id)) for block_id, child in node.children.items()]
    return found


# Few distinct ids, so that prompts share prefixes and the same id occurs under different predecessors.
prompts = st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=30)
orders = st.sampled_from(["forward", "reverse"])
capacity_lists = st.lists(st.integers(0, 9), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None)
@given(prompts, capacity_lists, orders, st.data())
def test_agrees_with_the_plain_reference(
    sequence: list[list[int]], capacities: list[int], order: TouchOrder, data: st.DataObject
) -> None:
    cache, plain = make_cache(list(capacities), order), PlainPrefixCache(list(capacities), order)
    for block_ids in sequence:
        assert cache.lookup(block_ids) == plain.lookup(block_ids)
        before = sum(cache.resident_blocks())
        moves = cache.touch(block_ids)
        assert moves == plain.touch(block_ids)
        assert sum(cache.resident_blocks()) == before + moves.inserted_blocks - moves.evicted_blocks
        if data.draw(st.booleans()):
            index, capacity = data.draw(st.integers(0, len(capacities) - 1)), data.draw(st.integers(0, 9))
            assert cache.resize(f"t{index}", capacity) == plain.resize(index, capacity)
        assert resident_paths(cache) == [set(tier) for tier in plain.tiers]
        assert cache.resident_blocks() == tuple(len(tier) for tier in plain.tiers)


@settings(deadline=None)
@given(prompts, orders)
def test_hits_are_leading_blocks_of_small_stack_distance(sequence: list[list[int]], order: TouchOrder) -> None:
    """LRU by stack distance: one list gives the hits of every capacity, an algorithm without tiers or eviction."""
    capacities = [1, 2, 3, 5, 8, 13]
    caches = [make_cache([capacity], order) for capacity in capacities]
    recency: list[Path] = []
    for block_ids in sequence:
        paths = [tuple(block_ids[:length]) for length in range(1, len(block_ids) + 1)]
        distances = [recency.index(path) if path in recency else 10**9 for path in paths]
        for capacity, cache in zip(capacities, caches, strict=True):
            leading = next((n for n, distance in enumerate(distances) if distance >= capacity), len(paths))
            assert cache.lookup(block_ids).hit_blocks == leading
            cache.touch(block_ids)
        for path in reversed(paths) if order == "reverse" else paths:
            recency = [path, *(other for other in recency if other != path)]


@settings(deadline=None)
@given(prompts, orders, st.integers(0, 6), st.integers(0, 6))
def test_two_tiers_hit_as_one_of_their_sum(sequence: list[list[int]], order: TouchOrder, gpu: int, host: int) -> None:
    both, one = make_cache([gpu, host], order), make_cache([gpu + host], order)
    for block_ids in sequence:
        assert both.lookup(block_ids).hit_blocks == one.lookup(block_ids).hit_blocks
        both.touch(block_ids)
        one.touch(block_ids)


@settings(deadline=None)
@given(prompts, st.integers(1, 9))
def test_reverse_order_never_keeps_a_block_without_its_predecessor(sequence: list[list[int]], capacity: int) -> None:
    cache = make_cache([capacity, 2], "reverse")
    for block_ids in sequence:
        cache.touch(block_ids)
        resident = set().union(*resident_paths(cache))
        assert all(path[:-1] in resident for path in resident if len(path) > 1)


def test_forward_order_cuts_a_long_prompt_at_its_head_and_reverse_at_its_tail() -> None:
    prompt = [1, 2, 3, 4, 5]
    forward, reverse = make_cache([3], "forward"), make_cache([3], "reverse")
    assert forward.touch(prompt) == PrefixMoves(5, 0, (), 2)
    assert reverse.touch(prompt) == PrefixMoves(5, 0, (), 2)
    assert resident_paths(forward) == [{(1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 5)}]
    assert forward.lookup(prompt).hit_blocks == 0
    assert reverse.lookup(prompt).hit_blocks == 3


def test_a_block_falls_to_the_host_comes_back_and_is_dropped() -> None:
    cache = PrefixCache([Tier("gpu", 2), Tier("host", 2)])
    assert cache.touch([1, 2]) == PrefixMoves(2, 0, (0,), 0)
    assert cache.touch([7]) == PrefixMoves(1, 0, (1,), 0)
    assert cache.lookup([1, 2]) == PrefixHit(2, (1, 1))
    assert cache.touch([1, 2]) == PrefixMoves(0, 1, (1,), 0)
    assert cache.lookup([7, 8]) == PrefixHit(2, (0, 1))
    assert cache.touch([8, 9]) == PrefixMoves(2, 0, (2,), 1)
    assert cache.lookup([7]).hit_blocks == 0
    assert cache.resident_blocks() == (2, 2)
    assert cache.resize("gpu", 0) == PrefixMoves(0, 0, (2,), 2)
    assert cache.resize("host", 0) == PrefixMoves(0, 0, (0,), 2)
    assert cache.lookup([8]).hit_blocks == 0
    assert not cache._root.children


def test_equal_ids_under_other_predecessors_are_other_blocks() -> None:
    cache = PrefixCache([Tier("gpu", None)])
    cache.touch([1, 5])
    assert cache.lookup([2, 5]).hit_blocks == 0
    assert cache.touch([2, 5]).inserted_blocks == 2
    assert cache.lookup([1, 5, 6]) == PrefixHit(3, (2,))


def test_a_lookup_changes_nothing() -> None:
    cache = make_cache([2], "reverse")
    cache.touch([1])
    cache.touch([2])
    cache.lookup([1])
    cache.touch([3])
    assert resident_paths(cache) == [{(2,), (3,)}]


def test_memory_follows_capacity_not_the_number_of_prompts() -> None:
    for order in ("forward", "reverse"):
        cache = make_cache([20, 20], order)
        for start in range(0, 5000, 5):
            cache.touch(range(start, start + 10))
        num_nodes, stack = 0, [cache._root]
        while stack:
            node = stack.pop()
            num_nodes += 1
            stack += node.children.values()
        assert num_nodes <= 1 + 40 + 10


@pytest.mark.parametrize(
    ("hit_blocks", "prompt_tokens", "tokens"),
    [(0, 700, 0), (1, 700, 512), (2, 700, 699), (1, 512, 511), (2, 1025, 1024)],
)
def test_the_last_prompt_token_is_always_computed(hit_blocks: int, prompt_tokens: int, tokens: int) -> None:
    assert reused_tokens(hit_blocks, prompt_tokens, 512) == tokens


def test_impossible_caches_are_refused() -> None:
    with pytest.raises(InputError, match="needs at least one tier"):
        PrefixCache([])
    with pytest.raises(InputError, match="tier gpu has capacity_blocks = -1"):
        PrefixCache([Tier("gpu", -1)])
    with pytest.raises(InputError, match="tier gpu is unlimited"):
        PrefixCache([Tier("gpu", None), Tier("host", 4)])
    with pytest.raises(InputError, match="touch_order must be forward or reverse, got 'random'"):
        PrefixCache([Tier("gpu", 1)], "random")  # type: ignore[arg-type]
    cache = PrefixCache([Tier("gpu", 1), Tier("host", 1)])
    with pytest.raises(InputError, match="no tier 'nvme'; there are gpu, host"):
        cache.resize("nvme", 3)
    with pytest.raises(InputError, match="tier gpu is not the last and cannot be unlimited"):
        cache.resize("gpu", None)
    with pytest.raises(InputError, match="capacity_blocks = -2"):
        cache.resize("host", -2)
