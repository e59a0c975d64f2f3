"""A prefix cache in a serving run: what hits, what it saves, what it loads, how its size matters."""

from __future__ import annotations

import json
from typing import Any

import pytest

from simulator.experiment import expand
from simulator.points import run_point
from simulator.specs.serving import ServingSpec
from traces.errors import InputError


@pytest.fixture
def turns(tmp_path):
    """Twelve conversations in turns, four rounds: each prompt is the one before and two blocks more."""
    rows = []
    for turn in range(4):
        for user in range(12):
            ids = [1000 * user + block for block in range(2 * (turn + 1))]
            rows.append(
                {"timestamp": 1000 * len(rows), "input_length": 512 * len(ids), "output_length": 4, "hash_ids": ids}
            )
    file = tmp_path / "turns.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def serve(turns: str, **settings: Any) -> dict[str, Any]:
    base = {"trace": "synthetic", "model": "Qwen3-0.6B", "system": "dense", "serving.requests": turns}
    named = {key.replace("__", "."): value for key, value in settings.items()}
    if named.get("system") == "oasiskv":
        named["policy.kv_budget_tokens"] = 512
    (point,) = expand({**base, **named}, {})
    row = run_point(point, use_cache=False)
    assert row["status"] == "ok", row["error"]
    return row


def test_a_large_cache_skips_all_that_came_before(turns):
    without, found = serve(turns), serve(turns, serving__prefix_cache="gpu")
    # Turns 2 to 4 find 2, 4 and 6 of their 4, 6 and 8 blocks.
    assert found["prefix_hit_share"] == pytest.approx(12 / 20)
    assert found["prefix_reused_tokens"] == 12 * 12 * 512
    prefilled = {name: row["prefill_tokens_per_s"] * row["duration_s"] for name, row in
                 (("without", without), ("found", found))}  # fmt: skip
    assert prefilled["without"] - prefilled["found"] == pytest.approx(12 * 12 * 512)
    assert found["ttft_p90_s"] < without["ttft_p90_s"]
    assert (found["prefix_loaded_bytes"], without["prefix_hit_share"]) == (0, None)


def test_a_hit_on_the_host_crosses_the_link(turns):
    on_gpu, on_host = (serve(turns, serving__prefix_cache=tiers) for tiers in ("gpu", "host"))
    assert on_host["prefix_hit_share"] == on_host["prefix_host_hit_share"] == on_gpu["prefix_hit_share"]
    kv_bytes = 28 * 8 * 2 * 128 * 2
    assert on_host["prefix_loaded_bytes"] == 12 * 12 * 512 * kv_bytes
    assert on_host["h2d_bytes_per_token"] * 48 * 4 == on_host["prefix_loaded_bytes"]
    # Every block goes to the host once; a system that keeps its KV there has written it back anyway.
    assert on_host["d2h_bytes_per_token"] * 48 * 4 == pytest.approx(12 * 8 * 512 * kv_bytes)
    assert on_host["ttft_p90_s"] > on_gpu["ttft_p90_s"]
    # A model whose prefill takes longer than loading what it computes.
    large = {"system": "oasiskv", "model": "Qwen3-14B"}
    offloading = [serve(turns, **large, serving__prefix_cache=tiers) for tiers in ("none", "host")]
    assert offloading[1]["prefix_hit_share"] == on_gpu["prefix_hit_share"]
    assert offloading[1]["d2h_bytes_per_token"] < offloading[0]["d2h_bytes_per_token"]
    assert offloading[1]["ttft_p90_s"] < offloading[0]["ttft_p90_s"]


def test_a_small_cache_hits_less_and_the_host_makes_up_for_it(turns):
    small = serve(turns, serving__prefix_cache="gpu", serving__prefix_gpu_tokens=512 * 20)
    both = serve(turns, serving__prefix_cache="gpu+host", serving__prefix_gpu_tokens=512 * 20)
    full = serve(turns, serving__prefix_cache="gpu")
    assert small["prefix_hit_share"] < both["prefix_hit_share"] == full["prefix_hit_share"]
    assert both["prefix_host_hit_share"] > 0
    capped = serve(turns, serving__prefix_cache="gpu+host", serving__prefix_gpu_tokens=512 * 20,
                   serving__prefix_host_tokens=512 * 20)  # fmt: skip
    assert capped["prefix_hit_share"] < both["prefix_hit_share"]


def test_running_requests_take_the_cache_s_memory(turns):
    """HBM just above the weights: what requests hold while they run is not there for the cache."""
    tight = serve(turns, serving__prefix_cache="gpu", engine__hbm_utilization=0.05)
    assert 0 < tight["prefix_hit_share"] < serve(turns, serving__prefix_cache="gpu")["prefix_hit_share"]


def test_a_cache_needs_hash_ids(tmp_path):
    with pytest.raises(ValueError, match="hash ids"):
        ServingSpec(prefix_cache="gpu")
    file = tmp_path / "plain.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n0,600,10\n")
    with pytest.raises(InputError, match=r"plain.csv has no hash ids"):
        serve(str(file), serving__prefix_cache="gpu")


@pytest.mark.parametrize("mode", ["full-push", "layer-push"])
def test_a_prefill_replica_reuses_and_still_hands_all_of_it_over(turns, mode):
    together = serve(turns, serving__prefix_cache="host")
    apart = {
        tiers: serve(turns, serving__prefix_cache=tiers, serving__disaggregation=mode) for tiers in ("none", "host")
    }
    names = ("prefix_hit_share", "prefix_host_hit_share", "prefix_reused_tokens", "prefix_loaded_bytes")
    assert [apart["host"][name] for name in names] == [together[name] for name in names]
    assert apart["none"]["prefix_hit_share"] is None
    prefilled = {tiers: found["prefill_tokens_per_s"] * found["duration_s"] for tiers, found in apart.items()}
    assert prefilled["none"] - prefilled["host"] == pytest.approx(together["prefix_reused_tokens"])
    assert apart["host"]["network_bytes_per_request"] == apart["none"]["network_bytes_per_request"]
