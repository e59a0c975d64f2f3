"""Policies in lockstep act exactly as each alone, step by step."""

from __future__ import annotations

import numpy as np

from simulator.residency import Residency
from simulator.residency_batch import ResidencyBatch

LAYERS, HEADS, MAX_BLOCKS = 2, 2, 24
KEPT, SLOTS, CAPS, AHEAD = [6, 6, 4, 30], [6, 8, 7, 30], [6, 1, 2, 9], [0, 1, 2, 1]


def test_batch_equals_residency_of_each_policy_and_head() -> None:
    rng = np.random.default_rng(0)
    num_blocks = np.array([12, 12, 12, 13, 13, 14, 14, 14, 15, 15])
    batch = ResidencyBatch(
        LAYERS, HEADS, np.array(KEPT), np.array(SLOTS), np.array([False, True, False, False]), MAX_BLOCKS, 2
    )
    single = [
        [
            Residency(1, KEPT[b], SLOTS[b], MAX_BLOCKS, "lowest-score" if b == 1 else "least-recently-selected")
            for _ in range(LAYERS * HEADS)
        ]
        for b in range(4)
    ]

    def ranking(n: int, *shape: int) -> np.ndarray:
        return rng.random((*shape, n - 1)).argsort(axis=-1).astype(np.int32)

    moved = 0
    admitted = ranking(12, LAYERS, HEADS)
    batch.admit(admitted[None], 12)
    for units in single:
        for unit, residency in enumerate(units):
            residency.admit(admitted.reshape(-1, 11)[unit][None], 12)
    for step, n in enumerate(num_blocks):
        if step:
            batch.begin(int(n))
            for units in single:
                for residency in units:
                    residency.begin(int(n))
        for on_demand in (True, False):
            ids = ranking(int(n), 4, LAYERS, HEADS)
            due = np.array([step + k if (k == 0) == on_demand else -1 for k in AHEAD])
            then = num_blocks[np.minimum(np.maximum(due, 0), len(num_blocks) - 1)]
            room = np.where(due >= 0, then - n, 0)
            if on_demand:
                fetched = sum(batch.plan(ids[:, layer : layer + 1], due, np.array(CAPS), layer) for layer in range(2))
            else:
                fetched = batch.plan(ids, due, np.array(CAPS), room=room)
            for b, units in enumerate(single):
                count = 0
                for unit, residency in enumerate(units):
                    if due[b] >= 0:
                        plans, _ = residency.plan(ids[b].reshape(4, -1)[unit][None], int(due[b]), CAPS[b], int(room[b]))
                        count += len(plans[0].fetch_ids)
                assert fetched[b] == count
                moved += count
            attended = batch.attended()
            for b, units in enumerate(single):
                for unit, residency in enumerate(units):
                    found = np.flatnonzero(attended[b].reshape(4, -1)[unit])
                    np.testing.assert_array_equal(found, residency.attended()[0])
    assert moved > 50


def test_policies_of_each_prompt_admit_by_its_own_ranking() -> None:
    rankings = np.stack([np.arange(11), np.arange(11)[::-1]])[:, None, None].repeat(2, 1).repeat(2, 2).astype(np.int32)
    kept = np.array([3, 5, 3, 5])
    batch = ResidencyBatch(LAYERS, HEADS, kept, kept, np.zeros(4, dtype=bool), 12, 1)
    batch.admit(rankings, 12)
    for policy, first in ((0, 0), (1, 0), (2, 8), (3, 6)):
        found = np.flatnonzero(batch.attended()[policy, 1, 1])
        np.testing.assert_array_equal(found, np.arange(first, first + kept[policy]))
