"""Pictures and page of serving runs: what they draw, and what they say when they cannot."""

from __future__ import annotations

import base64
import re
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from analysis import style
from analysis.handover_plots import draw_handover
from analysis.load import load_run
from analysis.report import plot_run
from analysis.selection import NotDrawn
from analysis.serving_files import PointFile, not_drawn, point_files, some_settings
from analysis.serving_page import explain
from analysis.serving_plots import coinciding, draw_latencies, draw_rates
from analysis.serving_usage import IN_HBM, MOST_INTERVALS, draw_load, draw_pools
from oasis_sim.api import sweep
from traces.errors import InputError

SMALL = {
    "system": ["dense", "oasiskv"],
    "model": "Qwen3-0.6B",
    "serving": {"arrivals": "poisson", "num_requests": 12, "prompt_tokens": 3000, "output_tokens": 8},
}
NAMES = ("serving-rates", "serving-latency", "serving-load", "serving-pools")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("serving") / "run"
    sweep({**SMALL, "serving.rate_per_s": [5.0, 50.0]}, out=out)
    return out


def test_all_pictures_and_a_page_that_holds_them(folder, tmp_path):
    written = plot_run(folder, tmp_path, ("png", "svg"))
    assert [path.name for path in written] == [
        *(f"{name}.{suffix}" for name in NAMES for suffix in ("png", "svg")),
        "report.html",
    ]
    assert all(path.stat().st_size > 5_000 for path in written)
    page = written[-1].read_text()
    pictures = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]
    assert pictures == [path.read_bytes() for path in written if path.suffix == ".png"]
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert len(re.findall(r'<tr class="best">', page)) == 1
    assert page.count("<td>oasiskv</td>") == 2
    assert [path.read_bytes() for path in plot_run(folder, tmp_path / "again", ("png", "svg"))] == [
        path.read_bytes() for path in written
    ]


def test_a_run_of_an_older_version_without_the_offered_load_is_drawn(folder, tmp_path):
    old = shutil.copytree(folder, tmp_path / "old")
    table = pq.read_table(old / "results.parquet")
    newer = ["offered_tokens_per_s", "offered_prompt_tokens_per_s", "served_share", "drain_s", "overloaded"]
    newer += ["itl_mean_s", "itl_p50_s", "itl_p90_s", "itl_p99_s"]
    pq.write_table(table.drop_columns(newer), old / "results.parquet")
    assert [path.stem for path in plot_run(old)] == [*NAMES, "report"]


def test_the_page_says_who_keeps_the_promises_how_far(folder):
    run = load_run(folder)
    rows = run.results
    rows["slo_attainment"] = [1.0, 0.5, 1.0, 0.95]
    rows["goodput_requests_per_s"] = [5.0, 25.0, 5.0, 47.5]
    rows["overloaded"] = False
    rows["num_refused"] = [0, 0, 0, 3]
    lines = explain(run)
    assert lines[0] == (
        "Most requests within the SLO: oasiskv at arrivals/s 50, 47.5 a second (95 % of those that came)."
    )
    assert any(line.endswith("in arrivals per second: dense up to 5, oasiskv up to 50.") for line in lines)
    assert draw_rates(run).texts[0].get_text().replace("\n", " ") == (
        "oasiskv keeps the SLO for 90% of requests up to 50 arrivals per second"
    )
    assert any(line.startswith("3 requests can never fit under oasiskv at arrivals/s 50") for line in lines)


def test_picture_and_page_agree_that_no_overloaded_rate_is_kept(folder):
    run = load_run(folder)
    rows = run.results
    rows["slo_attainment"] = [0.5, 0.95, 0.9, 0.99]
    rows["goodput_requests_per_s"] = [2.5, 9.5, 4.5, 20.0]
    rows["overloaded"] = [True, True, False, True]
    lines = explain(run)
    assert lines[0].startswith("Most requests within the SLO: oasiskv at arrivals/s 5, 4.50 a second")
    assert lines[1].startswith("Overloaded: dense at 5 a second and more, oasiskv at 50 a second and more (")
    assert any(line.endswith("in arrivals per second: dense at none, oasiskv up to 5.") for line in lines)
    figure = draw_rates(run)
    assert "oasiskv keeps the SLO for 90% of requests up to 5 arr" in figure.texts[0].get_text().replace("\n", " ")
    hollow = [line for line in figure.axes[2].lines if line.get_markerfacecolor() == "white" and len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in hollow] == [[5.0, 50.0], [50.0]]
    rows["overloaded"] = True
    assert explain(run)[0].startswith("Overloaded at every rate: ")
    assert draw_rates(run).texts[0].get_text().startswith("Overloaded at every rate: ")


