"""Serving points end to end: conservation, idle latency, what binds and what does not, requests that never fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from simulator import cost
from simulator.experiment import expand, resolve
from simulator.points import point_key, run_point
from simulator.serving.loop import Replica, serve_all
from simulator.serving.pools import Pool
from simulator.serving.records import RequestLog
from simulator.serving.requests import make_workload
from simulator.serving.run import ReplicaBuilder
from simulator.specs.experiment import ExperimentSpec
from traces.errors import InputError

BASE: dict[str, Any] = {
    "trace": "synthetic",
    "model": "Qwen3-0.6B",
    "policy.kv_budget_tokens": 512,
    "serving.num_requests": 24,
    "serving.prompt_tokens": 1500,
    "serving.output_tokens": 40,
}
FULL = {"engine.hbm_utilization": 0.04, "serving.output_tokens": 900}
"""HBM holds the KV of few of these requests. Offloading systems are short of host memory instead."""


def experiment(settings: dict[str, Any]) -> ExperimentSpec:
    (only,) = expand({**BASE, **settings}, {})
    return only


def row(**settings: Any) -> dict[str, Any]:
    found = run_point(experiment({key.replace("__", "."): value for key, value in settings.items()}), use_cache=False)
    assert found["status"] == "ok", found["error"]
    return found


def serve(settings: dict[str, Any]) -> tuple[RequestLog, Replica]:
    point = resolve(experiment(settings))
    log = RequestLog()
    build = ReplicaBuilder(point, point.spec.serving, log).build
    (replica,), _ = serve_all(make_workload(point.spec.serving, 0).requests(), build, "round-robin", log)
    return log, replica


def assert_every_token_has_a_gap(log: RequestLog) -> None:
    """As many as tokens after each request's first; together they last from its first to its last."""
    assert log.gaps.num_gaps == log.output_tokens - log.num_finished
    decoding_s = log.times_s("e2e_s").sum() - log.times_s("ttft_s").sum()
    assert log.gaps.total_s == pytest.approx(decoding_s, rel=1e-9)


def test_a_model_that_does_not_fit_is_told_before_any_request_runs():
    found = run_point(experiment({"engine.hbm_utilization": 0.01}), use_cache=False)
    assert found["status"] == "does_not_fit"
    assert found["error"].startswith("weights and the activations of 2,048 tokens need 1.")
    assert found["num_requests"] is None


def test_every_token_goes_home_once_and_again_where_it_was_dropped(with_hardware):
    """Written token by token: prefilled ones, dropped or not, and one per decode step."""
    with_hardware(host__dram_bytes=0.0005)
    log, replica = serve({"system": "oasiskv", "policy.write_back": "token", "serving.output_tokens": 900})
    tally, token_bytes = replica.scheduler.tally, 28 * 8 * 2 * 128 * 2
    assert tally.recomputed_tokens > 0
    assert replica.times.d2h_bytes == token_bytes * (tally.prefilled_tokens + log.sum_decoding)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("system", ["dense", "oasiskv", "quest"])
def test_nothing_is_lost_when_requests_make_room(system, preemption, with_hardware):
    settings = {"system": system, "serving.preemption": preemption, **FULL}
    if system == "oasiskv":
        settings["engine.hbm_utilization"] = 0.9
        with_hardware(host__dram_bytes=0.0005)
    log, replica = serve(settings)
    tally = replica.scheduler.tally
    assert log.num_finished == log.num_arrived == 24
    assert log.output_tokens == 24 * 900
    assert tally.num_preemptions > 0
    assert (tally.num_swaps > 0) == (preemption == "swap" and system != "oasiskv")
    assert_every_token_has_a_gap(log)
    # Every token of KV is made by a prefill or a decode step; what was dropped is made again.
    assert tally.prefilled_tokens + log.sum_decoding == 24 * (1500 + 899) + tally.recomputed_tokens
    assert (replica.scheduler.pools.used == 0).all()
    assert replica.scheduler.num_unfinished == 0
    if system == "dense" and preemption == "swap":
        assert replica.times.h2d_bytes == replica.times.d2h_bytes == tally.swapped_bytes / 2 > 0


