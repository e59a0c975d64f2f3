"""Prefill on other hosts: what crosses the network, when decoding starts, and that nothing is left behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from simulator import catalog, cost
from simulator.capacity import kv_bytes_in_hbm, request_bytes
from simulator.experiment import expand, resolve
from simulator.points import run_point
from simulator.policy_composition import resolve_policy
from simulator.serving.loop import serve_all
from simulator.serving.network import PIECE_BYTES, Part, Wire
from simulator.serving.records import RequestLog
from simulator.serving.requests import make_workload
from simulator.serving.run import ReplicaBuilder
from traces.errors import InputError

BASE: dict[str, Any] = {
    "trace": "synthetic",
    "model": "Qwen3-8B",
    "policy.kv_budget_tokens": 512,
    "serving.num_requests": 16,
    "serving.prompt_tokens": 6_000,
    "serving.output_tokens": 12,
    "serving.arrivals": "poisson",
}
IDLE, BUSY = {"serving.rate_per_s": 0.005}, {"serving.rate_per_s": 50.0}
MODES = ("full-push", "layer-push", "first-set", "pull")
QWEN, H100 = catalog.load_model("Qwen3-8B"), catalog.load_hardware("h100-sxm")
FULL_KV_BYTES = QWEN.kv_bytes(6_000)
WIRE, T0_S = Wire(H100, 1), H100.nic.t0_s.value
OASIS = resolve_policy("oasiskv", {"kv_budget_tokens": 512}, 4096)
HELD = request_bytes(QWEN, OASIS, 6_000)
BESIDES_BYTES = HELD.compressed_keys + HELD.draft_kv
FIRST_KV_BYTES = kv_bytes_in_hbm(QWEN, OASIS.model_copy(update={"residency": "exact", "slack_blocks": None}), 6_000)
NUM_BLOCKS, BLOCK_BYTES = 375, QWEN.block_bytes(16)
HOST_SHARE = 6 * 1_000_000_000 / H100.host.dram_bytes.value
"""Of a host's memory: room for one such prompt's KV, keys and draft KV, not for seven."""


def experiment(mode: str, settings: dict[str, Any]) -> Any:
    (point,) = expand({**BASE, "serving.disaggregation": mode, **settings}, {})
    return point


def row(mode: str, **settings: Any) -> dict[str, Any]:
    found = run_point(experiment(mode, settings), use_cache=False)
    assert found["status"] == "ok", found["error"]
    return found


def serve(mode: str, settings: dict[str, Any]):
    resolved, log = resolve(experiment(mode, settings)), RequestLog()
    serving = resolved.spec.serving
    builder = ReplicaBuilder(resolved, serving, log)
    requests = make_workload(serving, 0).requests()
    decoding, prefill = serve_all(requests, builder.build, serving.router, log, builder.build_prefill)
    return log, decoding, prefill


def seconds(*parts: tuple[int, float]) -> float:
    return WIRE.seconds([Part(*part) for part in parts])


def besides() -> tuple[tuple[int, float], tuple[int, float]]:
    """Compressed keys by layer and head, the draft head's KV by head."""
    return (HELD.compressed_keys, HELD.compressed_keys / (36 * 8)), (HELD.draft_kv, HELD.draft_kv / 8)


def test_idle_handover_takes_one_transfer_in_its_messages():
    whole_s = seconds((FULL_KV_BYTES, NUM_BLOCKS * BLOCK_BYTES), *besides())
    first_s = seconds((FIRST_KV_BYTES, BLOCK_BYTES), *besides())
    pages_s = seconds((FULL_KV_BYTES, 8 * BLOCK_BYTES))
    full, first, dense = row("full-push", **IDLE), row("first-set", **IDLE), row("full-push", system="dense", **IDLE)
    for found, expected_s in ((full, whole_s), (first, first_s), (dense, pages_s)):
        assert found["handover_mean_s"] == pytest.approx(T0_S + expected_s, rel=1e-9)
    assert full["ttft_p50_s"] == pytest.approx(row("none", **IDLE)["ttft_p50_s"], rel=1e-9)


