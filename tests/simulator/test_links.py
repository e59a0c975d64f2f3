"""Transfers against closed forms."""

from __future__ import annotations

import numpy as np
import pytest

from simulator import catalog
from simulator.engine_rates import B, C, D, H, Kind, RatesByBatch, engine_rates, gather_wait_s
from simulator.links import fetch_cost, gather_bytes_per_s, interleaved_rate, transfer_s
from simulator.specs.base import Figure
from simulator.specs.hardware import PairRate
from simulator.specs.policy import Transport
from simulator.step_transfers import sum_over_requests

H200 = catalog.load_hardware("h200-sxm")


def test_one_copy_is_overhead_plus_bytes_over_bandwidth():
    link = fetch_cost(H200, "ce-contiguous", 16, "local")
    seconds = transfer_s(link, np.array([[128.0]]), np.array([[40.0]]), 8192)[0, 0]
    assert seconds == pytest.approx(H200.link.ce_op_s.value + 128 * 8192 / link.bytes_per_s)


CE_CURVE_GBPS = {4096: 1.5, 8192: 3.0, 65536: 15.6, 262144: 34.1, 1 << 20: 47.6, 4 << 20: 52.9}


@pytest.mark.parametrize(("size_bytes", "gbps"), CE_CURVE_GBPS.items())
def test_copy_engine_rate_by_size_is_near_the_measured_curve(size_bytes, gbps):
    """64 back-to-back copies in a graph on the H200; 2.7 us per operation and 55.1 GB/s explain them."""
    link = fetch_cost(H200, "ce-batched", 16, "local")
    seconds = transfer_s(link, np.array([[64.0]]), np.array([[64.0]]), size_bytes)[0, 0]
    assert 64 * size_bytes / seconds / 1e9 == pytest.approx(gbps, rel=0.10)


@pytest.mark.parametrize(("ctas", "gbps"), [(1, 4.3), (2, 8.5), (4, 16.5), (8, 30.8), (16, 50.1)])
def test_gather_rate_by_grid_is_near_the_measured_curve(ctas, gbps):
    assert gather_bytes_per_s(H200, ctas, "local") / 1e9 == pytest.approx(gbps, rel=0.12)


def test_every_transport_has_its_own_operations():
    blocks, runs = np.array([[10.0]]), np.array([[4.0]])
    seconds = {
        transport: transfer_s(fetch_cost(H200, transport, 16, "local"), blocks, runs, 8192)[0, 0]
        for transport in ("ce-per-block", "ce-batched", "ce-contiguous")
    }
    assert seconds["ce-per-block"] > seconds["ce-batched"] > seconds["ce-contiguous"]


def test_nothing_to_move_takes_no_time():
    for transport in ("ce-per-block", "ce-batched", "ce-contiguous", "gather"):
        link = fetch_cost(H200, transport, 16, "local")
        assert transfer_s(link, np.zeros((1, 1)), np.zeros((1, 1)), 8192)[0, 0] == 0


@pytest.mark.parametrize("transport", ["ce-batched", "gather"])
def test_far_memory_is_slower_and_interleaved_lies_between(transport):
    local, mixed, far = (fetch_cost(H200, transport, 8, n).bytes_per_s for n in ("local", "interleave", "far"))
    assert far < mixed < local
    assert mixed == pytest.approx(interleaved_rate(local, far))


def test_far_latency_slows_a_small_grid_even_below_the_link():
    few = gather_bytes_per_s(H200, 2, "far") / gather_bytes_per_s(H200, 2, "local")
    latency, more = H200.link.gather_latency_s.value, H200.host.far_latency_s.value
    assert few == pytest.approx(latency / (latency + more))


def test_engines_alone_run_at_rate_one():
    rates = engine_rates(H200, "gather", 16, 32)
    for kind in Kind:
        assert rates[kind, Kind.IDLE, 0, 0, C] == 1
        assert rates[Kind.IDLE, kind, 0, 0, B] == 1
    assert rates[Kind.IDLE, Kind.IDLE, 1, 0, H] == rates[Kind.IDLE, Kind.IDLE, 0, 1, D] == 1


def test_no_engine_gets_faster_beside_another():
    for transport in ("gather", "ce-batched"):
        rates = engine_rates(H200, transport, 16, 32)
        assert (rates <= 1).all()
        assert (rates[:, :, 1, :, :2] <= rates[:, :, 0, :, :2]).all()


def test_more_gather_ctas_take_more_from_compute():
    slow, fast = (engine_rates(H200, "gather", n, 32)[Kind.GEMM, 0, 1, 0, C] for n in (32, 8))
    assert slow < fast


def _pair(kernel: str, beside: str, batch_size: int | None, rates: tuple[float, float], ctas: int | None = None):
    kernel_rate, beside_rate = (Figure(value=rate, source="test") for rate in rates)
    return PairRate(
        kernel=kernel, beside=beside, batch_size=batch_size, gather_ctas=ctas, kernel_rate=kernel_rate,
        beside_rate=beside_rate,
    )  # fmt: skip


def test_pair_rates_are_linear_in_the_logarithm_of_the_batch_and_constant_beyond():
    pairs = (_pair("gemm", "topk", 32, (0.6, 0.4)), _pair("gemm", "topk", 8, (1.0, 0.8)))
    hardware = H200.model_copy(update={"pairs": pairs})
    rate = {n: engine_rates(hardware, "gather", 16, n)[Kind.GEMM, Kind.TOPK, 0, 0, :2] for n in (1, 8, 16, 32, 64)}
    np.testing.assert_allclose(rate[16], (0.8, 0.6))
    np.testing.assert_array_equal(rate[1], rate[8])
    np.testing.assert_array_equal(rate[64], rate[32])
    by_batch = RatesByBatch(hardware, "gather", 16)
    np.testing.assert_array_equal(by_batch.at(16), engine_rates(hardware, "gather", 16, 16))
    np.testing.assert_array_equal(by_batch.at(0), by_batch.at(1))  # only prompts
    # The other way round: top-K on C, the product on B.
    np.testing.assert_allclose(engine_rates(hardware, "gather", 16, 16)[Kind.TOPK, Kind.GEMM, 0, 0, :2], (0.6, 0.8))


