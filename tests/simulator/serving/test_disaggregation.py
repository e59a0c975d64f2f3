"""Prefill on other hosts: what crosses the network, when decoding starts, and that nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import simpy

from simulator import catalog
from simulator.capacity import request_bytes
from simulator.experiment import expand, resolve
from simulator.points import run_point
from simulator.serving.loop import serve_all
from simulator.serving.network import ADMISSION, BACKGROUND, PIECE_BYTES, Network, network_bytes_per_s
from simulator.serving.records import RequestLog
from simulator.serving.requests import make_workload
from simulator.serving.run import ReplicaBuilder
from simulator.systems import resolve_policy
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
QWEN, H100 = catalog.load_model("Qwen3-8B"), catalog.load_hardware("h100-sxm")
FULL_KV_BYTES = QWEN.kv_bytes(6_000)
RATE = network_bytes_per_s(H100, 1)


def row(mode: str, **settings: Any) -> dict[str, Any]:
    (point,) = expand({**BASE, "serving.disaggregation": mode, **settings}, {})
    found = run_point(point, use_cache=False)
    assert found["status"] == "ok", found["error"]
    return found


def at_admission():
    return request_bytes(QWEN, resolve_policy("oasiskv", {"kv_budget_tokens": 512}, 4096), 6_000)


def first_set_bytes() -> int:
    held = at_admission()
    return held.kv + held.compressed_keys + held.draft_kv


def test_idle_handover_takes_one_transfer():
    t0_s = H100.nic.t0_s.value
    full, first = row("full-push", **IDLE), row("first-set", **IDLE)
    assert full["handover_mean_s"] == pytest.approx(t0_s + FULL_KV_BYTES / RATE, rel=1e-9)
    assert first["handover_mean_s"] == pytest.approx(t0_s + first_set_bytes() / RATE, rel=1e-9)
    layered = row("layer-push", **IDLE)
    # What is left when the prompt ends is the last chunk: 1,904 of 6,000 tokens.
    assert layered["handover_mean_s"] == pytest.approx(t0_s + QWEN.kv_bytes(1_904) / RATE, rel=1e-9)
    together = row("none", **IDLE)
    assert full["ttft_p50_s"] == pytest.approx(together["ttft_p50_s"], rel=1e-9)


def test_bytes_over_the_network_are_those_of_the_kv():
    for mode in ("full-push", "layer-push"):
        found = row(mode, **BUSY)
        assert found["admission_network_bytes"] == found["network_bytes_per_request"] == FULL_KV_BYTES
    found = row("first-set", **BUSY)
    assert found["admission_network_bytes"] == first_set_bytes()
    # The rest is the full KV but the working set; compressed keys and draft KV are made on the prefill side.
    held = at_admission()
    assert found["network_bytes_per_request"] == FULL_KV_BYTES + held.compressed_keys + held.draft_kv
    assert found["network_peak_bytes_per_s"] <= RATE


@pytest.mark.parametrize(
    ("system", "mode"),
    [("dense", "full-push"), ("dense", "layer-push"), ("oasiskv", "full-push"), ("oasiskv", "first-set")],
)
def test_every_request_is_handed_over_once_and_nothing_stays(system, mode):
    settings = {**BASE, **BUSY, "system": system, "serving.disaggregation": mode, "serving.prefill_replicas": 2}
    (point,) = expand(settings, {})
    resolved, log = resolve(point), RequestLog()
    serving = resolved.spec.serving
    builder = ReplicaBuilder(resolved, serving, log)
    requests = make_workload(serving, 0).requests()
    decoding, prefill = serve_all(requests, builder.build, "least-loaded", log, builder.build_prefill)
    assert (len(decoding), len(prefill)) == (1, 2)
    assert log.num_finished == 16
    assert log.sum_decoding == 16 * 11
    assert sum(replica.scheduler.tally.prefilled_tokens for replica in prefill) == 16 * 6_000
    assert decoding[0].scheduler.tally.prefilled_tokens == 0
    for replica in (*decoding, *prefill):
        assert (replica.scheduler.pools.used == 0).all()
        assert replica.scheduler.num_unfinished == 0
    tally = decoding[0].handover.tally
    assert (tally.num_requests, tally.staged_bytes) == (16, 0)
    assert decoding[0].handover.network.backlog_bytes == 0


def test_prefill_elsewhere_frees_decoding_from_prompts():
    together, apart = (row(mode, **{"serving.rate_per_s": 3.0}) for mode in ("none", "layer-push"))
    assert apart["tpot_p99_s"] < together["tpot_p99_s"]


def test_a_prefilled_request_waits_for_memory_before_anything_is_sent():
    long = {**BUSY, "system": "dense", "serving.output_tokens": 200}
    tight, roomy = row("full-push", **long, **{"engine.hbm_utilization": 0.235}), row("full-push", **long)
    assert tight["batch_peak"] < roomy["batch_peak"]
    assert tight["handover_mean_s"] > roomy["handover_mean_s"]


def test_admissions_overtake_the_background():
    env = simpy.Environment()
    network = Network(env, 1e9, 0.0)
    done = {}

    def send(name, num_bytes, priority, at_s):
        yield env.timeout(at_s)
        yield from network.send(num_bytes, priority)
        done[name] = env.now

    env.process(send("background", 10 * PIECE_BYTES, BACKGROUND, 0.0))
    env.process(send("admission", PIECE_BYTES, ADMISSION, 0.01))
    env.run()
    piece_s = PIECE_BYTES / 1e9
    assert done["admission"] == pytest.approx(2 * piece_s)
    assert done["background"] == pytest.approx(11 * piece_s)
    assert network.total_bytes == 11 * PIECE_BYTES
    assert network.busy_s == pytest.approx(11 * piece_s)


def test_what_does_not_go_together_is_refused():
    (point,) = expand({**BASE, "system": "dense", "serving.disaggregation": "first-set", **IDLE}, {})
    with pytest.raises(InputError, match="first-set: system dense attends to all of its KV"):
        resolve(point)
