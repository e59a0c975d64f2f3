from __future__ import annotations

import base64
import json
import re

import numpy as np
import pandas as pd
import pytest

from analysis.load import load_run
from analysis.page import explain_best
from analysis.report import PLOTS, plot_run
from analysis.selection import Case
from simulator.metrics import BREAKDOWN
from traces.errors import InputError

HEATMAPS = ["heatmap", "heatmap-prefetch-previous", "heatmap-oasiskv-oracle"]
ALL = ["comparison", "roofline", "breakdown", *HEATMAPS, "response", "pareto"]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def plotted(tmp_path_factory, sweep_frame, write_run):
    folder = write_run(tmp_path_factory.mktemp("synthetic"), sweep_frame)
    return folder, plot_run(folder)


def test_every_picture_and_a_page_lie_where_the_contract_says(plotted):
    folder, written = plotted
    assert written == [*(folder / "plots" / f"{name}.png" for name in ALL), folder / "report.html"]
    for path in written[:-1]:
        head = path.read_bytes()[:24]
        assert head.startswith(PNG)
        assert int.from_bytes(head[16:20], "big") == 1200


def test_the_page_is_self_contained_and_holds_the_written_pictures(plotted, sweep_frame):
    folder, written = plotted
    page = written[-1].read_text()
    pictures = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]
    assert pictures == [path.read_bytes() for path in written[:-1]]
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "http" not in re.sub(r"base64,[^\"]+", "", page)
    run = load_run(folder)
    assert run.manifest["git_sha"] in page
    assert f"All points ({len(sweep_frame)})" in page
    assert len(re.findall(r'<tr class="best">', page)) == 2


def test_plotting_twice_gives_the_same_bytes(tmp_path, make_row, write_run, monkeypatch):
    monkeypatch.setattr("analysis.report.PLOTS", {"breakdown": PLOTS["breakdown"]})
    folder = write_run(tmp_path / "run", pd.DataFrame([make_row("dense"), make_row("quest", block=16)]))
    written, again = plot_run(folder), plot_run(folder, tmp_path / "again")
    assert [path.name for path in again] == [path.name for path in written]
    assert {path.parent for path in again} == {tmp_path / "again"}
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(again, written, strict=True))


def test_the_page_explains_the_best_point(sweep_frame):
    lines = explain_best(Case(sweep_frame), {})
    assert lines[0].startswith("Best: quest with block size 64, 4,769 tok/s at recall 0.907 (at least 0.897 asked)")
    assert lines[1] == "What binds it: HBM bandwidth (synthetic)."
    assert any("oasiskv-oracle (a bound, cannot be built)" in line for line in lines)
    assert "No point keeps the recall threshold: prefetch-previous." in lines


def test_where_nothing_is_admissible_the_nearest_is_named(sweep_frame):
    lines = explain_best(Case(sweep_frame[sweep_frame["system"] == "quest"].assign(min_recall=0.99)), {})
    assert lines == [
        "No point keeps the recall threshold. The nearest is quest with block size 8, "
        "recall 0.958 where 0.990 is asked."
    ]


@pytest.mark.parametrize(
    ("column", "policies", "is_said"),
    [
        ("minmax", {}, True),
        (None, {"oasiskv": {"selector": "minmax"}}, True),
        ("exact", {"oasiskv": {"selector": "minmax"}}, False),
        (None, {"oasiskv": {"selector": "mean"}}, False),
        (None, {"quest": {"selector": "minmax"}}, False),
        (None, None, False),
    ],
)
def test_a_fall_of_recall_is_said_with_its_reason_or_not_at_all(
    tmp_path, make_row, write_run, column, policies, is_said
):
    """The selector is a column only where the experiment names it; else the manifest has it."""
    recalls = {0.02: 0.90, 0.05: 0.89, 0.5: 0.85}
    more = {} if column is None else {"policy.selector": column}
    rows = [make_row("oasiskv", cap, 16, 1, "local", recall=recall, **more) for cap, recall in recalls.items()]
    folder = write_run(tmp_path, pd.DataFrame(rows).assign(min_recall=0.5))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(
        json.dumps(manifest if policies is None else manifest | {"policies": policies})
    )
    page = plot_run(folder)[-1].read_text()
    said = "Recall falls from 0.900 at a cap of 0.02 to 0.850 at 0.5, likely because more fetches displace blocks"
    assert (said in page) == is_said
    assert ("ecall falls" in page) == is_said


def test_plots_that_cannot_be_filled_are_named_with_the_reason(tmp_path, make_row, write_run):
    written = plot_run(write_run(tmp_path, pd.DataFrame([make_row("oasiskv", 0.2, 16, 1, "local")])))
    assert [path.name for path in written] == ["roofline.png", "breakdown.png", "report.html"]
    page = written[-1].read_text()
    assert "heatmap: fetch cap and block size not varied" in page
    assert "response: no parameter is varied" in page
    assert "pareto: fewer than two points" in page


