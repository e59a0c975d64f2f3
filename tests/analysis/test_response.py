from __future__ import annotations

import pandas as pd
import pytest

from analysis.response import draw_response, response_line, response_lines
from analysis.selection import Case, NotDrawn, best_by_system

OBJECTIVE = "throughput_tokens_per_s"


@pytest.fixture(scope="module")
def figure(sweep_frame):
    return draw_response(Case(sweep_frame))


def panel(figure, xlabel_column, row, num_columns):
    return figure.axes[row * num_columns + xlabel_column]


def test_axes_are_the_swept_parameters_in_schema_order(sweep_frame):
    assert list(response_lines(Case(sweep_frame))) == [
        "policy.block_size_tokens",
        "policy.fetch_cap",
        "policy.lookahead_k",
        "placement.host_numa",
    ]


def test_lines_hold_the_rows_of_the_table_with_the_rest_at_best(sweep_frame, figure):
    case = Case(sweep_frame)
    points = best_by_system(case)
    best = case.rows.loc[points.loc[points["system"] == "oasiskv", "row"].item()]
    for column, parameter in enumerate(response_lines(case)):
        expected = response_line(case, best, parameter)
        assert len(expected) == sweep_frame.loc[sweep_frame["system"] == "oasiskv", parameter].nunique()
        for row, (metric, scale) in enumerate(((OBJECTIVE, 1), ("recall", 1), ("exposed_transfer_s", 1e3))):
            axes = panel(figure, column, row, 4)
            line = next(line for line in axes.lines if line.get_gid() == "oasiskv")
            assert sorted(line.get_ydata()) == pytest.approx(sorted(expected[metric] * scale))


def test_a_system_that_ignores_a_parameter_is_a_dotted_level(sweep_frame, figure):
    dense = sweep_frame.loc[sweep_frame["system"] == "dense", OBJECTIVE].item()
    dotted = [line.get_ydata()[0] for line in figure.axes[0].lines if line.get_linestyle() == ":"]
    assert dotted == [dense]


def test_a_budget_that_follows_the_context_is_followed(make_row):
    contexts = (4096, 8192, 16384)
    rows = pd.DataFrame(
        [
            make_row("oasiskv", cap, 16, 1, "local")
            | {"workload.context_tokens": c, "trace_group": f"g{c}", "policy.kv_budget_tokens": c // 8}
            for c in contexts
            for cap in (0.2, 1.0)
        ]
    )
    case = Case(rows)
    point = case.rows.iloc[0]
    assert sorted(response_line(case, point, "workload.context_tokens")["workload.context_tokens"]) == list(contexts)
    assert list(response_lines(case)) == ["workload.context_tokens", "policy.fetch_cap"]


def test_points_that_do_not_fit_are_crosses_and_not_on_the_line(make_row):
    rows = [make_row("dense", batch=b) for b in (1, 8, 64)]
    rows[2] |= {"status": "does_not_fit", OBJECTIVE: None}
    figure = draw_response(Case(pd.DataFrame(rows).astype({OBJECTIVE: float})))
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["×"]
    assert list(next(line for line in axes.lines if line.get_gid() == "dense").get_xdata()) == [0, 1]


def test_wide_ranges_use_a_log_axis(make_row):
    rows = pd.DataFrame([make_row("dense", batch=b) for b in (1, 8, 64)]).assign(**{OBJECTIVE: [10.0, 100.0, 1000.0]})
    assert draw_response(Case(rows)).axes[0].get_yscale() == "log"


def test_many_parameters_are_split_into_bands(make_row):
    extra = ("policy.slack_blocks", "policy.gather_ctas")
    base = [make_row("oasiskv", 0.2, 16, 1, "local") | dict.fromkeys(extra, 1)]
    for key in ("workload.batch_size", "policy.block_size_tokens", "policy.lookahead_k", "seed", *extra):
        base.append(base[0] | {key: 5, OBJECTIVE: base[0][OBJECTIVE] - 1})
    five, six = (draw_response(Case(pd.DataFrame(base[:n]))) for n in (6, 7))
    assert [len({axes.get_position().y0 for axes in f.axes}) for f in (five, six)] == [3, 6]
    assert [sum(axes.get_visible() for axes in f.axes) for f in (five, six)] == [5 * 3, 6 * 3]


@pytest.mark.parametrize(
    ("systems", "reason"), [(["dense"], "no parameter is varied"), (["dense", "quest"], "besides")]
)
def test_nothing_swept_is_the_reason(make_row, systems, reason):
    with pytest.raises(NotDrawn, match=reason):
        draw_response(Case(pd.DataFrame([make_row(s) for s in systems])))


def test_waits_of_nothing_have_no_number_but_zero(make_row):
    rows = pd.DataFrame([make_row("dense", batch=b) for b in (1, 8)]).assign(exposed_transfer_s=0.0)
    axes = draw_response(Case(rows)).axes[2]
    assert list(axes.get_yticks()) == [0]
    assert axes.get_ylabel() == "exposed wait (ms)"


def test_systems_with_equal_results_do_not_hide_each_other(make_row):
    rows = pd.DataFrame([make_row(s, batch=b) | {"recall": 0.9} for s in ("dense", "quest") for b in (1, 8)])
    recall = draw_response(Case(rows)).axes[1]
    places = [tuple(line.get_xdata()) for line in recall.lines if line.get_gid() in ("dense", "quest")]
    assert len(places) == len({x for place in places for x in place}) / 2 == 2
