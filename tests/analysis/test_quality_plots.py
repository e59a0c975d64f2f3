"""Figures of quality tables: every series is drawn where the table says."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from analysis.quality_plots import draw_bytes, draw_recall
from analysis.quality_tables import cap_cost, kl_by_recall, load_prompts, load_quality, paired, proxy, rank_correlation
from traces.errors import InputError


def quality_frame() -> pd.DataFrame:
    rows = []
    for predictor, recall in (("draft1", 0.9), ("previous", 0.8), ("random", 0.5)):
        for budget in (256, 512):
            for cap in (0.05, 1.0):
                kl = (1 - recall) * 256 / budget * (1 + cap)
                rows.append(
                    {
                        "predictor": predictor, "policy.kv_budget_tokens": budget, "policy.block_size_tokens": 16,
                        "policy.fetch_cap": cap, "task": "all", "kl": kl, "kl_low": 0.9 * kl, "kl_high": 1.1 * kl,
                        "recall": recall + budget / 1e4, "h2d_bytes_per_token": 1e6 * budget * cap, "num_prompts": 4,
                        "num_steps": 96,
                    }
                )  # fmt: skip
    return pd.DataFrame(rows)


def test_traffic_lines_join_the_caps_of_a_policy() -> None:
    figure = draw_bytes(quality_frame())
    drawn = {line.get_gid(): line for line in figure.axes[0].lines if line.get_gid()}
    assert set(drawn) == {"draft1 256", "draft1 512", "previous 256", "previous 512"}
    assert list(drawn["previous 512"].get_xdata()) == pytest.approx([25.6, 512.0])
    assert list(drawn["previous 512"].get_ydata()) == pytest.approx([0.105, 0.2])
    with pytest.raises(InputError, match="nothing to draw"):
        draw_bytes(quality_frame().query("predictor == 'random'"))


def test_what_a_cap_costs_is_a_multiple_of_no_cap() -> None:
    # (1 + 0.05) / (1 + 1) at every budget and predictor; the random one is left out.
    assert list(cap_cost(quality_frame())) == [("16", name, "0.53") for name in ("previous", "draft1", "all")]
    assert list(cap_cost(quality_frame().query("`policy.fetch_cap` < 1"))) == []


def test_recall_marks_are_at_the_table_s_values() -> None:
    frame = quality_frame()
    figure = draw_recall(frame)
    marks = {str(c.get_gid()): c.get_offsets().tolist() for c in figure.axes[0].collections if c.get_gid()}
    own = frame[frame["predictor"] != "random"]
    assert marks["16 predicted"] == [pytest.approx(pair) for pair in zip(1 - own["recall"], own["kl"], strict=True)]
    assert len(marks["16 random"]) == 4
    with pytest.raises(InputError, match="nothing to draw"):
        draw_recall(frame.assign(kl=1e-6))


def test_tables_by_hand(tmp_path: Path) -> None:
    frame = quality_frame()
    rows = list(kl_by_recall(frame))
    assert sum(int(row[1]) for row in rows) == 8
    assert [row[0] for row in proxy(frame)] == ["all", "256", "512"]
    prompts = pd.concat([frame.assign(prompt=name, kl=frame["kl"] + more) for name, more in (("a", 0.0), ("b", 1.0))])
    prompts.to_parquet(tmp_path / "prompts.parquet")
    told = {(row[0], row[1]): row[2:] for row in paired(load_prompts(tmp_path))}
    # draft1 − previous at 256 tokens: (0.1 − 0.2) · (1.05 + 2) / 2 on every prompt.
    assert told["256", "draft1 − previous"][1:] == ("-0.1525", "-0.1525 … -0.1525")
    # A cap of 0.05 − none at 256 tokens: (1.05 − 2) · (0.1 + 0.2) / 2.
    assert told["256", "cap 0.05 − uncapped"][1] == "-0.1425"


def test_rank_correlation_by_hand() -> None:
    assert rank_correlation([1, 2, 3], [9, 4, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)


def test_foreign_tables_are_refused(tmp_path: Path) -> None:
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "quality.parquet")
    with pytest.raises(InputError, match="not a quality table, it lacks predictor"):
        load_quality(tmp_path)
    quality_frame().to_parquet(tmp_path / "other.parquet")
    with pytest.raises(InputError, match="has no task 'code'; it has all"):
        load_quality(tmp_path / "other.parquet", "code")
    with pytest.raises(InputError, match="not readable"):
        load_quality(tmp_path / "none.parquet")