def test_points_that_serve_alike_are_named_together(folder):
    run = load_run(folder)
    run.results["goodput_requests_per_s"] = [5.0, 4.0, 5.0, 4.999]
    run.results["overloaded"] = False
    assert explain(run)[0].startswith(
        "Most requests within the SLO: 3 points alike (dense at arrivals/s 5; oasiskv at arrivals/s 5; oasiskv at "
        "arrivals/s 50), 5.00 a second ("
    )


def test_lines_are_the_rows_and_the_requests(folder):
    run = load_run(folder)
    ttft, _, throughput, _ = draw_rates(run).axes
    rows = run.results[run.results["system"] == "dense"]
    assert list(ttft.lines[0].get_ydata()) == rows["ttft_p50_s"].tolist()
    assert list(throughput.lines[0].get_ydata()) == rows["throughput_tokens_per_s"].tolist()
    first, _ = draw_latencies(run).axes
    assert len(first.lines) == 4
    assert len(first.lines[0].get_xdata()) == 12


def test_load_and_pools_over_time_are_the_files(folder):
    """Areas under the lines are request-seconds; the stack ends at what HBM holds."""
    run = load_run(folder)
    files = point_files(run, "usage", ("decoding",))
    assert [file.system for file in files] == ["dense", "dense", "oasiskv", "oasiskv"]
    decoding = [axes for axes in draw_load(run).axes if axes.get_title(loc="left").startswith("decoding")]
    assert [axes.get_title(loc="left") for axes in decoding] == ["decoding · arrivals/s 50", "decoding · arrivals/s 5"]
    for axes, file in ((decoding[0], files[1]), (decoding[1], files[0])):
        steps = axes.patches[0].get_data()
        assert len(steps.values) == MOST_INTERVALS
        drawn = float(steps.values @ np.diff(steps.edges))
        assert drawn == pytest.approx(float(file.table["decoding"] @ file.table["seconds"]), rel=1e-9)


@pytest.mark.parametrize(
    ("goodput", "overloaded", "drawn", "title", "columns"),
    [
        ([5.0, 40.0, 5.0, 40.0], False, (1, 3), " at the best goodput (arrivals/s 50): ", ["dense", "oasiskv"]),
        ([5.0, 5.0, 5.0, 4.0], False, (0, 2), " at the best goodput (arrivals/s 5): ", ["dense", "oasiskv"]),
        (
            [5.0, 2.0, 5.0, 40.0], False, (0, 3), ", each system at its best goodput: ",
            ["dense · arrivals/s 5", "oasiskv · arrivals/s 50"],
        ),
        (
            [5.0, 40.0, 5.0, 40.0], [False, True, False, False], (0, 3), ", each system at its best goodput: ",
            ["dense · arrivals/s 5", "oasiskv · arrivals/s 50"],
        ),
    ],
)  # fmt: skip
def test_pools_are_those_of_the_best_setting_and_say_so(folder, goodput, overloaded, drawn, title, columns):
    """Not of the last: what it holds is a setting that nobody would choose."""
    run = load_run(folder)
    run.results["goodput_requests_per_s"], run.results["overloaded"] = goodput, overloaded
    files = point_files(run, "usage", ("decoding",))
    figure = draw_pools(run)
    assert title in figure.texts[0].get_text().replace("\n", " ")
    assert [axes.get_title(loc="left") for axes in figure.axes[:2]] == columns
    for axes, number in zip(figure.axes[:2], drawn, strict=True):
        top = axes.patches[-1].get_data().values
        np.testing.assert_allclose(top, files[number].table[list(IN_HBM)].sum(axis=1) / 1e9)


def test_pools_of_one_setting_speak_of_no_best(folder):
    run = load_run(folder)
    run = replace(run, results=run.results.drop(index=[0, 2]))
    assert draw_pools(run).texts[0].get_text().startswith("Peak use of HBM beside the weights: dense ")


