"""Pictures of a validation, read back from the figures."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.validation_plots import draw_all, draw_residuals, draw_scatter
from traces.errors import InputError


@pytest.fixture
def frame() -> pd.DataFrame:
    measured = [0.005, 0.01, 0.02, 0.04]
    errors = [0.01, -0.02, 0.06, 0.10]
    return pd.DataFrame({
        "system": ["dense", "quest", "oasiskv", "retrieval"], "model": "Qwen3-8B", "device": "NVIDIA H200",
        "hardware": "h200-sxm-calibrated", "warning": None, "measured_tpot_s": measured, "error": errors,
        "predicted_tpot_s": [m * (1 + e) for m, e in zip(measured, errors, strict=True)],
        "transfer_over_compute": [0.0, 0.0, 1.0, 6.0], "workload.batch_size": [1, 2, 4, 8],
    })  # fmt: skip


def offsets(figure, system):
    return next(c for c in figure.axes[0].collections if c.get_gid() == system).get_offsets().tolist()


def test_the_scatter_shows_milliseconds_and_says_the_error(frame):
    figure = draw_scatter(frame)
    assert offsets(figure, "retrieval") == [[pytest.approx(40), pytest.approx(44)]]
    assert "4.0% in the median" in figure.texts[0].get_text()


def test_residuals_are_signed_and_judge_contended_points_apart(frame):
    figure = draw_residuals(frame)
    assert offsets(figure, "quest")[0][1] == pytest.approx(-2)
    assert offsets(figure, "oasiskv") == [[1.0, pytest.approx(6)]]
    title = figure.texts[0].get_text().replace("\n", " ")
    assert "is 6.0%, elsewhere 2.0%" in title


def test_another_device_s_profile_is_said_on_the_picture(frame):
    figure = draw_scatter(frame.assign(warning="measured on A, predicted with profile p of B"))
    assert any("OTHER DEVICE: measured on A" in text.get_text() for text in figure.texts)


def test_a_folder_without_points_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"points\.parquet"):
        draw_all(tmp_path)
