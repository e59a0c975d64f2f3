"""The GPU plan kernel's own reference gives the plans of replay, slot by slot."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from realhw.kernels.plan.reference import HeadSlots
from simulator.residency import Residency


@settings(max_examples=80, deadline=None)
@given(
    num_kept=st.integers(1, 8),
    slack=st.integers(0, 6),
    k=st.integers(0, 3),
    first_blocks=st.integers(1, 16),
    seed=st.integers(0, 2**20),
)
def test_plans_agree(num_kept: int, slack: int, k: int, first_blocks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    fills = rng.random(20) < 0.3
    num_blocks = first_blocks
    ours = Residency(1, num_kept, num_kept + slack, max_blocks=32)
    theirs = HeadSlots(num_kept, num_kept + slack)
    score = rng.normal(size=32)
    ranking = np.argsort(score)[:24]
    ours.admit(ranking[None], num_blocks)
    theirs.admit(ranking.tolist(), num_blocks - 1)
    for now in range(14):
        if now:
            filled = num_blocks - 1 if fills[now] else None
            num_blocks += filled is not None
            (entering,) = ours.begin(num_blocks)
            evicted, _ = theirs.enter(now, filled)
            assert entering.tolist() == evicted
        score += rng.normal(size=32)
        ranking = np.argsort(score)[:24]
        allowed = int(rng.integers(0, num_kept + 1))
        room = int(fills[now + 1 : now + k + 1].sum())
        (plan,), _ = ours.plan(ranking[None], now + k, allowed, room)
        placed, evicted = theirs.plan(now, now + k, ranking.tolist(), num_blocks - 1, allowed, room)
        assert list(zip(plan.fetch_ids.tolist(), plan.fetch_slots.tolist(), strict=True)) == placed
        assert plan.victim_ids.tolist() == evicted
        assert ours.slot_blocks()[0].tolist() == theirs.block
        assert ours.attended()[0].tolist() == sorted({theirs.block[slot] for slot in theirs.attended(now)})
