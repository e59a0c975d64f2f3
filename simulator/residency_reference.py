"""The residency rules in plain Python: slow, and meant to be checked by reading docs/decisions.md §1 and §2 beside it.

`simulator.residency_kernel` must agree with it exactly; only tests call this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import floor

NEVER = 2**31 - 1
Ranking = Sequence[int]
Count = dict[str, int]


@dataclass
class Slot:
    block: int
    due: int
    leaves: int = NEVER


class HostCache:
    """Blocks of one KV head in host memory, least recently fetched first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.blocks = capacity, list[int]()

    def fetch(self, blocks: Sequence[int]) -> int:
        """Fetch in ascending order; returns how many were not there."""
        misses = 0
        for block in sorted(blocks):
            if block in self.blocks:
                self.blocks.remove(block)
            else:
                misses += 1
            self.blocks = [*self.blocks, block][-self.capacity :]
        return misses


@dataclass
class Head:
    """One KV head's slots; an empty slot is None."""

    capacity: int
    """Blocks that may stay."""
    num_slots: int
    by_score: bool = False
    host_blocks: int = 0
    host_keeps_new: bool = False
    slots: list[Slot | None] = field(default_factory=list)
    last_selected: dict[int, int] = field(default_factory=dict)
    evicted_ids: list[int] = field(default_factory=list)
    """Of the current step."""

    def __post_init__(self) -> None:
        self.slots = [None] * self.num_slots
        self.host = HostCache(self.host_blocks) if self.host_blocks else None

    def not_in_host(self, blocks: Sequence[int]) -> int:
        return 0 if self.host is None else self.host.fetch(blocks)

    def future(self) -> dict[int, int]:
        """Block to slot, for blocks that never leave."""
        return {slot.block: i for i, slot in enumerate(self.slots) if slot is not None and slot.leaves == NEVER}

    def attended(self, step: int) -> set[int]:
        return {slot.block for slot in self.slots if slot is not None and slot.due <= step < slot.leaves}

    def admit(self, blocks: Sequence[int]) -> None:
        for i, block in enumerate(sorted(blocks)):
            self.slots[i] = Slot(block, due=0)
        self.not_in_host(blocks)

    def begin(self, step: int, filled: Sequence[int]) -> None:
        """Blocks that leave at `step` go; newly filled blocks enter."""
        self.evicted_ids = []
        self.slots = [None if slot is not None and slot.leaves <= step else slot for slot in self.slots]
        if self.host_keeps_new:
            self.not_in_host(filled)
        for block in filled:
            if len(self.future()) == self.capacity:
                victim = min(self.future(), key=self._least_recently_selected)
                target = self._first_free()
                self.slots[self.future()[victim]] = None
                self.evicted_ids.append(victim)
                target = self._first_free() if target is None else target
            else:
                target = self._first_free()
            if target is None:
                target = self._leaving_soonest()
            self.slots[target] = Slot(block, due=step)
            self.last_selected[block] = step

    def _first_free(self) -> int | None:
        return next((i for i, slot in enumerate(self.slots) if slot is None), None)

    def _leaving_soonest(self) -> int:
        return min((slot.leaves, i) for i, slot in enumerate(self.slots) if slot is not None)[1]

    def _least_recently_selected(self, block: int) -> tuple[int, int]:
        return self.last_selected.get(block, -1), block

    def missing(self, step: int, predicted: Sequence[int]) -> list[int]:
        for block in predicted:
            self.last_selected[block] = step
        return [block for block in predicted if block not in self.future()]

    def fetch(
        self, step: int, due: int, blocks: Sequence[int], keep: Sequence[int], ranking: Ranking, room: int = 0
    ) -> Count:
        """Rules 3 to 5 of a plan that leaves room for the blocks that fill by its due step."""

        def lowest_score(block: int) -> tuple[int, int]:
            return (1, -list(ranking).index(block)) if block in ranking else (0, block)

        future = self.future()
        num_victims = max(0, len(future) + len(blocks) - max(0, self.capacity - room))
        candidates = sorted(
            (block for block in future if block not in keep),
            key=lowest_score if self.by_score else self._least_recently_selected,
        )
        victims = candidates[:num_victims]
        free = [i for i, slot in enumerate(self.slots) if slot is None]
        victim_slots = sorted(future[block] for block in victims)
        targets = (free + victim_slots)[: len(blocks)]
        for i in victim_slots:
            slot = self.slots[i]
            assert slot is not None
            slot.leaves = due
            if i in targets or due == step:
                self.slots[i] = None
        for block, i in zip(sorted(blocks), targets, strict=True):
            self.slots[i] = Slot(block, due)
        self.evicted_ids += victims
        return {"fetched": len(blocks), "runs": self.runs(blocks), "in_slack": len(set(free) & set(targets))}

    def runs(self, blocks: Sequence[int]) -> int:
        at = self.future()
        return sum(1 for b in blocks if not (b - 1 in blocks and at[b - 1] == at[b] - 1))

    def repair(self, step: int, true: Sequence[int], ranking: Ranking) -> Count:
        """Fetch what the real query selects and attention would not find."""
        missing = [block for block in true if block not in self.attended(step)]
        for block in missing:
            if block in self.future():
                slot = self.slots[self.future()[block]]
                assert slot is not None
                slot.due = step
        self.fetch(step, step, [block for block in missing if block not in self.future()], true, ranking)
        return {
            "repaired": len(missing),
            "repair_runs": self.runs(missing),
            "remote_repaired": self.not_in_host(missing),
        }


