"""Means over demand, and the two small tables that feed it: cap credit and predictor rows."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.demand import COUNT_FIELDS, SHARE_FIELDS, Demand
from simulator.fetch_cap import allowed_blocks, default_slack_blocks, exact_share
from simulator.predictors import interleave, random_ranking


def small_demand(**changes) -> Demand:
    """Four steps, one layer, two heads, K = 4; steady rows 1 and 2."""
    values: dict = {name: np.zeros((4, 1), np.int32) for name in COUNT_FIELDS}
    values |= {name: np.zeros((4, 1)) for name in SHARE_FIELDS}
    values |= {"num_blocks": np.array([9, 9, 10, 10], np.int32), "num_kv_heads": 2, "num_kept": 4, "num_slots": 5}
    values |= {"lookahead_k": 1, "admission_blocks": 8, "steady_start": 1, "steady_stop": 3}
    return Demand(**values | changes)


def test_means_use_steady_rows_and_all_heads() -> None:
    rows = np.array([[100], [6], [4], [100]], np.int32)
    demand = small_demand(hit=rows, fetched=rows, recall=rows / 10.0, recall_upper=rows / 8.0, overlap=rows / 4.0)
    assert demand.hit_rate() == demand.churn() == 10 / 16
    assert demand.mean_overlap() == 10 / 16
    assert demand.mean_recall() == pytest.approx(0.25)
    assert demand.mean_recall_upper() == pytest.approx(10 / 32)
    assert (demand.num_steps, demand.num_layers) == (4, 1)


def test_hit_rate_counts_the_open_block_where_everything_fits() -> None:
    demand = small_demand(hit=np.full((4, 1), 6, np.int32), num_blocks=np.array([3, 3, 3, 3], np.int32))
    assert demand.hit_rate() == 1


@pytest.mark.parametrize(
    ("share", "num_blocks", "expected"),
    [
        (0.0, 128, [0, 0, 0, 0]),
        (0.05, 128, [6, 6, 7, 6]),
        (1 / 4, 2, [0, 1, 0, 1]),
        (0.01, 30, [0, 0, 0, 1]),
        (1.0, 7, [7, 7, 7, 7]),
    ],
)
def test_allowance_by_hand(share: float, num_blocks: int, expected: list[int]) -> None:
    assert allowed_blocks(exact_share(share), num_blocks, 4).tolist() == expected


@given(st.floats(0, 1), st.integers(1, 5000), st.integers(1, 300))
def test_allowance_adds_up_to_the_cap(share: float, num_blocks: int, num_steps: int) -> None:
    allowed = allowed_blocks(exact_share(share), num_blocks, num_steps)
    exact = Fraction(str(share)) * num_blocks
    assert allowed.sum() == exact * num_steps // 1
    assert set(allowed.tolist()) <= {exact // 1, exact // 1 + 1}


def test_share_is_the_decimal_that_was_written() -> None:
    assert exact_share(0.1) == Fraction(1, 10)
    assert allowed_blocks(exact_share(0.1), 10, 1000).tolist() == [1] * 1000, "in binary 0.1 · 10 · t drifts"


@pytest.mark.parametrize(("k", "share", "num_blocks", "slack"), [(1, 0.05, 128, 7), (2, 1.0, 16, 32), (4, 0.0, 64, 0)])
def test_default_slack_holds_what_can_be_in_flight(k: int, share: float, num_blocks: int, slack: int) -> None:
    assert default_slack_blocks(k, share, num_blocks) == slack


def test_interleave_is_rank_by_rank_nearest_draft_first() -> None:
    near = np.array([[9, 9], [9, 9], [0, 1], [4, 5]], np.int32).reshape(4, 1, 1, 2)
    far = np.array([[9, 9], [9, 9], [1, 2], [4, -1]], np.int32).reshape(4, 1, 1, 2)
    merged = interleave([near, far], 2)[:, 0, 0].tolist()
    assert merged[:2] == [[-1] * 4] * 2, "no draft reaches the first rows"
    assert merged[2] == [9, 1, 2, -1], "row 2: draft 1 of row 1 with draft 2 of row 2"
    assert merged[3] == [0, 4, 1, -1]


def test_random_ranking_draws_distinct_blocks_known_at_the_plan() -> None:
    num_blocks = np.array([3, 3, 4, 5, 9, 9], np.int32)
    ids = random_ranking((4, 7), 2, num_blocks, 4, 2, seed=11)
    assert (ids[:2] == -1).all()
    for row, known in ((2, 2), (3, 2), (4, 3), (5, 4)):
        for head in ids[row].reshape(4, 4).tolist():
            assert sorted(head)[-min(known, 4) :] == list(range(known))[:4]
            assert head[min(known, 4) :] == [-1] * (4 - min(known, 4))
    alone = random_ranking((7,), 2, num_blocks, 4, 2, seed=11)
    assert np.array_equal(alone[:, 0], ids[:, 1]), "a layer's draw does not depend on what else is recorded"
    assert not np.array_equal(random_ranking((4, 7), 2, num_blocks, 4, 2, seed=12), ids)


def test_random_ranking_is_uniform() -> None:
    ids = random_ranking((0,), 1, np.full(4001, 11, np.int32), 3, 1, seed=0)[1:, 0, 0]
    counts = np.bincount(ids.ravel(), minlength=10)
    assert abs(counts - 1200).max() < 4 * np.sqrt(1200 * 0.7), "four sigma of 4000 draws of 3 in 10"