def test_a_run_in_which_nothing_fits_is_a_page_with_the_errors(tmp_path, make_row, write_run):
    error = "hbm cannot hold the batch: <99> GiB needed"
    rows = pd.DataFrame([make_row("dense", batch=b, status="does_not_fit", error=error) for b in (512, 1024)])
    written = plot_run(write_run(tmp_path, rows))
    assert [path.name for path in written] == ["report.html"]
    page = written[0].read_text()
    assert "2 points (2 do not fit)" in page
    assert "hbm cannot hold the batch: &lt;99&gt; GiB needed" in page


def test_null_metrics_leave_the_rest_standing(tmp_path, sweep_frame, write_run):
    gone = [
        "recall",
        "recall_upper",
        "min_recall",
        "h2d_bytes_per_token",
        "hbm_ceiling_tokens_per_s",
        "bound",
        *BREAKDOWN,
    ]
    few = sweep_frame[(sweep_frame["policy.lookahead_k"] == 1) & (sweep_frame["placement.host_numa"] == "local")]
    rows = few.assign(**dict.fromkeys(gone), h2d_ceiling_tokens_per_s=np.nan, bound_detail=None)
    names = [path.name for path in plot_run(write_run(tmp_path, rows))]
    drawn = ["comparison", "heatmap", "heatmap-oasiskv", "heatmap-oasiskv-oracle", "response"]
    assert names == [*(f"{name}.png" for name in drawn), "report.html"]
    page = (tmp_path / "report.html").read_text()
    assert "No point has a known recall. Of the others the best is prefetch-previous with" in page
    assert not re.search(r"\bnan\b", re.sub(r"base64,[^\"]+", "", page))


def test_models_and_contexts_get_pictures_of_their_own(tmp_path, make_row, write_run, monkeypatch):
    monkeypatch.setattr("analysis.report.PLOTS", {name: PLOTS[name] for name in ("roofline", "response")})
    rows = pd.DataFrame(
        [
            make_row(s, 0.2, 16, 1, "local") | {"model": m, "workload.context_tokens": c}
            for m in ("Qwen3-8B", "Other/70B")
            for c in (4096, 8192)
            for s in ("dense", "oasiskv")
        ]
    )
    names = [path.name for path in plot_run(write_run(tmp_path, rows))]
    assert sum(name.startswith("roofline--") for name in names) == 4
    assert sum(name.startswith("response--") for name in names) == 2
    assert "roofline--Other-70B-8192.png" in names
    assert len(set(names)) == len(names)


def test_more_cases_than_a_page_holds_are_counted_and_not_drawn(tmp_path, make_row, write_run, monkeypatch):
    monkeypatch.setattr("analysis.report.MAX_CASES", 2)
    monkeypatch.setattr("analysis.report.PLOTS", {"breakdown": PLOTS["breakdown"]})
    rows = pd.DataFrame([make_row("dense", model=f"model-{i}") for i in range(5)])
    written = plot_run(write_run(tmp_path, rows))
    assert sum(path.name.startswith("breakdown") for path in written) == 2
    assert "3 further combination(s)" in written[-1].read_text()


def test_formats_are_checked_before_anything_is_written(tmp_path, sweep_frame, write_run):
    folder = write_run(tmp_path, sweep_frame)
    with pytest.raises(InputError, match="'gif' is not one of png, svg, pdf"):
        plot_run(folder, formats=("png", "gif"))
    assert not (folder / "plots").exists()


def test_vector_formats_are_written_beside(tmp_path, make_row, write_run, monkeypatch):
    monkeypatch.setattr("analysis.report.PLOTS", {"breakdown": PLOTS["breakdown"]})
    folder = write_run(tmp_path, pd.DataFrame([make_row("dense")]))
    written = plot_run(folder, formats=("svg", "pdf"))
    assert [path.suffix for path in written] == [".svg", ".pdf", ".html"]
    assert "data:image/png" in written[-1].read_text()


def test_an_output_that_cannot_be_written_is_one_clear_line(tmp_path, make_row, write_run, monkeypatch):
    monkeypatch.setattr("analysis.report.PLOTS", {"breakdown": PLOTS["breakdown"]})
    folder = write_run(tmp_path / "run", pd.DataFrame([make_row("dense")]))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file: is a file; results go into a folder"):
        plot_run(folder, tmp_path / "file")
    with pytest.raises(InputError, match="cannot be written"):
        plot_run(folder, tmp_path / "file" / "plots")