def test_prompts_of_many_chunks_and_one_iteration_prefill_the_same_tokens():
    for tokens in (256, 700, 1500, 8192):
        log, replica = serve({"system": "dense", "serving.max_num_batched_tokens": tokens})
        assert replica.scheduler.tally.prefilled_tokens == 24 * 1500
        assert log.output_tokens == 24 * 40


def test_an_idle_system_answers_after_the_prefill_alone():
    """First token = software, products, causal attention, logits and sampling of the prompt's chunks."""
    spec = experiment(
        {
            "system": "dense",
            "serving.prompt_tokens": 5000,
            "serving.arrivals": "poisson",
            "serving.rate_per_s": 0.01,
            "engine.software_overhead_s": 1e-4,
        }
    )
    point = resolve(spec)
    model, hardware = point.model, point.hardware
    expected_s = 0.0
    for tokens, before in ((2048, 0), (2048, 2048), (904, 4096)):
        layer_s = cost.qkv_s(hardware, model, tokens) + cost.o_ffn_s(hardware, model, tokens)
        layer_s += cost.chunk_attention_s(hardware, model, [(tokens, before)], 2)
        expected_s += 1e-4 + model.num_layers * layer_s
    expected_s += cost.lm_head_s(hardware, model, 1) + cost.sampling_s(hardware, model, 1)
    found = run_point(spec, use_cache=False)
    assert found["ttft_p50_s"] == pytest.approx(expected_s, rel=1e-9)
    assert found["ttft_p99_s"] == pytest.approx(expected_s, rel=1e-9)
    assert found["queue_p99_s"] == pytest.approx(0.0, abs=1e-9)


def test_what_does_not_bind_changes_nothing_and_what_binds_does(with_hardware):
    names = ("throughput_tokens_per_s", "ttft_p50_s", "tpot_p50_s", "e2e_p99_s")
    uncapped = {"system": "retrieval", "serving__output_tokens": 100}
    before = {"dense": row(system="dense"), "retrieval": row(**uncapped)}
    with_hardware(host__dram_bytes=2.0, gpu__hbm_bytes=2.0)
    for system, settings in (("dense", {"system": "dense"}), ("retrieval", uncapped)):
        after = row(**settings)
        assert [after[name] for name in names] == [before[system][name] for name in names]
    with_hardware(link__gather_bytes_per_s=0.01, link__h2d_bytes_per_s=0.01, link__gather_cta_bytes_per_s=0.01)
    slower = row(system="dense")
    assert [slower[name] for name in names] == [before["dense"][name] for name in names]
    assert row(**uncapped)["tpot_p50_s"] > 5 * before["retrieval"]["tpot_p50_s"]
    with_hardware(gpu__bf16_sustained_flops=2.0)
    assert row(system="dense")["ttft_p50_s"] <= before["dense"]["ttft_p50_s"]
    with_hardware(kernels__attention_bytes_per_s=2.0, kernels__gemm_bytes_per_s=2.0)
    assert row(system="dense")["tpot_p50_s"] < before["dense"]["tpot_p50_s"]


def test_memory_binds_where_the_queue_waits_for_it():
    """Requests that arrive at once and fit a few at a time, without one that has to make room."""
    short = row(system="dense", engine__hbm_utilization=0.032)
    assert (short["bound"], short["num_preemptions"]) == ("capacity", 0)
    assert 0.1 < short["memory_wait_share"] <= 1.0
    assert "memory is short in" in short["bound_detail"]
    free = row(system="dense")
    assert free["bound"] != "capacity"
    assert free["memory_wait_share"] == 0.0


def test_more_memory_ends_preemption():
    assert row(system="dense", **{k.replace(".", "__"): v for k, v in FULL.items()})["num_preemptions"] > 0
    assert row(system="dense", serving__output_tokens=900)["num_preemptions"] == 0


