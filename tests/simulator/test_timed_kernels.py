from typing import Any

import numpy as np
import pytest

from simulator.catalog import load_hardware, load_model
from simulator.cost import attention_s, gemm_s, lm_head_s, plan_s, topk_s
from simulator.specs.hardware import KernelFigures, MeasuredGemm, TimedKernel
from simulator.specs.policy import PolicySpec
from simulator.timed_kernels import timed_gemm_s, timed_kernel_s, timed_selection_s


@pytest.fixture(scope="module")
def kernels() -> KernelFigures:
    timed = [
        TimedKernel(
            kind="attention", heads=heads, size=size, rows=rows, head_dim=64, seconds=rows * (heads + size) * 1e-9
        )
        for rows in (1, 2)
        for heads in (8, 16)
        for size in (100, 300)
    ]
    gemms = (MeasuredGemm(m=1, n=64, k=32, seconds=1e-6), MeasuredGemm(m=5, n=64, k=32, seconds=3e-6))
    base: Any = load_hardware("h100-sxm").kernels
    return KernelFigures.model_validate({**base.model_dump(), "timed": timed, "gemms": gemms})


def test_launches_are_bilinear_between_timed_sizes_and_unknown_outside(kernels: KernelFigures) -> None:
    assert timed_kernel_s(kernels, "attention", 12, 200, 64, 1) == pytest.approx(212e-9)
    assert timed_kernel_s(kernels, "attention", 12, 200, 64, 2) == pytest.approx(424e-9)
    assert timed_kernel_s(kernels, "attention", 12, 200, 64, 3) == pytest.approx(424e-9), "nearest rows"
    assert timed_kernel_s(kernels, "attention", 17, 200, 64, 1) is None
    assert timed_kernel_s(kernels, "attention", 8, 99, 64, 1) is None
    assert timed_kernel_s(kernels, "attention", 12, 200, 128, 1) is None, "another head dimension"
    assert timed_kernel_s(kernels, "plan", 8, 100, 64) is None


def test_products_are_linear_in_rows_for_a_timed_shape_only(kernels: KernelFigures) -> None:
    assert timed_gemm_s(kernels, 3, 64, 32) == pytest.approx(2e-6)
    assert timed_gemm_s(kernels, 6, 64, 32) is None
    assert timed_gemm_s(kernels, 3, 32, 64) is None


def test_the_cost_model_takes_what_was_timed_and_adds_the_switch() -> None:
    profile, model = load_hardware("h200-sxm-calibrated"), load_model("Qwen3-8B")
    timed = next(t for t in profile.kernels.timed if (t.kind, t.heads, t.size, t.rows) == ("attention", 256, 2064, 2))
    assert profile.kernels.switch_s is not None
    expected = timed.seconds + profile.kernels.switch_s.value
    assert attention_s(profile, model, 32, 2064, 2, 2) == pytest.approx(expected)
    # fp8 was not timed: the fit serves.
    assert attention_s(profile, model, 32, 2064, 2, 1) < expected
    product = next(g for g in profile.kernels.gemms if (g.m, g.n, g.k) == (32, 6144, 4096))
    assert gemm_s(profile, 32, 6144, 4096) == pytest.approx(product.seconds + profile.kernels.switch_s.value)


def test_selection_kernels_are_looked_up_at_the_sizes_that_they_compute_on() -> None:
    profile, model = load_hardware("h200-sxm-calibrated"), load_model("Qwen3-8B")
    kernels = profile.kernels
    timed = {(t.kind, t.heads, t.size, t.kept): t.seconds for t in kernels.timed if t.kept is not None}
    # 131 slots run in 256 lanes, as the timed 135 do, not in between 128 and 135.
    assert timed_selection_s(kernels, "plan", 256, 131, 128) == timed["plan", 256, 135, 128]
    assert timed_selection_s(kernels, "plan", 256, 128, 128) == timed["plan", 256, 128, 128]
    # 256 lanes hold K = 256 exactly too: another kernel.
    assert timed_selection_s(kernels, "plan", 256, 256, 256) == timed["plan", 256, 256, 256]
    # 1,025 blocks run in 1,024 + 64 lanes, as the timed 1,030 do.
    assert timed_selection_s(kernels, "topk", 64, 1025, 128) == timed["topk", 64, 1030, 128]
    assert timed_selection_s(kernels, "topk", 64, 1021, 64) == timed["topk", 64, 1020, 64]
    # 640 = 512 + 128 lanes lie between 256 + 64 and 1,024 + 64.
    between = np.interp(640, [320, 1088], [timed["topk", 64, 260, 32], timed["topk", 64, 1030, 128]])
    assert timed_selection_s(kernels, "topk", 64, 600, 60) == pytest.approx(between)
    assert timed_selection_s(kernels, "topk", 64, 1 << 15, 4096) is None
    assert timed_selection_s(kernels, "plan", 8192, 128, 128) is None
    policy = PolicySpec(kv_budget_tokens=2048)
    assert profile.kernels.switch_s is not None
    switch = profile.kernels.switch_s.value
    assert plan_s(profile, model, policy, 32, 131) == pytest.approx(timed["plan", 256, 135, 128] + switch)
    assert topk_s(profile, model, policy, 8, 1025) == pytest.approx(timed["topk", 64, 1030, 128] + switch)


def test_the_output_matrix_is_a_timed_product() -> None:
    profile, model = load_hardware("h200-sxm-calibrated"), load_model("Qwen3-8B")
    product = next(g for g in profile.kernels.gemms if (g.m, g.n) == (64, model.vocab))
    assert profile.kernels.switch_s is not None
    assert lm_head_s(profile, model, 64) == pytest.approx(product.seconds + profile.kernels.switch_s.value)
