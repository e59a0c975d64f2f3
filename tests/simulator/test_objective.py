from __future__ import annotations

from typing import Any

import pytest

from simulator.metrics import COLUMNS, METRICS
from simulator.objective import (
    BETTER_LARGE,
    best_by_system,
    best_row,
    grid_edges,
    is_admissible,
    nearest_row,
    neighbours,
    require_objective,
    swept_parameters,
)
from traces.errors import InputError

FAST = "throughput_tokens_per_s"


def _row(tokens_per_s: float | None, recall: float | None, **values: Any) -> dict[str, Any]:
    base = {"status": "ok", "system": "oasiskv", FAST: tokens_per_s, "recall": recall, "min_recall": 0.9}
    return dict.fromkeys(COLUMNS) | base | values


def test_best_is_the_fastest_with_enough_recall() -> None:
    rows = [_row(900, 0.2), _row(300, 0.95), _row(400, 0.9), _row(500, 0.899)]
    assert best_row(rows, FAST) is rows[2]
    assert best_row(rows, "recall") is rows[1]


def test_of_equally_fast_points_the_one_with_more_recall_wins_then_the_first() -> None:
    rows = [_row(400, 0.91), _row(400, 0.95), _row(400, 0.95)]
    assert best_row(rows, FAST) is rows[1]


@pytest.mark.parametrize("bad", [{"status": "does_not_fit"}, {"status": "failed"}, {"recall": None}, {FAST: None}])
def test_a_point_without_result_is_never_best(bad: dict[str, Any]) -> None:
    rows = [_row(900, 0.99, **bad) if not bad.keys() & {"recall", FAST} else _row(900, 0.99) | bad, _row(1, 0.95)]
    assert best_row(rows, FAST) is rows[1]


def test_without_an_admissible_point_the_nearest_is_named() -> None:
    rows = [_row(900, 0.5), _row(100, 0.88), _row(200, 0.88), _row(None, None, status="does_not_fit")]
    assert best_row(rows, FAST) is None
    assert nearest_row(rows, FAST) is rows[2]
    assert nearest_row(rows[3:], FAST) is None


def test_the_threshold_is_each_rows_own() -> None:
    loose, strict = _row(900, 0.8, min_recall=0.75), _row(999, 0.8, min_recall=0.85)
    assert (is_admissible(loose), is_admissible(strict)) == (True, False)
    assert best_row([loose, strict], FAST) is loose
    assert nearest_row([loose, strict], FAST) is loose


def test_best_by_system_falls_back_to_nearest_then_to_the_first() -> None:
    rows = [
        _row(1, 0.95, system="dense"),
        _row(2, 0.95, system="dense"),
        _row(9, 0.1, system="random"),
        _row(8, 0.2, system="random"),
        _row(None, None, system="huge", status="does_not_fit"),
        _row(None, None, system="huge", status="does_not_fit"),
    ]
    assert [id(row) for row in best_by_system(rows, FAST)] == [id(rows[1]), id(rows[3]), id(rows[4])]


def test_swept_parameters_do_not_count_null_as_a_value() -> None:
    rows = [
        _row(1, 1, **{"policy.fetch_cap": None, "policy.lookahead_k": 1}),
        _row(1, 1, **{"policy.fetch_cap": 0.1, "policy.lookahead_k": 2, "policy.transport": "gather"}),
        _row(1, 1, **{"policy.fetch_cap": 0.1, "policy.lookahead_k": 2, "policy.transport": "ce-batched"}),
    ]
    assert swept_parameters(rows) == ["policy.lookahead_k", "policy.transport"]


def test_neighbours_are_one_grid_step_away_in_one_parameter() -> None:
    rows = [
        _row(cap, 1, **{"policy.fetch_cap": cap, "placement.host_numa": numa})
        for cap in (0.02, 0.05, 0.1, 0.2, 1.0)
        for numa in ("local", "far", "interleave")
    ]
    center = next(row for row in rows if row["policy.fetch_cap"] == 0.1 and row["placement.host_numa"] == "local")
    found = [
        (item.parameter, item.row["policy.fetch_cap"], item.row["placement.host_numa"])
        for item in neighbours(rows, center)
    ]
    assert found == [
        ("policy.fetch_cap", 0.05, "local"),
        ("policy.fetch_cap", 0.2, "local"),
        ("placement.host_numa", 0.1, "far"),
        ("placement.host_numa", 0.1, "interleave"),
    ]
    edge = rows[0]
    caps = [item.row["policy.fetch_cap"] for item in neighbours(rows, edge) if item.parameter == "policy.fetch_cap"]
    assert caps == [0.05]


@pytest.mark.parametrize("name", BETTER_LARGE)
def test_every_column_that_is_better_large_can_be_maximised(name: str) -> None:
    require_objective(name)
    assert name in METRICS


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("throughput", "'throughput' is not a result column; nearest: throughput_tokens_per_s"),
        ("tpot_mean_s", "tpot_mean_s is not better when large"),
        ("bound", "bound is not better when large"),
    ],
)
def test_other_columns_are_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        require_objective(name)


def test_edges_of_the_grid_are_named_and_names_and_single_values_are_not() -> None:
    rows = [
        _row(1, 1, **{"policy.fetch_cap": cap, "workload.batch_size": batch, "placement.host_numa": numa, "seed": 0})
        for cap, batch, numa in ((0.1, 1, "local"), (0.2, 2, "far"), (1.0, 3, "far"), (None, 2, None))
    ]
    assert grid_edges(rows, rows[0]) == {"workload.batch_size": "smallest", "policy.fetch_cap": "smallest"}
    assert grid_edges(rows, rows[1]) == {}
    assert grid_edges(rows, rows[2]) == {"workload.batch_size": "largest", "policy.fetch_cap": "largest"}
    assert grid_edges(rows, rows[3]) == {}
