"""Figures of overlap and quality tables: every series is drawn where the table says."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis.overlap_plots import draw_block_sizes, draw_distance, draw_layers, load_overlap
from analysis.overlap_plots import draw_recall as draw_overlap_recall
from analysis.quality_plots import draw_bytes, draw_recall, load_quality, rank_correlation
from traces.errors import InputError


def overlap_frame() -> pd.DataFrame:
    rows = []
    for trace, context in (("m-code-4k", 4096), ("m-needle-7k", 7680)):
        for size, count in ((16, 20), (16, 32), (16, 64), (8, 64)):
            for layer in (0, 3):
                for distance in (1, 2):
                    for predictor, base in (("draft", 0.9), ("previous", 0.8), ("random", 0.1)):
                        rows.append(
                            {
                                "trace": trace, "context_tokens": context, "block_size_tokens": size,
                                "num_blocks": count, "layer": layer, "predictor": predictor, "distance": distance,
                                "overlap": base - 0.1 * (distance - 1) - 0.02 * layer, "recall": base,
                                "recall_true": 0.95,
                            }
                        )  # fmt: skip
    return pd.DataFrame(rows)


def lines(figure: Figure, gid: str) -> list[list[float]]:
    return [list(line.get_ydata()) for axes in figure.axes for line in axes.lines if line.get_gid() == gid]


def test_overlap_lines_are_means_of_the_table() -> None:
    frame = overlap_frame()
    figure = draw_distance(frame)
    assert lines(figure, "draft") == [pytest.approx([0.87, 0.77])] * 2
    assert [axes.get_title() for axes in figure.axes] == ["code, 4K", "needle, 7.5K"]
    assert lines(draw_layers(frame), "previous") == [pytest.approx([0.8, 0.74])] * 2
    assert lines(draw_overlap_recall(frame), "true") == [pytest.approx([0.95, 0.95])] * 2
    assert lines(draw_block_sizes(frame), "random")[0] == pytest.approx([0.07, 0.07])
    with pytest.raises(InputError, match="no trace has several"):
        draw_block_sizes(frame[frame["block_size_tokens"] == 16])


def quality_frame() -> pd.DataFrame:
    rows = []
    for predictor, recall in (("draft1", 0.9), ("previous", 0.8), ("random", 0.5)):
        for budget in (256, 512):
            kl = (1 - recall) * 256 / budget
            rows.append(
                {
                    "predictor": predictor, "policy.kv_budget_tokens": budget, "kl": kl, "kl_low": 0.9 * kl,
                    "kl_high": 1.1 * kl, "recall": recall + budget / 1e4, "h2d_bytes_per_token": 1e6 * budget,
                    "num_prompts": 4, "num_steps": 96,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def test_quality_marks_are_at_the_table_s_values() -> None:
    frame = quality_frame()
    for draw, column, scale in ((draw_bytes, "h2d_bytes_per_token", 1e-6), (draw_recall, "recall", 1.0)):
        marks = {c.get_gid(): c for c in draw(frame).axes[0].collections if c.get_gid()}
        assert set(marks) == {"draft1", "previous", "random"} | set(marks)
        own = frame[frame["predictor"] == "previous"]
        offsets = marks["previous"].get_offsets()
        assert offsets[:, 0].tolist() == pytest.approx((own[column] * scale).tolist())
        assert offsets[:, 1].tolist() == pytest.approx(own["kl"].tolist())


def test_rank_correlation_by_hand() -> None:
    assert rank_correlation([1, 2, 3], [9, 4, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)


def test_foreign_tables_are_refused(tmp_path: Path) -> None:
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "quality.parquet")
    with pytest.raises(InputError, match="not a quality table, it lacks predictor"):
        load_quality([tmp_path])
    with pytest.raises(InputError, match="not a table of overlaps, it lacks trace"):
        load_overlap(tmp_path / "quality.parquet")
    with pytest.raises(InputError, match="not readable"):
        load_overlap(tmp_path / "none.parquet")