def test_link_admission_keeps_requests_waiting_rather_than_the_gpu():
    free = row(system="retrieval", policy__transport="ce-per-block")
    bounded = row(system="retrieval", policy__transport="ce-per-block", serving__link_limit=0.5)
    assert bounded["batch_mean"] < free["batch_mean"]
    assert bounded["tpot_p50_s"] < free["tpot_p50_s"]
    assert bounded["queue_mean_s"] > free["queue_mean_s"]


def test_requests_that_never_fit_are_named_and_the_run_goes_on(tmp_path):
    lines = "".join(f"{at},{prompt},10\n" for at, prompt in ((0, 300), (1, 60_000), (2, 400), (3, 50_000)))
    file = tmp_path / "requests.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n" + lines)
    settings = {"system": "dense", "serving.requests": str(file), "serving.num_requests": None}
    found = run_point(experiment(settings), use_cache=False, requests_path=tmp_path / "requests.parquet")
    assert (found["num_requests"], found["num_finished"], found["num_refused"]) == (4, 2, 2)
    assert found["first_refused"] == "request 1: 60,000 prompt and 10 output tokens"
    table = pq.read_table(tmp_path / "requests.parquet").to_pylist()
    assert [(line["request"], line["status"]) for line in sorted(table, key=lambda line: line["request"])] == [
        (0, "ok"),
        (1, "never_fits"),
        (2, "ok"),
        (3, "never_fits"),
    ]
    file.write_text("arrival_s,prompt_tokens,output_tokens\n0,60000,10\n")
    found = run_point(experiment(settings), use_cache=False)
    assert found["status"] == "does_not_fit"
    assert "request 0: 60,000 prompt" in found["error"]


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    spec = experiment({"serving.arrivals": "gamma", "serving.rate_per_s": 50.0, "serving.burstiness_cv": 2.0})
    rows = [run_point(spec, use_cache=False, requests_path=tmp_path / f"{n}.parquet") for n in (1, 2)]
    assert rows[0] == rows[1]
    assert (tmp_path / "1.parquet").read_bytes() == (tmp_path / "2.parquet").read_bytes()
    other = run_point(spec.model_copy(update={"seed": 1}), use_cache=False)
    assert other["e2e_p50_s"] != rows[0]["e2e_p50_s"]


def test_each_request_is_in_the_file(tmp_path):
    found = run_point(experiment({"serving.arrivals": "poisson", "serving.rate_per_s": 40.0}), use_cache=False,
                      requests_path=tmp_path / "r.parquet")  # fmt: skip
    table = pq.read_table(tmp_path / "r.parquet").to_pydict()
    assert sorted(table["request"]) == list(range(24))
    assert np.median(table["ttft_s"]) == pytest.approx(found["ttft_p50_s"])
    assert np.quantile(table["tpot_s"], 0.99) == pytest.approx(found["tpot_p99_s"])


