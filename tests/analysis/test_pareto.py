from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.pareto import draw_pareto, pareto_frontier
from analysis.selection import Case, NotDrawn, best_buildable, is_admissible

OBJECTIVE = "throughput_tokens_per_s"
POINTS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=25)


def dominates(a, b):
    return a[0] >= b[0] and a[1] >= b[1] and a != b


@given(POINTS)
def test_the_frontier_is_every_point_that_nothing_dominates(points):
    frontier = pareto_frontier([p[0] for p in points], [p[1] for p in points])
    kept = [points[i] for i in frontier]
    assert len(set(kept)) == len(kept)
    assert set(kept) == {p for p in points if not any(dominates(q, p) for q in points)}
    assert kept == sorted(kept)


def scatters(axes):
    return {c.get_gid(): np.asarray(c.get_offsets()) for c in axes.collections if c.get_gid()}


def test_every_point_is_drawn_and_pale_where_it_is_not_admissible(sweep_frame):
    drawn = scatters(draw_pareto(Case(sweep_frame)).axes[0])
    for system, rows in sweep_frame.groupby("system"):
        keeps = is_admissible(rows)
        for gid, part in ((system, rows[keeps]), (f"{system}|below", rows[~keeps])):
            assert drawn[gid] == pytest.approx(part[["recall", OBJECTIVE]].to_numpy())


def test_the_drawn_frontier_leaves_out_what_cannot_be_built(sweep_frame):
    axes = draw_pareto(Case(sweep_frame)).axes[0]
    line = next(line for line in axes.lines if line.get_gid() == "frontier")
    buildable = sweep_frame[sweep_frame["system"] != "oasiskv-oracle"]
    expected = buildable.iloc[pareto_frontier(buildable["recall"].tolist(), buildable[OBJECTIVE].tolist())]
    assert np.column_stack(line.get_data()) == pytest.approx(expected[["recall", OBJECTIVE]].to_numpy())


def test_ring_and_threshold_are_those_of_the_best_point(sweep_frame):
    case = Case(sweep_frame)
    axes, best = draw_pareto(case).axes[0], best_buildable(case)
    assert best is not None
    assert scatters(axes)["best"] == pytest.approx(np.array([[best["recall"], best[OBJECTIVE]]]))
    threshold = next(line for line in axes.lines if line.get_gid() == "threshold")
    assert list(threshold.get_xdata()) == [best["min_recall"]] * 2


def test_without_an_admissible_point_the_title_says_so(sweep_frame):
    figure = draw_pareto(Case(sweep_frame.assign(min_recall=1.1)))
    assert figure.texts[0].get_text() == "No point keeps the recall threshold"
    assert "best" not in scatters(figure.axes[0])


def test_a_single_recall_is_no_trade_off(make_row):
    with pytest.raises(NotDrawn, match="fewer than two points"):
        draw_pareto(Case(pd.DataFrame([make_row("dense")])))
