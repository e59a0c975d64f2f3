from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.breakdown import PARTS, WAIT, draw_breakdown
from analysis.selection import Case, NotDrawn, best_by_system
from simulator.metrics import BREAKDOWN


def drawn(axes):
    """{component: widths by row} of the drawn stack."""
    return {bars.get_label(): [bar.get_width() for bar in bars] for bars in axes.containers}


def test_every_component_of_the_contract_has_a_look():
    assert set(PARTS) == set(BREAKDOWN)
    assert list(PARTS)[-1] == WAIT


def test_bars_sum_to_the_step_in_ms_and_each_part_is_the_tables(sweep_frame):
    case = Case(sweep_frame)
    left, right = draw_breakdown(case).axes
    points = best_by_system(case).iloc[::-1].reset_index(drop=True)
    assert [t.get_text().removesuffix(" *") for t in left.get_yticklabels()] == list(points["system"])
    stack = drawn(left)
    assert np.sum(list(stack.values()), axis=0) == pytest.approx(points["tpot_mean_s"] * 1e3, abs=1e-9)
    for part, widths in stack.items():
        assert widths == pytest.approx(points[part].astype(float) * 1e3)
    assert np.sum(list(drawn(right).values()), axis=0) == pytest.approx([100.0] * len(points))


def test_bars_of_a_row_touch_and_do_not_overlap(sweep_frame):
    left = draw_breakdown(Case(sweep_frame)).axes[0]
    edges = np.zeros(len(left.get_yticklabels()))
    for bars in left.containers:
        assert [bar.get_x() for bar in bars] == pytest.approx(edges)
        edges = edges + [bar.get_width() for bar in bars]


def test_components_that_are_zero_everywhere_are_left_out(sweep_frame):
    left = draw_breakdown(Case(sweep_frame)).axes[0]
    assert "t_allreduce_s" not in drawn(left)
    assert WAIT in drawn(left)


def test_the_title_names_who_waits_longest(sweep_frame, make_row):
    assert draw_breakdown(Case(sweep_frame)).texts[0].get_text().startswith("retrieval waits")
    idle = Case(pd.DataFrame([make_row("dense"), make_row("quest", block=16)]))
    assert "No system's step waits" in draw_breakdown(idle).texts[0].get_text()


def test_without_a_breakdown_nothing_is_drawn(sweep_frame):
    with pytest.raises(NotDrawn, match="latency breakdown"):
        draw_breakdown(Case(sweep_frame.assign(**dict.fromkeys(BREAKDOWN, np.nan))))