@dataclass(frozen=True)
class Rules:
    num_kept: int
    num_slots: int
    lookahead_k: int = 0
    """0: for the step's own attention."""
    predicts: bool = False
    """With lookahead_k 0: the fetch follows a prediction, and is there before attention."""
    caches: bool = False
    """All slots may hold blocks; attention reads the true set alone."""
    refine: bool = False
    stall: bool = False
    by_score: bool = False
    fetch_cap: Fraction = Fraction(1)
    host_blocks: int = 0
    """Blocks per head that host memory keeps; 0: it is not looked at."""
    host_keeps_new: bool = False
    """Blocks that fill, too."""


def first(ranking: Ranking, num_kept: int, num_selectable: int) -> list[int]:
    """The first K distinct selectable blocks of a ranking that ends at its first negative id."""
    chosen: list[int] = []
    for block in ranking:
        if block < 0:
            break
        if block < num_selectable and block not in chosen and len(chosen) < num_kept:
            chosen.append(block)
    return chosen


def replay_reference(
    rules: Rules,
    num_blocks: Sequence[int],
    true: Callable[[int, int], Ranking],
    predicted: Callable[[int, int], Ranking],
    near: Callable[[int, int], Ranking],
    mass: Callable[[int, int], Sequence[int]],
    num_heads: int,
    repairs: Callable[[int, int], bool] = lambda t, h: True,
    enough: Callable[[int, int], int] = lambda t, h: 0,
) -> list[list[Count]]:
    """Counts [step][head] of heads that share one cap's credit.

    true, predicted, near: ranking of (target step, head); mass: integer mass of every block of (step, head). Counts
    hold the kernel's names, plus `mass` and `coverage`. repairs: whether a stall holds for (step, head); enough: the
    integer mass below which (step, head) reads every block.
    """
    k, num_kept, num_steps = rules.lookahead_k, rules.num_kept, len(num_blocks)
    capacity = rules.num_slots if rules.caches else num_kept
    heads = [
        Head(capacity, rules.num_slots, rules.by_score, rules.host_blocks, rules.host_keeps_new)
        for _ in range(num_heads)
    ]
    for h, head in enumerate(heads):
        head.admit(first(true(0, h), capacity, num_blocks[0] - 1))
    rows: list[list[Count]] = []
    for t, n in enumerate(num_blocks):
        counts: list[Count] = [
            dict.fromkeys(("overlap", "fetched", "runs", "in_slack", "urgent", "urgent_runs"), 0)
            | {"repaired": 0, "repair_runs": 0, "remote_fetched": 0, "remote_urgent": 0, "remote_repaired": 0}
            for _ in heads
        ]
        credit = rules.fetch_cap * num_kept * num_heads
        allowed = floor((t + 1) * credit) - floor(t * credit)
        for head in heads:
            head.begin(t, range(num_blocks[t - 1] - 1, n - 1) if t else ())
        if rules.predicts:
            plan(heads, num_kept, counts, t, t, n, allowed, predicted)
        for h, head in enumerate(heads):
            true_set = first(true(t, h), num_kept, n - 1)
            open_hit = int(num_kept >= n)
            hits = len(set(true_set) & head.attended(t))
            counts[h] |= {"hit": hits + open_hit, "missed": len(true_set) - hits}
            if t >= k:
                on_demand = k == 0 and not rules.predicts
                expected = true_set if on_demand else first(predicted(t, h), num_kept, n - 1)
                counts[h]["overlap"] = len(set(expected) & set(true_set)) + (open_hit if expected or on_demand else 0)
            if rules.stall and (k > 0 or rules.predicts) and repairs(t, h):
                counts[h] |= head.repair(t, true_set, true(t, h))
        if k == 0 and not rules.predicts:
            plan(heads, num_kept, counts, t, t, n, allowed, predicted)
        for h, head in enumerate(heads):
            attended = head.attended(t)
            if rules.caches:
                attended &= set(first(true(t, h), num_kept, n - 1))
            attended.add(n - 1)
            masses = [mass(t, h)[block] for block in attended]
            counts[h]["mass"] = sum(masses)
            whole = len(attended) == n
            if sum(masses) < enough(t, h):
                unread = set(range(n)) - attended
                counts[h]["repaired"] = len(unread)
                counts[h]["repair_runs"] = sum(1 for block in unread if block - 1 not in unread)
                whole = True
            counts[h]["coverage"] = int(0 in masses) + 2 * int(whole)
        if k > 0 and t + k < num_steps:
            room = num_blocks[t + k] - n if k == 1 or not rules.stall else 0
            left = plan(heads, num_kept, counts, t, t + k, n, allowed, predicted, room)
            if rules.refine:
                plan(heads, num_kept, counts, t, t + 1, n, left, near, room, urgent=True)
        for h, head in enumerate(heads):
            counts[h]["evicted"] = len(head.evicted_ids)
        rows.append(counts)
    return rows


