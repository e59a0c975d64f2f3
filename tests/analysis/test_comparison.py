from __future__ import annotations

import pytest

from analysis.comparison import draw_comparison
from analysis.selection import Case, NotDrawn, best_by_system


def test_one_bar_per_system_at_its_best_point_best_on_top(sweep_frame):
    case = Case(sweep_frame)
    axes = draw_comparison(case).axes[0]
    bars = {bar.get_gid(): (bar.get_y(), bar.get_width()) for bar in axes.patches}
    expected = best_by_system(case).set_index("system")[case.objective]
    assert {name: width for name, (_, width) in bars.items()} == pytest.approx(expected.to_dict())
    assert sorted(bars, key=lambda name: -bars[name][0]) == expected.sort_values(ascending=False).index.tolist()


def test_systems_that_keep_too_little_recall_are_hatched_and_explained(sweep_frame):
    figure = draw_comparison(Case(sweep_frame.assign(min_recall=1.1)))
    assert all(bar.get_hatch() for bar in figure.axes[0].patches)
    assert figure.texts[0].get_text() == "No system keeps the recall threshold"


def test_one_system_is_no_comparison(sweep_frame):
    with pytest.raises(NotDrawn, match="fewer than two"):
        draw_comparison(Case(sweep_frame[sweep_frame["system"] == "dense"]))
