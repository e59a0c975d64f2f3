from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import Rectangle

from analysis.heatmap import draw_heatmap, grid_systems, make_grid
from analysis.selection import Case, NotDrawn, is_admissible

OBJECTIVE = "throughput_tokens_per_s"


@pytest.fixture(scope="module")
def figure(sweep_frame):
    return draw_heatmap(Case(sweep_frame))


def images(figure):
    return [image for axes in figure.axes for image in axes.images if str(image.get_gid()).startswith("k=")]


def test_cells_equal_the_frame(sweep_frame, figure):
    grid = make_grid(Case(sweep_frame))
    assert grid.system == "oasiskv"
    panels = images(figure)
    assert len(panels) == 3
    numa = grid.point["placement.host_numa"]
    for k, image in zip((1, 2, 4), panels, strict=True):
        data = image.get_array()
        for y, cap in enumerate((0.02, 0.05, 0.1, 0.2, 1.0)):
            for x, block in enumerate((8, 16, 32, 64)):
                row = sweep_frame[
                    (sweep_frame["system"] == "oasiskv")
                    & (sweep_frame["policy.fetch_cap"] == cap)
                    & (sweep_frame["policy.block_size_tokens"] == block)
                    & (sweep_frame["policy.lookahead_k"] == k)
                    & (sweep_frame["placement.host_numa"] == numa)
                ]
                assert data[y, x] == row[OBJECTIVE].item()


def test_cells_below_the_threshold_are_hatched_and_no_others(sweep_frame, figure):
    case = Case(sweep_frame)
    hatched = sum(
        patch.get_hatch() is not None for axes in figure.axes for patch in axes.patches if isinstance(patch, Rectangle)
    )
    assert hatched == int((~is_admissible(make_grid(case).rows)).sum())
    assert 0 < hatched < len(make_grid(case).rows)


def test_the_framed_cell_is_the_best_of_the_system(sweep_frame, figure):
    grid = make_grid(Case(sweep_frame))
    own = sweep_frame[(sweep_frame["system"] == "oasiskv") & is_admissible(sweep_frame)]
    assert grid.point[OBJECTIVE] == own[OBJECTIVE].max()
    frames = [
        (axes.get_title(loc="left"), patch.get_x(), patch.get_y())
        for axes in figure.axes
        for patch in axes.patches
        if isinstance(patch, Rectangle) and patch.get_linewidth() > 2
    ]
    x, y = grid.blocks.index(grid.point["policy.block_size_tokens"]), grid.caps.index(grid.point["policy.fetch_cap"])
    assert frames == [
        (f"lookahead k = {grid.point['policy.lookahead_k']:g}", pytest.approx(x - 0.47), pytest.approx(y - 0.46))
    ]


def test_points_that_do_not_fit_or_were_not_run_say_so(sweep_frame):
    rows = sweep_frame.copy()
    own = (rows["system"] == "oasiskv") & (rows["policy.fetch_cap"] == 0.02)
    rows.loc[own & (rows["policy.block_size_tokens"] == 8), "status"] = "does_not_fit"
    rows.loc[own & (rows["policy.block_size_tokens"] == 16), "status"] = "failed"
    rows = rows[~(own & (rows["policy.block_size_tokens"] == 32))]
    figure = draw_heatmap(Case(rows))
    assert np.isnan(np.ma.filled(images(figure)[0].get_array(), np.nan)[0, :3]).all()
    said = [text.get_text() for text in figure.axes[0].texts]
    assert [said.count(word) for word in ("does\nnot fit", "failed", "not run")] == [1, 1, 1]


def test_systems_are_offered_best_first_and_bounds_last(sweep_frame):
    assert grid_systems(Case(sweep_frame)) == ["oasiskv", "prefetch-previous", "oasiskv-oracle"]
    assert make_grid(Case(sweep_frame), "oasiskv-oracle").system == "oasiskv-oracle"


def test_without_lookahead_there_is_one_panel(sweep_frame):
    rows = sweep_frame[sweep_frame["system"] == "prefetch-previous"].assign(**{"policy.lookahead_k": np.nan})
    assert len(images(draw_heatmap(Case(rows)))) == 1


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("policy.fetch_cap", 0.2, "fetch cap not varied"),
        ("policy.block_size_tokens", 16, "block size not varied"),
    ],
)
def test_an_axis_that_does_not_vary_is_the_reason(sweep_frame, column, value, reason):
    with pytest.raises(NotDrawn, match=reason):
        draw_heatmap(Case(sweep_frame[sweep_frame[column] == value]))


def test_four_lookaheads_are_two_by_two_with_block_sizes_under_each(sweep_frame):
    fourth = sweep_frame[sweep_frame["policy.lookahead_k"] == 4].assign(**{"policy.lookahead_k": 8})
    figure = draw_heatmap(Case(pd.concat([sweep_frame, fourth], ignore_index=True)))
    panels = [axes for axes in figure.axes if axes.images]
    figure.canvas.draw()
    assert len({axes.get_position().x0 for axes in panels}) == len({axes.get_position().y0 for axes in panels}) == 2
    for axes in panels:
        labels = [tick.label1 for tick in axes.xaxis.get_major_ticks()]
        assert [label.get_text() for label in labels if label.get_visible()] == ["8", "16", "32", "64"]
    assert [bool(axes.get_xlabel()) for axes in panels] == [False, False, True, True]
