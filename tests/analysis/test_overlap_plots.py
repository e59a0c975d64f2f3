"""Pictures and Markdown of the overlap tables: every series is drawn where the table says."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis.overlap_frames import load_overlap, short_model, trace_names
from analysis.overlap_misses import draw_caps, draw_misses, draw_sparse
from analysis.overlap_plots import draw_block_sizes, draw_budgets, draw_distance, draw_guesses, draw_heads
from analysis.overlap_report import TABLES, write_report
from analysis.overlap_tables import by_prompt, top, write_tables
from traces.errors import InputError

BUDGET = 512


def group(trace: str, context: int, size: int, count: int) -> dict[str, object]:
    task = trace.split("-")[1]
    return {
        "trace": trace, "task": task, "model": "M-135M", "drafter": "head", "context_tokens": context,
        "block_size_tokens": size, "num_blocks": count,
    }  # fmt: skip


def overlap_frame() -> pd.DataFrame:
    """draft 0.9, draft_sparse 0.88, previous 0.8, random 0.1 at distance 1, layer 0 and head 0; 0.1 less a distance."""
    rows = []
    bases = {"draft": 0.9, "draft_sparse": 0.88, "previous": 0.8, "random": 0.1}
    guesses = {"all": 0.0, "right": 0.1, "wrong": -0.05}
    for trace, context in (("m-code-4k", 4096), ("m-needle-7k", 7680)):
        for (size, count), layer, head, distance, (kind, base), (guess, more) in product(
            ((16, 20), (16, 32), (16, 64), (8, 64)), (0, 3), (0, 1), (1, 2), bases.items(), guesses.items()
        ):
            if guess != "all" and kind == "random":
                continue
            rows.append(
                group(trace, context, size, count)
                | {
                    "layer": layer, "kv_head": head, "selector": "minmax", "predictor": kind, "distance": distance,
                    "guess": guess, "steps": {"all": 100, "right": 30, "wrong": 70}[guess],
                    "overlap": base + more - 0.1 * (distance - 1) - 0.02 * layer - 0.01 * head,
                    "recall": 0.95 - (1 - base) / 10, "recall_true": 0.95,
                    "agreement": 0.97 if kind == "draft_sparse" else None, "set_is_exact": True,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def misses_frame() -> pd.DataFrame:
    rows = []
    bins = {"change": ("stayed", "returned", "new"), "place": ("first block", "0 to 64"), "churn": ("0 to 5 %",)}
    for trace, kind, guess, by in product(("m-code-4k", "m-needle-7k"), ("draft", "previous"), ("all", "right", "wrong"), bins):  # fmt: skip  # noqa: E501
        for order, name in enumerate(bins[by]):
            missed = 0.0 if guess == "right" else 2.0 * order + (trace == "m-needle-7k")
            rows.append(
                group(trace, 4096, 16, 32)
                | {
                    "layer": 0, "predictor": kind, "distance": 1, "guess": guess, "by": by, "bin": name,
                    "order": order, "row_share": 1.0, "true_blocks": 10.0, "missed_blocks": missed, "true_mass": 0.4,
                    "missed_mass": missed / 100, "set_is_exact": True,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def caps_frame() -> pd.DataFrame:
    rows = []
    for trace, (kind, k), cap in product(
        ("m-code-4k", "m-needle-7k"), (("draft", 1), ("previous", 1), ("current", 0), ("oracle", 1)), (0.02, 1.0)
    ):
        rows.append(
            group(trace, 4096, 16, 32)
            | {
                "predictor": kind, "distance": k, "fetch_cap": cap, "rules": "table", "hit_rate": 0.8 + 0.1 * cap,
                "recall": 0.9 - 0.01 * cap, "churn": cap,
            }
        )  # fmt: skip
    rows.append(rows[0] | {"predictor": "draft_sparse", "rules": "recorded", "hit_rate": 0.7654})
    return pd.DataFrame(rows)


def lines(figure: Figure, gid: str) -> list[list[float]]:
    return [list(line.get_ydata()) for axes in figure.axes for line in axes.lines if line.get_gid() == gid]


def test_lines_are_means_of_the_table() -> None:
    frame = overlap_frame()
    figure = draw_distance(frame, BUDGET)
    drawn = sorted(tuple(round(y, 6) for y in line) for line in lines(figure, "draft"))
    assert drawn == [(0.865, 0.765)] * 2 + [(1.0, 1.0)] * 2
    assert [axes.get_title() for axes in figure.axes if axes.get_title()] == ["code, 4K", "needle, 7.5K"]
    assert lines(draw_budgets(frame), "true") == [pytest.approx([0.95, 0.95])] * 2
    assert lines(draw_block_sizes(frame, BUDGET), "previous")[0] == pytest.approx([0.765, 0.765])
    with pytest.raises(InputError, match="no trace has several"):
        draw_block_sizes(frame[frame["block_size_tokens"] == 16], BUDGET)
    with pytest.raises(InputError, match="no exact sets of 333 tokens in blocks of 16"):
        draw_distance(frame, 333)


def test_heat_maps_have_a_cell_per_layer_and_head() -> None:
    figure = draw_heads(overlap_frame(), BUDGET)
    maps = [axes.images[0].get_array() for axes in figure.axes if axes.images and axes.get_ylabel() != ""]
    assert len(maps) == 2
    assert maps[0].tolist() == [pytest.approx([0.9, 0.84]), pytest.approx([0.89, 0.83])]
    gains = [axes.images[0].get_array() for axes in figure.axes if axes.images and axes.get_ylabel() == ""]
    assert gains[0].tolist() == [pytest.approx([10, 10])] * 2


def heights(figure: Figure) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for axes in figure.axes:
        for bar in axes.patches:
            found.setdefault(str(bar.get_gid()), []).append(bar.get_height())
    return found


def test_bars_by_guess_and_misses() -> None:
    bars = heights(draw_guesses(overlap_frame(), BUDGET))
    assert bars["draft right"] == pytest.approx([0.965] * 2)
    assert bars["previous wrong"] == pytest.approx([0.715] * 2)
    missed = heights(draw_misses(misses_frame(), BUDGET))
    # returned: 2 and 3 of 10 missed in the two traces; 0.02 and 0.03 of the mass.
    assert missed["draft wrong returned"] == pytest.approx([75, 2.5])
    assert missed["draft right new"] == pytest.approx([100, 0])


def test_caps_and_working_sets() -> None:
    figure = draw_caps(caps_frame(), BUDGET)
    assert (
        sorted(lines(figure, "draft 1"))
        == [pytest.approx([0.802, 0.9])] * 2 + [pytest.approx([0.98, 0.0], abs=1e-9)] * 2
    )
    sparse = draw_sparse(overlap_frame(), BUDGET)
    assert lines(sparse, "draft_sparse")[0] == pytest.approx([0.845, 0.745])
    assert lines(sparse, "agreement")[0] == pytest.approx([0.97, 0.97])
    frame = overlap_frame()
    with pytest.raises(InputError, match="no rows of predictor 'draft_sparse'"):
        draw_sparse(frame[frame["predictor"] != "draft_sparse"], BUDGET)


def test_sets_that_are_not_as_recorded_are_left_out() -> None:
    frame = overlap_frame()
    inexact = frame.assign(set_is_exact=~frame["predictor"].isin(["draft", "draft_sparse"]))
    assert "| code, 4K | – | – | 0.765 |" in write_tables(inexact, misses_frame(), caps_frame(), BUDGET)
    with pytest.raises(InputError, match="no rows of predictor 'draft'"):
        draw_distance(inexact, BUDGET)
    assert lines(draw_distance(frame.assign(set_is_exact=frame["trace"] == "m-code-4k"), BUDGET), "draft")[1:] == [
        pytest.approx([1.0, 1.0])
    ]


def test_tables_by_hand() -> None:
    text = write_tables(overlap_frame(), misses_frame(), caps_frame(), BUDGET)
    assert "| code, 4K | 30 % | 0.865 | 0.765 | 0.065 | 0.965 / 0.865 | 0.815 / 0.715 | – / – |" in text
    assert "| change | returned | 10.0 | 40.0 % | 100 % | 75 % | 75 % | 0.00 | 2.50 | 2.50 |" in text
    assert "| 0.02 | 0.802, 0.900 |" in text
    assert "| code, 4K | over the working set | 1 | 0.02 | 0.7654 | 0.8998 | 0.0200 |" in text
    rows = [list(row) for row in top(overlap_frame())]
    # (0.96 − 0.815) / (0.965 − 0.815) of the tokens right would give the published 96.0 %.
    assert rows[2][-1] == "97 %"


def test_prompts_of_one_task_stand_side_by_side() -> None:
    one = overlap_frame()
    one = one[one["trace"] == "m-code-4k"]
    other = one.assign(trace="m-code-4k-2", overlap=one["overlap"] - 0.1)
    rows = [list(row) for row in by_prompt(pd.concat([one, other]), BUDGET)]
    assert rows[1][1:6] == ["4K", "2", "30 %, 30 %", "0.865, 0.765", "0.765, 0.665"]
    assert len(rows) == 2


def test_names_tell_traces_apart() -> None:
    frame = pd.DataFrame(
        {
            "trace": ["a-code-4k-gpu", "a-code-4k-cpu", "g-needle-16k"], "task": ["code", "code", "needle"],
            "model": ["SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct", "gemma-3-270m-it"],
            "context_tokens": [4096, 4096, 16384],
        }
    )  # fmt: skip
    assert list(trace_names(frame).values()) == ["SmolLM2 code, 4K (gpu)", "SmolLM2 code, 4K (cpu)", "Gemma-3 needle, 16K"]  # fmt: skip  # noqa: E501
    assert short_model("Qwen3-8B") == "Qwen3"


def test_a_folder_gets_all_of_them_and_a_foreign_one_is_refused(tmp_path: Path) -> None:
    overlap_frame().to_parquet(tmp_path / "overlap.parquet")
    misses_frame().to_parquet(tmp_path / "misses.parquet")
    caps_frame().to_parquet(tmp_path / "caps.parquet")
    assert len(write_report(tmp_path, BUDGET)) == 9
    assert (tmp_path / TABLES).read_text().count("## ") == 10
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "foreign.parquet")
    with pytest.raises(InputError, match="not a table of overlaps, it lacks trace"):
        load_overlap(tmp_path / "foreign.parquet")
    with pytest.raises(InputError, match="not readable"):
        load_overlap(tmp_path / "none.parquet")