def test_smaller_pages_are_more_messages_and_slower():
    pages = [row("full-push", system="dense", **IDLE, **{"policy.block_size_tokens": size}) for size in (16, 32)]
    assert pages[0]["handover_mean_s"] >= pages[1]["handover_mean_s"]
    scattered = [row("first-set", **IDLE, **{"policy.block_size_tokens": size}) for size in (16, 32)]
    assert scattered[0]["handover_mean_s"] > 1.2 * scattered[1]["handover_mean_s"]


@pytest.mark.parametrize("slower", [1.0, 0.02])
def test_layer_push_exposes_what_the_last_layer_leaves(slower, with_hardware):
    """A network faster than compute: the last layer of the last chunk. A slower one: all bytes, from the first on."""
    with_hardware(nic__bytes_per_s=slower)
    found = row("layer-push", system="dense", **IDLE)
    assert found["layer_push_share"] == 1.0
    chunks, sent_s, now_s = ((2048, 0), (2048, 2048), (1904, 4096)), 0.0, 0.0
    for tokens, before in chunks:
        layer_s = cost.qkv_s(H100, QWEN, tokens) + cost.o_ffn_s(H100, QWEN, tokens)
        layer_s += cost.chunk_attention_s(H100, QWEN, [(tokens, before)], 2)
        iteration_s = QWEN.num_layers * layer_s
        if before + tokens == 6_000:
            iteration_s += cost.lm_head_s(H100, QWEN, 1) + cost.sampling_s(H100, QWEN, 1)
        piece_s = QWEN.kv_bytes(tokens) / 36 / (WIRE.bytes_per_s * slower)
        if slower == 1.0:
            assert piece_s < iteration_s / 36
        for layer in range(1, 37):
            sent_s = max(sent_s, now_s + layer * iteration_s / 36) + piece_s
        sent_s += T0_S
        now_s += iteration_s
    assert found["handover_p50_s"] == pytest.approx(sent_s - now_s, rel=1e-6)
    last_layer_s = QWEN.kv_bytes(1_904) / 36 / (WIRE.bytes_per_s * slower)
    if slower == 1.0:
        assert found["handover_p50_s"] == pytest.approx(last_layer_s + T0_S, rel=1e-6)
    else:
        assert now_s + found["handover_p50_s"] >= FULL_KV_BYTES / (WIRE.bytes_per_s * slower)


def test_layer_push_takes_decode_memory_from_the_first_chunk_on():
    """While one request's prompt is computed its memory on the decode side is taken, and nobody else's."""
    settings = {**IDLE, "system": "dense", "serving.num_requests": 1, "serving.output_tokens": 2}
    _, (decoding,), (prefill,) = serve("layer-push", settings)
    held = decoding.scheduler.tables.decode[376]
    assert decoding.scheduler.pools.peak.tolist() == held.tolist()
    assert prefill.handover.tally.num_expected == 1
    # With room for one request on the decode side the others are pushed whole, later.
    one = {**BUSY, "system": "dense", "engine.hbm_utilization": 0.235, "serving.output_tokens": 200}
    tight, roomy = row("layer-push", **one), row("layer-push", **BUSY, system="dense")
    assert tight["layer_push_share"] < 1.0 == roomy["layer_push_share"]
    assert tight["handover_p99_s"] > roomy["handover_p99_s"]


def test_every_mode_sends_the_same_bytes_in_the_end():
    for mode in ("full-push", "layer-push", "first-set"):
        found = row(mode, **IDLE, **{"serving.output_tokens": 100})
        # What plans fetch while its piece is on the way crosses twice.
        twice = found["network_bytes_per_request"] - FULL_KV_BYTES - BESIDES_BYTES
        assert 0 <= twice <= PIECE_BYTES * (mode == "first-set")
        expected = FIRST_KV_BYTES if mode == "first-set" else FULL_KV_BYTES
        assert found["admission_network_bytes"] == expected + BESIDES_BYTES
        assert found["network_peak_bytes_per_s"] <= WIRE.bytes_per_s * (1 + 1e-9)
        assert found["network_burst_factor"] >= 1.0
    dense = row("full-push", system="dense", **BUSY)
    assert dense["network_bytes_per_request"] == dense["admission_network_bytes"] == FULL_KV_BYTES