def plan(
    heads: Sequence[Head],
    num_kept: int,
    counts: Sequence[Count],
    t: int,
    due: int,
    n: int,
    allowed: int,
    rankings: Callable[[int, int], Ranking],
    room: int = 0,
    urgent: bool = False,
) -> int:
    """Plan for every head, granting the allowance by (rank in the missing list, head); returns what is left."""
    predicted = [first(rankings(due, h), max(0, num_kept - room), n - 1) for h in range(len(heads))]
    missing = [head.missing(t, predicted[h]) for h, head in enumerate(heads)]
    wishes = sorted((rank, h) for h, blocks in enumerate(missing) for rank in range(len(blocks)))
    granted = wishes[:allowed]
    for h, head in enumerate(heads):
        if not first(rankings(due, h), 1, NEVER):
            continue  # masked: no plan
        blocks = missing[h][: sum(1 for _, owner in granted if owner == h)]
        moved = head.fetch(t, due, blocks, predicted[h], rankings(due, h), room)
        for name, count in moved.items():
            counts[h][name] += count
        misses = head.not_in_host(blocks)
        counts[h]["remote_fetched"] += misses
        if urgent:
            counts[h]["remote_urgent"] += misses
            counts[h]["urgent"] += moved["fetched"]
            counts[h]["urgent_runs"] += moved["runs"]
    return allowed - len(granted)
