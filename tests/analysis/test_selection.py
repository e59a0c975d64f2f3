from __future__ import annotations

import pandas as pd
import pytest

from analysis.selection import (
    Case,
    NotDrawn,
    best_buildable,
    best_by_system,
    best_point,
    is_admissible,
    left_out,
    matching,
    nearest_point,
    split_cases,
    swept_parameters,
)

OBJECTIVE = "throughput_tokens_per_s"


def test_best_is_the_fastest_at_or_above_the_threshold_and_never_below_it(sweep_frame):
    best = best_point(sweep_frame, OBJECTIVE)
    keeps = sweep_frame[(sweep_frame["status"] == "ok") & (sweep_frame["recall"] >= sweep_frame["min_recall"])]
    assert best is not None
    assert best[OBJECTIVE] == keeps[OBJECTIVE].max()
    assert best["recall"] >= best["min_recall"]


def test_admissible_needs_a_known_recall_at_or_above_the_threshold(make_row):
    rows = pd.DataFrame(
        [
            make_row("dense", recall=0.5, min_recall=0.5),
            make_row("dense", recall=0.4, min_recall=0.5),
            make_row("dense", recall=None, min_recall=0.5),
            make_row("dense", recall=None, min_recall=None),
            make_row("dense", recall=0.9, min_recall=0.5, status="does_not_fit"),
        ]
    ).astype({"recall": float, "min_recall": float})
    assert is_admissible(rows).tolist() == [True, False, False, False, False]
    assert is_admissible(rows.assign(min_recall=float("nan"))).tolist() == [True, True, False, False, False]


def test_without_an_admissible_point_the_nearest_by_recall_is_named(make_row):
    rows = pd.DataFrame([make_row("quest", block=8, min_recall=0.999), make_row("quest", block=64, min_recall=0.999)])
    assert best_point(rows, OBJECTIVE) is None
    nearest = nearest_point(rows, OBJECTIVE)
    assert nearest is not None
    assert nearest["policy.block_size_tokens"] == 8


def test_of_equally_fast_points_the_one_with_more_recall_is_best(make_row):
    rows = pd.DataFrame([make_row("quest", block=p) for p in (64, 8, 16)]).assign(**{OBJECTIVE: 100.0})
    best = best_point(rows, OBJECTIVE)
    assert best is not None
    assert best["policy.block_size_tokens"] == 8
    rows["recall"] = 1.0
    first = best_point(rows, OBJECTIVE)
    assert first is not None
    assert first["policy.block_size_tokens"] == 64


def test_a_bound_is_not_the_best_that_can_be_built(sweep_frame, make_row):
    rows = pd.DataFrame([make_row("oasiskv", 1.0, 16, 1, "local"), make_row("oasiskv-oracle", 1.0, 16, 1, "local")])
    rows[OBJECTIVE] = [1000.0, 2000.0]
    best = best_buildable(Case(rows))
    assert best is not None
    assert best["system"] == "oasiskv"
    alone = best_buildable(Case(rows[rows["system"] == "oasiskv-oracle"]))
    assert alone is not None
    assert alone["system"] == "oasiskv-oracle"


def test_each_system_is_ranked_by_its_own_best(sweep_frame):
    ranked = best_by_system(Case(sweep_frame))
    assert sorted(ranked["system"]) == sorted(sweep_frame["system"].unique())
    assert ranked[OBJECTIVE].is_monotonic_decreasing
    for _, row in ranked.iterrows():
        assert sweep_frame.loc[row["row"], "point_key"] == row["point_key"]


def test_systems_that_never_ran_are_listed_with_the_reason(make_row):
    rows = pd.DataFrame([make_row("quest", block=16), make_row("dense", status="does_not_fit")])
    assert left_out(Case(rows)) == ["dense (does not fit)"]
    with pytest.raises(NotDrawn, match="no point ran"):
        best_by_system(Case(rows[rows["system"] == "dense"]))


def test_matching_holds_everything_but_the_freed_parameters(sweep_frame):
    point = sweep_frame[sweep_frame["system"] == "oasiskv"].iloc[0]
    line = matching(sweep_frame, point, {"policy.fetch_cap"})
    assert sorted(line["policy.fetch_cap"]) == sorted(sweep_frame["policy.fetch_cap"].dropna().unique())
    for column in ("system", "policy.block_size_tokens", "policy.lookahead_k", "placement.host_numa"):
        assert set(line[column]) == {point[column]}


def test_swept_parameters_include_keys_beyond_the_standard_ones(sweep_frame):
    frame = sweep_frame.assign(**{"policy.slack_blocks": range(len(sweep_frame)), "mapping": range(len(sweep_frame))})
    swept = swept_parameters(frame)
    assert "policy.slack_blocks" in swept
    assert "mapping" not in swept
    assert "workload.batch_size" not in swept


def test_models_and_contexts_are_separate_cases(sweep_frame):
    other = pd.concat([sweep_frame, sweep_frame.assign(model="another")], ignore_index=True)
    cases = split_cases(other, OBJECTIVE)
    assert [len(case.rows) for case in cases] == [len(sweep_frame)] * 2
    assert [case.rows["model"].iloc[0] for case in cases] == ["Qwen3-8B", "another"]