def test_work_of_as_many_heads_slows_alike_whatever_the_batch():
    timed = [_pair("attention", "score", n, (rate, 0.5)) for n, rate in ((8, 0.9), (32, 0.5))]
    hardware = H200.model_copy(update={"pairs": tuple(p.model_copy(update={"kv_heads": 8}) for p in timed)})

    def rate(batch_size: int, kv_heads: int | None) -> float:
        return float(engine_rates(hardware, "gather", 16, batch_size, kv_heads)[Kind.ATTENTION, Kind.SCORE, 0, 0, C])

    assert rate(16, 8) == rate(32, 4) == rate(64, 2) == pytest.approx(0.7)
    assert rate(16, None) == rate(16, 8), "as many as were timed"
    of_any = H200.model_copy(update={"pairs": tuple(timed)})
    assert engine_rates(of_any, "gather", 16, 16, 2)[Kind.ATTENTION, Kind.SCORE, 0, 0, C] == pytest.approx(0.7)
    # One GPU of two holds half of the heads; the serving level keeps a table for each batch.
    by_batch = RatesByBatch(hardware, "gather", 16, 4)
    np.testing.assert_array_equal(by_batch.at(32), engine_rates(hardware, "gather", 16, 16, 8))


def test_three_at_once_multiply_kernels_and_weigh_the_link_by_the_share_of_the_chip():
    pairs = (
        _pair("attention", "score", None, (0.2, 0.6)), _pair("attention", "gather", None, (0.9, 0.8), 16),
        _pair("score", "gather", None, (0.5, 1.0), 16), _pair("attention", "ce_d2h", None, (0.5, 0.7)),
    )  # fmt: skip
    rates = engine_rates(H200.model_copy(update={"pairs": pairs}), "gather", 16, 1)[Kind.ATTENTION, Kind.SCORE]
    # Attention holds 0.2 / 0.8 of the chip, scoring the rest.
    np.testing.assert_allclose(rates[1, 0], (0.2 * 0.9, 0.6 * 0.5, 0.25 * 0.8 + 0.75 * 1.0, 1.0))
    duplex_h = H200.link.duplex_h2d_bytes_per_s.value / H200.link.h2d_bytes_per_s.value
    np.testing.assert_allclose(rates[1, 1][:3], (0.2 * 0.9 * 0.5, 0.6 * 0.5, (0.25 * 0.8 + 0.75) * duplex_h))


def test_grids_are_interpolated_within_a_batch_and_rows_without_a_batch_hold_for_all():
    pairs = (
        _pair("gemm", "gather", 8, (0.9, 0.9), 8), _pair("gemm", "gather", 8, (0.7, 0.9), 16),
        _pair("gemm", "gather", 32, (0.5, 0.9), 8), _pair("score", "gather", None, (0.3, 0.9), 8),
    )  # fmt: skip
    hardware = H200.model_copy(update={"pairs": pairs})
    rates = {n: engine_rates(hardware, "gather", 12, n)[:, 0, 1, 0, C] for n in (8, 16, 32)}
    assert rates[8][Kind.GEMM] == pytest.approx(0.8)
    assert rates[16][Kind.GEMM] == pytest.approx(0.65)
    assert [rates[n][Kind.SCORE] for n in (8, 16, 32)] == pytest.approx([0.3] * 3)


def test_a_gather_waits_for_the_programs_that_run_when_it_is_launched():
    def pair(kernel: str, wait_s: float, kernel_s: float) -> PairRate:
        wait = Figure(value=wait_s, source="test")
        return _pair(kernel, "gather", 8, (1.0, 1.0), 4).model_copy(
            update={"launch_wait_s": wait, "kernel_s": kernel_s}
        )

    hardware = H200.model_copy(update={"pairs": (pair("gemm", 30e-6, 25e-6), pair("attention", 40e-6, 80e-6))})

    def wait_s(gemm_s: float, attention_s: float, transport: Transport = "gather") -> float:
        return float(gather_wait_s(hardware, transport, 4, 64, np.array(gemm_s), np.array(attention_s)))

    # As timed: 100 us in four products, 80 us of attention; a launch meets either for the time that it takes.
    assert wait_s(100e-6, 80e-6) == pytest.approx((100 * 30e-6 + 80 * 40e-6) / 180)
    # Attention of half the length has programs of half the length; of twice the length, twice as many.
    assert wait_s(100e-6, 40e-6) == pytest.approx((100 * 30e-6 + 40 * 20e-6) / 140)
    assert wait_s(100e-6, 160e-6) == pytest.approx((100 * 30e-6 + 160 * 40e-6) / 260)
    assert wait_s(100e-6, 80e-6, "ce-batched") == 0
    assert float(gather_wait_s(H200, "gather", 16, 64, np.array(1e-4), np.array(8e-5))) == 0, "not timed"


def test_sum_over_requests_equals_the_plain_loop():
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 50, (13, 3)).astype(np.int32)
    offsets = rng.integers(0, 13, 7)
    plain = [[sum(rows[(o + t) % 13, layer] for o in offsets) for layer in range(3)] for t in range(40)]
    np.testing.assert_array_equal(sum_over_requests(rows, offsets, 40), plain)
