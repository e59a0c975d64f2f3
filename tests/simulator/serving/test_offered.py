"""Offered against served: what counts as overload, on logs whose backlog is known, and one rule for what is kept."""

from __future__ import annotations

import pytest

from analysis.kept_rates import kept_rates, overload_line
from simulator.experiment import expand
from simulator.points import run_point
from simulator.serving.offered import OFFERED, offered_load
from simulator.serving.records import RequestLog
from simulator.serving.request_state import RequestState

NUM, OUTPUT = 100, 11


def log_of(wait_s: float, stop_s: float = 0.0, gap_s: float = 1.0) -> RequestLog:
    """A request every `gap_s`; the i-th waits i * `wait_s`, prefills 0.5 s, decodes 10 tokens in 1 s, and every third
    stops for `stop_s` in the middle."""
    log = RequestLog()
    for index in range(NUM):
        request = RequestState(index, index * gap_s, 100, OUTPUT)
        log.arrive(request)
        request.started_s = request.arrival_s + index * wait_s
        request.first_token_s = request.started_s + 0.5
        request.finished_s = request.first_token_s + 1.0 + stop_s * (index % 3 == 0)
        log.finish(request)
    return log


def test_the_end_of_the_last_request_is_no_backlog():
    load = offered_load(log_of(0.0))
    assert load["offered_tokens_per_s"] == pytest.approx(NUM * OUTPUT / 99)
    assert load["offered_prompt_tokens_per_s"] == pytest.approx(NUM * 100 / 99)
    assert load["drain_s"] == pytest.approx(1.5)
    assert load["served_share"] == pytest.approx(1.0)
    assert load["overloaded"] is False


def test_a_queue_that_grows_is_overload():
    """The last waits 19.8 s after 99 s of arrivals: served while they came were five of six."""
    load = offered_load(log_of(0.2))
    assert load["served_share"] == pytest.approx(99 / (99 + 19.8), rel=1e-6)
    assert load["overloaded"] is True
    assert offered_load(log_of(0.03))["overloaded"] is False


def test_requests_that_stopped_in_the_middle_are_a_backlog_without_a_queue():
    load = offered_load(log_of(0.0, stop_s=60.0))
    assert load["served_share"] == pytest.approx(99 / (99 + 60.0), rel=1e-6)
    assert load["overloaded"] is True


def test_a_drain_longer_than_the_arrivals_is_one_burst():
    load = offered_load(log_of(0.0, gap_s=0.01))
    assert load["served_share"] == pytest.approx(0.99 / (0.99 + 1.5))
    assert load["overloaded"] is True


def test_all_at_once_has_no_rate():
    assert offered_load(log_of(0.1, gap_s=0.0)) == dict.fromkeys(OFFERED)
    assert offered_load(RequestLog()) == dict.fromkeys(OFFERED)


def row(system, rate, attainment, overloaded):
    return {
        "system": system, "serving.rate_per_s": rate, "slo_attainment": attainment, "overloaded": overloaded,
        "offered_tokens_per_s": 1000.0 * rate, "throughput_tokens_per_s": 900.0, "drain_s": 70.0,
    }  # fmt: skip


def test_a_rate_is_kept_only_below_the_first_that_is_missed_or_overloaded():
    rows = [
        row("rises", 1, 0.5, True), row("rises", 2, 0.95, True), row("rises", 4, 0.99, True),
        row("falls", 1, 1.0, False), row("falls", 2, 0.95, False), row("falls", 4, 0.99, True),
        row("returns", 1, 1.0, False), row("returns", 2, 0.8, False), row("returns", 4, 0.99, False),
    ]  # fmt: skip
    assert kept_rates(rows) == {"rises": None, "falls": 2, "returns": 1}
    assert overload_line(rows[:3]) == (
        "Overloaded at every rate: 1,000 to 4,000 output tokens/s offered, 900 served; latencies there are those of "
        "one burst, not of a rate."
    )
    assert overload_line(rows).startswith(
        "Overloaded: rises at 1 a second and more, falls at 4 a second and more (1,000 to 4,000"
    )
    assert "70 s from the last arrival to the last token" in overload_line(rows[2:3])
    assert overload_line(rows[6:]) is None


def test_more_arrivals_than_a_gpu_serves_are_overload_end_to_end():
    base = {
        "model": "Qwen3-0.6B", "system": "dense", "serving.arrivals": "poisson", "serving.num_requests": 60,
        "serving.prompt_tokens": 8000, "serving.output_tokens": 20,
    }  # fmt: skip
    slow, fast = (run_point(point, use_cache=False) for point in expand(base, {"serving.rate_per_s": [1.0, 100.0]}))
    assert slow["overloaded"] is False
    assert slow["served_share"] > 0.99
    assert fast["overloaded"] is True
    assert fast["throughput_tokens_per_s"] < 0.9 * fast["offered_tokens_per_s"]
