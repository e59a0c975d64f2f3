"""Residency of one KV head in plain Python: the rules of docs/decisions.md section 2, one step at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

NEVER = 2**31 - 1


@dataclass(slots=True)
class HeadSlots:
    """K + slack slots of one KV head. block −1: free."""

    num_kept: int
    num_slots: int
    block: list[int] = field(init=False)
    due: list[int] = field(init=False)
    leaves: list[int] = field(init=False)
    last_selected: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.block = [-1] * self.num_slots
        self.due = [0] * self.num_slots
        self.leaves = [NEVER] * self.num_slots
        self.last_selected = [-1] * self.num_slots

    def future(self) -> list[int]:
        """Slots whose blocks never leave."""
        return [s for s in range(self.num_slots) if self.block[s] >= 0 and self.leaves[s] == NEVER]

    def _place(self, slot: int, block: int, due: int, now: int) -> None:
        self.block[slot], self.due[slot], self.leaves[slot], self.last_selected[slot] = block, due, NEVER, now

    def admit(self, ranking: list[int], num_selectable: int) -> None:
        """The first K selectable blocks, ascending, in slots 0, 1, …; none counts as selected yet."""
        chosen = [i for i in ranking if 0 <= i < num_selectable][: self.num_kept]
        for slot, block in enumerate(sorted(chosen)):
            self._place(slot, block, 0, -1)

    def enter(self, step: int, filled: int | None) -> tuple[list[int], int | None]:
        """Free what leaves at `step`, then let a newly filled block in: (evicted blocks, its slot)."""
        for s in range(self.num_slots):
            if self.leaves[s] <= step:
                self.block[s], self.leaves[s] = -1, NEVER
        if filled is None:
            return [], None
        free = [s for s in range(self.num_slots) if self.block[s] < 0]
        leaving = sorted((s for s in range(self.num_slots) if self.leaves[s] != NEVER), key=lambda s: self.leaves[s])
        future, evicted = self.future(), []
        if len(future) == self.num_kept:
            victim = min(future, key=lambda s: (self.last_selected[s], self.block[s]))
            evicted = [self.block[victim]]
            self.block[victim] = -1
            free = free or [victim]
        target = (free or leaving)[0]
        self._place(target, filled, step, step)
        return evicted, target

    def plan(
        self, step: int, due: int, ranking: list[int], num_selectable: int, allowed: int, room: int = 0
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Fetch the best missing blocks: ([(block, slot)], evicted blocks).

        room: places to leave for the blocks that fill after this step and up to `due`.
        """
        num_kept = max(0, self.num_kept - room)
        predicted = [i for i in ranking if 0 <= i < num_selectable][:num_kept]
        future = self.future()
        resident = {self.block[s] for s in future}
        for s in future:
            if self.block[s] in predicted:
                self.last_selected[s] = step
        fetched = sorted([i for i in predicted if i not in resident][:allowed])
        candidates = [s for s in future if self.block[s] not in predicted]
        candidates.sort(key=lambda s: (self.last_selected[s], self.block[s]))
        num_victims = max(0, len(future) + len(fetched) - num_kept)
        victims = sorted(candidates[:num_victims])
        evicted = [self.block[s] for s in victims]
        slots = [s for s in range(self.num_slots) if self.block[s] < 0] + victims
        for s in victims:
            if due > step:
                self.leaves[s] = due
            else:
                self.block[s] = -1
        placed = list(zip(fetched, slots[: len(fetched)], strict=True))
        for block, slot in placed:
            self._place(slot, block, due, step)
        return placed, evicted

    def attended(self, step: int) -> list[int]:
        """Slots that attention reads at `step`, the open block apart."""
        return [s for s in range(self.num_slots) if self.block[s] >= 0 and self.due[s] <= step < self.leaves[s]]
