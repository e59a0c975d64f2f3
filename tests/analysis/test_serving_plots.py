"""Pictures of serving runs: what they draw, and what they say when they cannot."""

from __future__ import annotations

import pytest

from analysis.load import load_run
from analysis.report import plot_run
from analysis.selection import NotDrawn
from analysis.serving_plots import draw_latencies, draw_rates
from oasis_sim.api import sweep
from traces.errors import InputError

SMALL = {
    "system": ["dense", "quest"],
    "model": "Qwen3-0.6B",
    "serving": {"arrivals": "poisson", "num_requests": 12, "prompt_tokens": 3000, "output_tokens": 8},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    out = tmp_path_factory.mktemp("serving") / "run"
    sweep({**SMALL, "serving.rate_per_s": [5.0, 50.0]}, out=out)
    return out


def test_both_pictures_are_written(folder, tmp_path):
    written = plot_run(folder, tmp_path, ("png", "svg"))
    assert [path.name for path in written] == [
        "serving-rates.png",
        "serving-rates.svg",
        "serving-latency.png",
        "serving-latency.svg",
    ]
    assert all(path.stat().st_size > 5_000 for path in written)


def test_lines_are_the_rows_and_the_requests(folder):
    run = load_run(folder)
    ttft, _, throughput, _ = draw_rates(run).axes
    rows = run.results[run.results["system"] == "dense"]
    assert list(ttft.lines[0].get_ydata()) == rows["ttft_p50_s"].tolist()
    assert list(throughput.lines[0].get_ydata()) == rows["throughput_tokens_per_s"].tolist()
    first, _ = draw_latencies(run).axes
    assert len(first.lines) == 4
    assert len(first.lines[0].get_xdata()) == 12


def test_one_rate_has_no_curve_over_rates(tmp_path):
    sweep({**SMALL, "serving.rate_per_s": 5.0}, out=tmp_path / "one")
    run = load_run(tmp_path / "one")
    with pytest.raises(NotDrawn, match=r"two values of serving\.rate_per_s"):
        draw_rates(run)
    for file in (tmp_path / "one" / "requests").iterdir():
        file.unlink()
    with pytest.raises(InputError, match="nothing to draw"):
        plot_run(tmp_path / "one")