@pytest.mark.parametrize("mode", MODES)
def test_bytes_sent_are_bytes_received_are_those_of_the_requests(mode, tmp_path):
    spec = experiment(mode, {**BUSY, "serving.prefill_replicas": 2})
    found = run_point(spec, use_cache=False, requests_path=tmp_path / "r.parquet")
    requests = pq.read_table(tmp_path / "r.parquet").to_pydict()
    assert sum(requests["network_bytes"]) == found["network_bytes_per_request"] * 16
    assert set(requests["prefill_replica"]) == {0, 1}
    np.testing.assert_allclose(np.median(requests["handover_s"]), found["handover_p50_s"])
    _, (decoding,), _ = serve(mode, {**BUSY, "serving.prefill_replicas": 2})
    handover = decoding.handover
    assert handover.tally.asked_bytes == handover.links[0].traffic.total_bytes == sum(requests["network_bytes"])
    assert handover.links[0].traffic.backlog_bytes == 0


@pytest.mark.parametrize(
    ("system", "mode"),
    [
        ("dense", "full-push"), ("dense", "layer-push"), ("oasiskv", "layer-push"), ("oasiskv", "first-set"),
        ("quest", "full-push"), ("h2o", "full-push"), ("shadowkv", "first-set"), ("flexgen", "layer-push"),
        ("oasiskv", "pull"), ("retrieval", "pull"),
    ],
)  # fmt: skip
def test_every_request_is_handed_over_once_and_nothing_stays(system, mode):
    settings = {**BUSY, "system": system, "serving.prefill_replicas": 2, "serving.router": "least-loaded"}
    log, decoding, prefill = serve(mode, settings)
    assert (len(decoding), len(prefill)) == (1, 2)
    assert log.num_finished == 16
    assert log.sum_decoding == 16 * 11
    assert sum(replica.scheduler.tally.prefilled_tokens for replica in prefill) == 16 * 6_000
    assert decoding[0].scheduler.tally.prefilled_tokens == 0
    for replica in (*decoding, *prefill):
        assert (replica.scheduler.pools.used == 0).all()
        assert replica.scheduler.num_unfinished == 0
    assert decoding[0].handover.tally.num_handovers == 16