def test_of_many_settings_the_best_is_first_and_those_left_out_are_named():
    files = [PointFile("dense", str(number), pd.DataFrame(), number == 5) for number in range(9)]
    assert some_settings(files, 3) == (["5", "0", "8"], ["1", "2", "3", "4", "6", "7"])
    assert some_settings(files[:3], 3) == (["0", "1", "2"], [])
    assert some_settings(files[:1], 3) == (["0"], [])
    assert not_drawn(["1", "2"]) == ["Not drawn: 1; 2."]


def test_lines_that_coincide_are_named():
    tables = [pd.DataFrame({"status": "ok", "ttft_s": [a, 2.0], "tpot_s": a / 9}) for a in (1.0, 1.0001, 1.5)]
    files = [PointFile("dense", name, table) for name, table in zip("abc", tables, strict=True)]
    assert coinciding(files) == [
        "Time to first token: lines coincide of dense at a; b.",
        "Time per output token: lines coincide of dense at a; b.",
    ]
    assert coinciding(files[1:]) == []


def test_one_rate_has_no_curve_over_rates(tmp_path):
    sweep({**SMALL, "serving.rate_per_s": 5.0}, out=tmp_path / "one")
    run = load_run(tmp_path / "one")
    with pytest.raises(NotDrawn, match=r"two values of serving\.rate_per_s"):
        draw_rates(run)
    for kind in ("requests", "usage"):
        for file in (tmp_path / "one" / kind).iterdir():
            file.unlink()
    (page,) = plot_run(tmp_path / "one")
    text = page.read_text()
    assert "serving-latency: no request files beside the results" in text
    assert "serving-pools: no usage files beside the results" in text
    (tmp_path / "one" / "usage.parquet").write_bytes(b"no parquet")
    with pytest.raises(InputError, match=r"usage\.parquet: not readable as parquet"):
        plot_run(tmp_path / "one")


def test_prefill_elsewhere_has_a_picture_of_its_own(tmp_path):
    modes = ["full-push", "first-set"]
    sweep({**SMALL, "system": "oasiskv", "serving.disaggregation": modes, "serving.rate_per_s": 5.0}, out=tmp_path)
    run = load_run(tmp_path)
    assert "serving-handover.png" in [path.name for path in plot_run(tmp_path)]
    network, tokens, decode, staged = draw_handover(run).axes
    rows = run.results
    whole, first = (bars.patches for bars in (network.containers[0], network.containers[1]))
    assert [bar.get_width() for bar in whole] == pytest.approx((rows["network_bytes_per_request"] / 1e9).tolist())
    assert [bar.get_width() for bar in first] == pytest.approx((rows["admission_network_bytes"] / 1e9).tolist())
    assert [text.get_text() for text in network.get_yticklabels()] == [f"oasiskv  {mode}" for mode in modes]
    second = tokens.collections[2].get_offsets()[:, 0]
    assert second.tolist() == pytest.approx(rows["second_token_p50_s"].tolist())
    assert len(decode.patches) == len(staged.patches) == 2
    rows["network_bytes_per_request"] = None
    with pytest.raises(NotDrawn, match="no point prefills on other hosts"):
        draw_handover(run)


def test_numbers_between_decades_are_written_where_there_is_hardly_a_decade(folder):
    figure = draw_latencies(load_run(folder))
    figure.canvas.draw()
    axis = figure.axes[0].xaxis
    axis.axes.set_xlim(0.7, 2.0)
    style.plain_log(axis)
    figure.canvas.draw()
    labels = [text.get_text() for text in axis.get_minorticklabels() if text.get_text()]
    assert labels
    assert not any("$" in text for text in labels)


def test_pools_of_systems_without_a_common_setting(tmp_path):
    """Dense attention has no tier: each system is drawn at its own best point."""
    sweep({**SMALL, "placement.kv_tier": ["host", "remote"], "serving.rate_per_s": 20.0}, out=tmp_path / "tiers")
    run = load_run(tmp_path / "tiers")
    remote = run.results["placement.kv_tier"] == "remote"
    run.results.loc[remote, "goodput_requests_per_s"] *= 2
    figure = draw_pools(run)
    assert [axes.get_title(loc="left") for axes in figure.axes[:2]] == ["dense", "oasiskv · kv tier remote"]
    remote = figure.axes[3].patches[-1].get_data().values
    assert remote.max() > 0
