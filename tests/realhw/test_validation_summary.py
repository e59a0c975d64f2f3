"""Validation statistics against hand-computed values."""

from __future__ import annotations

import pytest

from realhw.validation_summary import COMPONENTS, component_errors, errors_of, kendall_tau, regret, summarise


def row(predicted: float, measured: float, batch: int = 16, ratio: float = 1.0) -> dict[str, object]:
    return {
        "system": "dense",
        "model": "Qwen3-8B",
        "trace": "synthetic",
        "again": False,
        "workload.batch_size": batch,
        "workload.context_tokens": 4096,
        "predicted_tpot_s": predicted,
        "measured_tpot_s": measured,
        **{f"predicted_{of}_s": predicted for of in ("p50", "p99")},
        **{f"measured_{of}_s": measured for of in ("p50", "p99")},
        "repeat_spread": 0.01,
        "transfer_over_compute": ratio,
        "byte_mismatches": 0,
    }


def test_kendall_tau_of_same_reversed_and_one_swap():
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert kendall_tau([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert kendall_tau([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)
    assert kendall_tau([1, 1, 1], [1, 2, 3]) is None


def test_tau_b_discounts_ties():
    assert kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / (2 * 3) ** 0.5)


def test_regret_is_what_the_predicted_choice_costs():
    assert regret([row(1.0, 1.1), row(2.0, 1.0)]) == pytest.approx(0.1)
    assert regret([row(1.0, 1.0), row(2.0, 1.1)]) == 0


def test_errors_and_bias():
    summary = errors_of([row(1.1, 1.0), row(0.9, 1.0), row(1.0, 1.0)])
    assert summary["median_abs_error"] == pytest.approx(0.1)
    assert summary["bias"] == pytest.approx(0, abs=1e-12)
    assert summary["regret"] is None  # no cell has six policies


def test_decisions_are_judged_inside_cells_of_six():
    rows = [row(i, i) for i in range(1, 7)] + [row(1, 9, batch=32)]
    summary = errors_of(rows)
    assert (summary["regret"], summary["kendall_tau"]) == (0, 1)
    rows[5]["again"] = True
    assert errors_of(rows)["regret"] is None, "the same policy twice is no choice"


def test_components_are_compared_as_shares_of_the_step():
    parts = {name: 0.0 for names, _ in COMPONENTS.values() for name in names}
    # 2 layers: 8 marks of 0.1 s in a step that reads 2.8 s with them and 2 s without.
    timed = row(1.0, 2.0) | {
        "num_layers": 2,
        "predicted_parts_s": parts | {"t_qkv_s": 0.4, "t_ffn_s": 0.6},
        "measured_parts_s": {"qkv": 0.4, "append": 0.3, "ffn": 0.9, "wait": 1.2},
    }
    found = component_errors([timed, row(9.0, 1.0)])
    assert found["qkv and append"] == {
        "num_points": 1,
        "median_abs_error_of_tpot": pytest.approx(0.05),
        "bias_of_tpot": pytest.approx(0.05),
    }
    assert found["feed-forward"]["bias_of_tpot"] == pytest.approx(-0.05)
    assert found["waiting"]["bias_of_tpot"] == pytest.approx(-0.5)
    assert found["marked_over_unmarked"] == {"num_points": 1, "median": pytest.approx(1.4)}
    assert component_errors([row(1.0, 1.0)]) == {}


def test_contended_points_are_reported_apart():
    rows = [row(1.2, 1.0, ratio=0.6), row(1.0, 1.0, ratio=0.1), row(1.0, 1.0, ratio=3.0)]
    summary = summarise(rows, {"device": "NVIDIA H200"})
    assert summary["num_points"] == 3
    assert summary["contended"]["num_points"] == 1
    assert summary["contended"]["bias"] == pytest.approx(0.2)
    assert summary["device"] == "NVIDIA H200"


def test_nothing_measured_gives_null_not_nan():
    assert errors_of([])["median_abs_error"] is None