def test_equal_runs_have_one_key_and_unequal_ones_another(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n0,600,10\n")
    from_file = experiment({"serving.requests": str(file), "serving.num_requests": None})
    key = point_key(from_file)
    file.write_text("arrival_s,prompt_tokens,output_tokens\n0,601,10\n")
    assert point_key(from_file) != key
    closed = experiment({"serving.arrivals": "closed"})
    assert point_key(experiment({"serving.arrivals": "closed", "serving.rate_per_s": 3.0})) == point_key(closed)
    assert point_key(experiment({"workload.batch_size": 3})) == point_key(experiment({}))


@pytest.mark.parametrize("system", ["dense", "oasiskv"])
def test_verified_drafts_serve_the_same_tokens_in_fewer_iterations(system):
    drafts = {"system": system, "policy.verify_drafts": True, "policy.lookahead_k": 3}
    if system == "dense":
        drafts["policy.predictor"] = "current"
    plain_log, _ = serve({"system": system})
    log, replica = serve(drafts)
    assert log.output_tokens == plain_log.output_tokens == 24 * 40
    assert log.sum_decoding < plain_log.sum_decoding == 24 * 39
    # What a step brings together arrives once.
    assert (log.gaps.num_gaps, plain_log.gaps.num_gaps) == (log.sum_decoding, plain_log.sum_decoding)
    assert (replica.scheduler.pools.used == 0).all()


REMOTE = {"system": "oasiskv", "placement__kv_tier": "remote", "policy__host_cache_tokens": 1024}


def test_kv_beyond_the_host_is_charged_there():
    on_host = row(system="oasiskv")
    kept = {name: row(**REMOTE, policy__host_residency=name) for name in ("none", "fetched", "full")}
    whole = on_host["host_bytes_peak"]
    assert on_host["remote_bytes_peak"] == 0
    assert [found["remote_bytes_peak"] for found in kept.values()] == [whole] * 3
    assert [kept[name]["host_bytes_peak"] for name in ("none", "full")] == [0, whole]
    assert kept["fetched"]["host_bytes_peak"] == pytest.approx(whole * 1024 / (1500 + 40), rel=0.02)
    read = [kept[name]["remote_bytes_per_token"] for name in ("none", "fetched", "full")]
    assert read == sorted(read, reverse=True)
    assert read[-1] == 0
    assert on_host["remote_bytes_per_token"] == 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("short_of", ["hbm", "remote"])
def test_nothing_is_lost_where_the_kv_lies_beyond_the_host(short_of, preemption, with_hardware):
    """Short of the tier beyond, a swap would free nothing: requests prefill again."""
    settings = {key.replace("__", "."): value for key, value in REMOTE.items()}
    settings |= {"serving.preemption": preemption, "serving.output_tokens": 900}
    if short_of == "hbm":
        settings |= {"engine.hbm_utilization": 0.028, "policy.kv_budget_tokens": 1024, "policy.slack_blocks": 64}
    else:
        with_hardware(nic__pool_bytes=0.0005)
    log, replica = serve(settings)
    tally = replica.scheduler.tally
    assert log.num_finished == log.num_arrived == 24
    assert tally.num_preemptions > 0
    assert (tally.num_swaps > 0) == (preemption == "swap" and short_of == "hbm")
    assert tally.prefilled_tokens + log.sum_decoding == 24 * (1500 + 899) + tally.recomputed_tokens
    assert (replica.scheduler.pools.used == 0).all()
    whole = replica.scheduler.tables.decode[:, Pool.REMOTE_KV]
    assert replica.scheduler.pools.remote_peak_bytes >= 2 * whole[1500 // 16]


def test_a_swapped_working_set_comes_back_from_beyond_the_host():
    """Compressed keys and draft KV were swapped to the host; the blocks themselves never left their home."""
    settings = {key.replace("__", "."): value for key, value in REMOTE.items()}
    settings |= {"serving.preemption": "swap", "serving.output_tokens": 900, "engine.hbm_utilization": 0.028}
    settings |= {"policy.kv_budget_tokens": 1024, "policy.slack_blocks": 64}
    reads = {}
    for preemption in ("recompute", "swap"):
        _, replica = serve({**settings, "serving.preemption": preemption})
        reads[preemption] = replica.times.remote_read_bytes
    tables, tally = replica.scheduler.tables, replica.scheduler.tally
    assert tally.num_swaps > 0
    assert (tables.remote_swap_in == tables.decode[:, Pool.SPARSE_KV]).all()
    assert (tables.swap_out + tables.remote_swap_in == tables.swap_in).all()
    assert reads["swap"] - reads["recompute"] >= 0.8 * tally.num_swaps * tables.remote_swap_in[1500 // 16]


def test_the_longest_request_is_what_rope_scaling_gives():
    asked = {"model": "Qwen3-8B", "serving.max_model_len": 131_072}
    assert resolve(experiment(asked)).spec.serving.max_model_len == 131_072
    with pytest.raises(InputError, match="max_model_len 131073: Qwen3-8B has 131072 positions"):
        resolve(experiment({**asked, "serving.max_model_len": 131_073}))
    # Unset, it is what the model has by itself.
    point = resolve(experiment({"model": "Qwen3-8B"}))
    assert ReplicaBuilder(point, point.spec.serving, RequestLog()).tables.max_tokens == 40_960
