"""The step-by-step face of residency: by hand, against the batch kernel, and what must hold at every step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.residency import Residency, step
from traces.errors import InputError


def one_head(num_kept: int, slack: int = 0, eviction: str = "least-recently-selected") -> Residency:
    return Residency(1, num_kept, num_kept + slack, max_blocks=16, eviction=eviction)


def attended(residency: Residency) -> list[int]:
    return residency.attended()[0].tolist()


def test_admission_fills_slots_in_id_order() -> None:
    residency = one_head(2)
    residency.admit([[3, 1, 0, 2]], num_blocks=5)
    assert residency.slot_blocks().tolist() == [[1, 3]]
    assert attended(residency) == [1, 3]


def test_open_block_is_never_selected() -> None:
    residency = one_head(2)
    residency.admit([[4, 3, 1]], num_blocks=5)
    assert attended(residency) == [1, 3]


def test_on_demand_fetch_replaces_the_least_recently_selected_block_at_once() -> None:
    residency = one_head(2)
    residency.admit([[3, 1]], num_blocks=5)
    (plan,), left = residency.plan([[0, 3]], due=0, allowed=2)
    assert (plan.fetch_ids.tolist(), plan.fetch_slots.tolist(), plan.victim_ids.tolist()) == ([0], [0], [1])
    assert (plan.hit_ids.tolist(), plan.num_in_slack, left) == ([3], 0, 1)
    assert attended(residency) == [0, 3]


def test_without_slack_the_victim_leaves_before_its_successor_arrives() -> None:
    residency = one_head(2)
    residency.admit([[3, 1]], num_blocks=5)
    residency.plan([[0, 3]], due=2, allowed=2)
    assert attended(residency) == [3]
    residency.begin(5)
    assert attended(residency) == [3]
    residency.begin(5)
    assert attended(residency) == [0, 3]


def test_with_slack_the_victim_stays_until_its_successor_is_due() -> None:
    residency = one_head(2, slack=1)
    residency.admit([[3, 1]], num_blocks=5)
    (plan,), _ = residency.plan([[0, 3]], due=2, allowed=2)
    assert (plan.fetch_slots.tolist(), plan.victim_ids.tolist(), plan.num_in_slack) == ([2], [1], 1)
    assert attended(residency) == [1, 3]
    residency.begin(5)
    assert attended(residency) == [1, 3]
    residency.begin(5)
    assert attended(residency) == [0, 3]
    assert residency.slot_blocks().tolist() == [[-1, 3, 0]]


def test_filled_block_enters_without_a_fetch_and_takes_the_lowest_key() -> None:
    residency = one_head(2)
    residency.admit([[3, 1]], num_blocks=5)
    residency.plan([[3, 1]], due=1, allowed=2)
    assert [ids.tolist() for ids in residency.begin(6)] == [[1]]
    assert attended(residency) == [3, 4]
    residency.plan([[0, 3]], due=2, allowed=2)
    assert residency.slot_blocks().tolist() == [[0, 3]], "4 counted as selected when it filled, before 3 was again"


def test_plan_leaves_room_for_a_block_that_fills_by_its_due_step() -> None:
    """The worst prediction gives way, not the lowest id (as a rule the sink), and stays until the block is there."""
    residency = one_head(3)
    residency.admit([[0, 3, 1]], num_blocks=5)
    (plan,), _ = residency.plan([[0, 3, 1]], due=1, allowed=3, room=1)
    assert (plan.fetch_ids.tolist(), plan.victim_ids.tolist()) == ([], [1])
    assert attended(residency) == [0, 1, 3]
    assert [ids.tolist() for ids in residency.begin(6)] == [[]]
    assert attended(residency) == [0, 3, 4]


def test_masked_row_is_no_plan() -> None:
    residency = one_head(2)
    residency.admit([[3, 1]], num_blocks=5)
    (plan,), left = residency.plan([[-1, -1]], due=1, allowed=2, room=1)
    assert (plan.fetch_ids.tolist(), plan.victim_ids.tolist(), left) == ([], [], 2)
    assert [ids.tolist() for ids in residency.begin(6)] == [[1]]


def test_lowest_score_evicts_unranked_blocks_by_id_then_the_worst_rank() -> None:
    residency = one_head(3, eviction="lowest-score")
    residency.admit([[6, 4, 2]], num_blocks=9)
    (plan,), _ = residency.plan([[0, 1, 3, 4, 2]], due=1, allowed=2)
    assert (plan.fetch_ids.tolist(), plan.victim_ids.tolist()) == ([0, 1], [2, 6])


def test_runs_need_consecutive_ids_in_consecutive_slots() -> None:
    residency = one_head(4)
    residency.admit([[0, 1, 2, 3]], num_blocks=12)
    (plan,), _ = residency.plan([[5, 6, 8, 2]], due=1, allowed=4)
    assert (plan.fetch_ids.tolist(), plan.fetch_slots.tolist()) == ([5, 6, 8], [0, 1, 3])
    assert plan.num_runs == 2


def test_credit_of_a_scope_goes_by_rank_then_head() -> None:
    residency = Residency(2, 2, 2, max_blocks=8)
    residency.admit([[0, 1], [0, 1]], num_blocks=7)
    plans, left = residency.plan([[2, 3], [0, 4]], due=1, allowed=2)
    assert [plan.fetch_ids.tolist() for plan in plans] == [[2], [4]]
    assert left == 0


def test_repair_fetches_again_what_is_in_flight_and_evicts_nothing_for_it() -> None:
    residency = one_head(2, slack=2)
    residency.admit([[3, 1]], num_blocks=7)
    residency.plan([[0, 3]], due=2, allowed=2)
    (plan,) = residency.repair([[0, 5]])
    assert (plan.fetch_ids.tolist(), plan.victim_ids.tolist()) == ([0, 5], [3])
    assert {0, 5} <= set(attended(residency))


def test_step_is_pure() -> None:
    state = one_head(2)
    state.admit([[3, 1]], num_blocks=5)
    first, after = step(state, [0, 2], allowed=1)
    second, _ = step(state, [0, 2], allowed=1)
    assert attended(state) == [1, 3]
    assert attended(after) == [0, 3]
    assert first.fetch_ids.tolist() == second.fetch_ids.tolist() == [0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Residency(1, 4, 3, 8), "3 slots"),
        (lambda: one_head(2).admit([[0]], 17), "within 1 … 16"),
        (lambda: one_head(2).admit([[0], [1]], 5), "must be [1, W]"),
        (lambda: one_head(2).plan([[0]], due=-2, allowed=1), "cannot be due"),
    ],
)
def test_bad_input_is_refused(make, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        make()


@settings(max_examples=60, deadline=None)
@given(
    num_kept=st.integers(1, 6),
    slack=st.integers(0, 6),
    k=st.integers(0, 3),
    first_blocks=st.integers(1, 14),
    seed=st.integers(0, 2**20),
)
def test_every_step_keeps_the_books(num_kept: int, slack: int, k: int, first_blocks: int, seed: int) -> None:
    """At most K blocks stay, none twice; the cap holds; what is fetched is attended or evicted, and nothing is lost."""
    rng = np.random.default_rng(seed)
    fills = rng.random(20) < 0.4
    num_blocks = first_blocks
    residency = Residency(1, num_kept, num_kept + slack, max_blocks=24)
    residency.admit([rng.permutation(num_blocks)], num_blocks)
    future = set(attended(residency))
    awaited: dict[int, int] = {}
    for now in range(12):
        if now:
            before, num_blocks = num_blocks, num_blocks + int(fills[now])
            (victims,) = residency.begin(num_blocks)
            entered = set(range(before - 1, num_blocks - 1))
            future = (future - set(victims.tolist())) | entered
        for block in residency.attended()[0].tolist():
            if awaited.get(block, 99) <= now:
                del awaited[block]
        allowed = int(rng.integers(0, num_kept + 1))
        room = int(fills[now + 1 : now + k + 1].sum())
        (plan,), left = residency.plan([rng.permutation(num_blocks)], now + k, allowed, room)
        fetched, evicted = set(plan.fetch_ids.tolist()), set(plan.victim_ids.tolist())
        assert len(fetched) == len(plan.fetch_ids) == allowed - left
        assert evicted <= future
        assert not fetched & future
        future = (future - evicted) | fetched
        assert len(future) <= max(0, num_kept - room)
        held = [block for block in residency.slot_blocks()[0].tolist() if block >= 0]
        assert future <= set(held)
        awaited = {block: due for block, due in awaited.items() if block in future}
        awaited |= dict.fromkeys(fetched, now + k)
        if k == 0:
            assert set(attended(residency)) == future
            awaited = {}
    assert all(due >= 12 for due in awaited.values())