@pytest.mark.parametrize("mode", MODES)
def test_several_replicas_on_both_sides_lose_nothing_and_have_a_link_each(mode):
    settings = {**BUSY, "placement.num_gpus": 4, "serving.prefill_replicas": 3, "serving.num_requests": 40}
    log, decoding, prefill = serve(mode, {**settings, "serving.router": "least-loaded"})
    assert (len(decoding), len(prefill), len(decoding[0].handover.links)) == (4, 3, 4)
    assert log.num_finished == 40
    assert all(replica.busy_s > 0 for replica in (*decoding, *prefill))
    for replica in (*decoding, *prefill):
        assert (replica.scheduler.pools.used == 0).all()
    handover = decoding[0].handover
    assert handover.tally.asked_bytes == handover.links[0].traffic.total_bytes
    # One request at a time has one replica's adapter, however many the host has.
    one, four = (row(mode, **IDLE, **{"placement.num_gpus": gpus, "serving.prefill_replicas": 1}) for gpus in (1, 4))
    assert four["handover_p50_s"] == pytest.approx(one["handover_p50_s"], rel=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_all_gpus_of_a_replica_send_and_receive(mode):
    one = row(mode, **IDLE, **{"serving.output_tokens": 100})
    two = row(mode, **IDLE, **{"serving.output_tokens": 100, "placement.tensor_parallel": 2})
    # The draft head's KV heads are divided like the model's: the same bytes over twice the adapters.
    assert two["admission_network_bytes"] == one["admission_network_bytes"]
    assert two["network_bytes_per_request"] == pytest.approx(one["network_bytes_per_request"], rel=0.05)
    assert two["handover_p50_s"] < 0.7 * one["handover_p50_s"]
    assert two["host_bytes_per_request_peak"] == pytest.approx(one["host_bytes_per_request_peak"], rel=0.05)


def test_prefill_elsewhere_does_not_disturb_decoding():
    """TPOT does not know how fast prompts come, as long as batches stay small; together it does."""
    calm, hurried = {"serving.rate_per_s": 0.01}, {"serving.rate_per_s": 3.0}
    alone = row("layer-push", **calm)["tpot_p99_s"]
    together, apart = row("none", **hurried), row("layer-push", **hurried)
    assert apart["batch_peak"] <= 2
    assert apart["tpot_p99_s"] < 1.1 * alone
    assert together["tpot_p99_s"] > 2 * alone


def test_a_slow_network_hurts_only_who_uses_it(with_hardware):
    names = ("ttft_p50_s", "second_token_p50_s", "e2e_p99_s", "throughput_tokens_per_s")
    before = {mode: row(mode, **BUSY) for mode in ("none", *MODES)}
    with_hardware(nic__bytes_per_s=0.01)
    after = {mode: row(mode, **BUSY) for mode in ("none", *MODES)}
    assert [after["none"][name] for name in names] == [before["none"][name] for name in names]
    for mode in MODES:
        assert after[mode]["second_token_p50_s"] > 3 * before[mode]["second_token_p50_s"]
        assert after[mode]["throughput_tokens_per_s"] < 0.5 * before[mode]["throughput_tokens_per_s"]
        assert after[mode]["bound"] == "remote"
    assert before["none"]["bound"] == after["none"]["bound"] != "remote"


def test_staged_prompts_never_exceed_host_memory_and_hold_up_the_next(with_hardware):
    """A host with room for six prompts; a slow network keeps them there, so the next do not start."""
    settings = {**BUSY, "system": "dense"}
    with_hardware(nic__bytes_per_s=0.05)
    roomy = row("full-push", **settings)
    assert roomy["prefill_blocked_s"] == 0.0
    assert roomy["prefill_staging_bytes_peak"] > 8 * FULL_KV_BYTES
    with_hardware(nic__bytes_per_s=0.05, host__dram_bytes=HOST_SHARE)
    tight = row("full-push", **settings)
    assert tight["prefill_staging_bytes_peak"] == 6 * FULL_KV_BYTES
    assert tight["prefill_blocked_s"] > 0.0
    assert tight["ttft_mean_s"] > 2 * roomy["ttft_mean_s"]
    assert tight["num_finished"] == 16


def test_a_prompt_larger_than_staging_is_refused_by_name(with_hardware):
    with_hardware(host__dram_bytes=0.5e9 / H100.host.dram_bytes.value)
    found = run_point(experiment("full-push", {**BUSY, "system": "dense"}), use_cache=False)
    assert found["status"] == "does_not_fit"
    assert "request 0: 6,000 prompt" in found["error"]


def test_a_request_that_makes_room_is_prefilled_again_on_a_prefill_replica():
    settings = {**BUSY, "system": "dense", "engine.hbm_utilization": 0.26, "serving.output_tokens": 1_500}
    log, (decoding,), (prefill,) = serve("full-push", settings)
    dropped, again = decoding.scheduler.tally, prefill.scheduler.tally
    assert dropped.num_preemptions > 0
    assert dropped.prefilled_tokens == 0
    assert again.prefilled_tokens == 16 * 6_000 + dropped.recomputed_tokens + dropped.num_preemptions
    tally = decoding.handover.tally
    assert (tally.num_requests, tally.num_handovers) == (16, 16 + dropped.num_preemptions)
    assert log.num_finished == 16
    assert log.output_tokens == 16 * 1_500
    # The stop is one gap, from the token before it to the one that its second prefill ends with.
    assert log.gaps.num_gaps == log.output_tokens - 16
    assert log.gaps.total_s == pytest.approx(log.times_s("e2e_s").sum() - log.times_s("ttft_s").sum(), rel=1e-9)
    for replica in (decoding, prefill):
        assert (replica.scheduler.pools.used == 0).all()


def test_the_first_token_comes_from_prefill_or_with_the_handover():
    streamed, later = (row("full-push", **IDLE, **{"serving.first_token": side}) for side in ("prefill", "decode"))
    # One gap in eleven has the handover in it, or none.
    assert streamed["itl_p99_s"] == pytest.approx(streamed["handover_p50_s"] + later["itl_p99_s"], rel=1e-3)
    assert streamed["itl_p90_s"] < 1.1 * later["itl_p90_s"]
    assert later["ttft_p50_s"] == pytest.approx(streamed["ttft_p50_s"] + streamed["handover_p50_s"])
    assert later["e2e_p50_s"] == pytest.approx(streamed["e2e_p50_s"])
    assert later["tpot_p50_s"] < streamed["tpot_p50_s"]
    step_s = later["tpot_p50_s"]
    assert streamed["second_token_p50_s"] == pytest.approx(later["ttft_p50_s"] + step_s, rel=0.01)


def test_a_prefilled_request_waits_for_memory_before_anything_is_sent():
    long = {**BUSY, "system": "dense", "serving.output_tokens": 200}
    tight, roomy = row("full-push", **long, **{"engine.hbm_utilization": 0.235}), row("full-push", **long)
    assert tight["batch_peak"] < roomy["batch_peak"]
    assert tight["handover_mean_s"] > roomy["handover_mean_s"]


def test_host_memory_of_a_request_is_its_whole_kv():
    found = row("full-push", **BUSY)
    assert found["host_bytes_per_request_peak"] == QWEN.kv_bytes(376 * 16)
    assert found["host_bytes_per_request_mean"] == pytest.approx(QWEN.kv_bytes(375 * 16), rel=0.01)
    assert row("full-push", system="dense", **BUSY)["host_bytes_per_request_peak"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_gives_the_same_bytes(mode, tmp_path):
    spec = experiment(mode, {**BUSY, "serving.prefill_replicas": 2})
    rows = [run_point(spec, use_cache=False, requests_path=tmp_path / f"{n}.parquet") for n in (1, 2)]
    assert rows[0] == rows[1]
    assert (tmp_path / "1.parquet").read_bytes() == (tmp_path / "2.parquet").read_bytes()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"system": "dense", "serving.disaggregation": "first-set"},
            "first-set: system dense attends to all of its",
        ),
        ({"system": "flexgen", "serving.disaggregation": "pull"}, "pull: system flexgen attends to all of its KV"),
        (
            {"system": "retrieval", "policy.miss_rule": "dense", "serving.disaggregation": "pull"},
            "miss_rule: dense",
        ),
        ({"system": "h2o", "serving.disaggregation": "layer-push"}, "layer-push: what system h2o keeps is known when"),
        ({"serving.preemption": "swap"}, "disaggregation full-push goes with preemption recompute"),
        ({"placement.kv_tier": "remote"}, "placement.kv_tier.* host"),
        ({"serving.prefill_replicas": 1_025}, "serving.prefill_replicas: .*less than or equal to 1024"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_line(settings, problem):
    with pytest.raises(InputError, match=problem) as refused:
        resolve(experiment("full-push", {**IDLE, **settings}))
    assert "\n" not in str(refused.value)


def test_a_host_without_adapters_is_refused(with_hardware):
    with_hardware(nic__per_socket=0.0)
    with pytest.raises(InputError, match="full-push needs a NIC; a h100-sxm host has none"):
        resolve(experiment("full-push", IDLE))
