"""Recall under fetch caps: agrees with the table of overlaps where nothing is capped, and follows the cap."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.cap_table import FETCH_CAPS, cap_rows
from traces.catalog import resolve
from traces.group import TraceGroup
from traces.overlap import overlap_rows
from traces.reader import open_trace

SIZE, BUDGET = 64, 512


@pytest.fixture(scope="module")
def group() -> TraceGroup:
    return open_trace(resolve("smollm2-135m-reasoning")).group("reasoning")


def test_uncapped_rows_are_those_of_the_overlap_table(group: TraceGroup) -> None:
    rows = {(r["predictor"], r["distance"], r["fetch_cap"]): r for r in cap_rows(group, SIZE, BUDGET, 2)}
    overlaps = [r for r in overlap_rows(group, SIZE, BUDGET // SIZE) if r["guess"] == "all" and r["distance"] == 1]

    def mean(predictor: str, column: str) -> float:
        own = [r[column] for r in overlaps if r["predictor"] == predictor and r["selector"] == "minmax"]
        return float(np.mean(own))

    # On demand steps 1 … S − 1 count, as for distance 1 there.
    assert rows["current", 0, 1.0]["recall"] == pytest.approx(mean("previous", "recall_true"), abs=1e-5)
    # Replay's last step has no plan and is not counted: one of 127. Its overlap is over min(K, n), as here.
    for predictor in ("draft", "previous"):
        row = rows[predictor, 1, 1.0]
        assert row["overlap"] == pytest.approx(mean(predictor, "overlap"), abs=0.005)
    assert rows["oracle", 1, 1.0]["hit_rate"] > 0.999
    assert rows["oracle", 1, 1.0]["overlap"] == 1
    for (_, _, cap), row in rows.items():
        assert row["churn"] <= cap + 1e-2
        assert row["recall"] == row["recall_upper"]
    assert {cap for _, _, cap in rows} == set(FETCH_CAPS)


def test_drafts_over_a_working_set_replay_under_their_own_rules() -> None:
    trace = open_trace(resolve("smollm2-135m-sparse-drafts"))
    group = trace.group(trace.group_names[0])
    rows = [row for row in cap_rows(group, 16, 512, 1, fetch_caps=(0.05,)) if row["rules"] == "recorded"]
    assert [(row["predictor"], row["fetch_cap"]) for row in rows] == [("draft", 0.05), ("draft_sparse", 0.05)]
    usual = next(r for r in cap_rows(group, 16, 512, 1, fetch_caps=(0.05,)) if r["predictor"] == "draft")
    assert {k: v for k, v in rows[0].items() if k != "rules"} == {k: v for k, v in usual.items() if k != "rules"}
    assert rows[1]["hit_rate"] != rows[0]["hit_rate"]
    assert not [row for row in cap_rows(group, 16, 512, 1, fetch_caps=(1.0,)) if row["predictor"] == "draft_sparse"][1:]
