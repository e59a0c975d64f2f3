"""Every field of the experiment schema moves a time or byte metric in the direction that its documentation gives."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.experiment import expand, experiment_keys
from simulator.points import run_point
from traces.errors import InputError

BASE = {
    "trace": "synthetic",
    "trace_group": "short",
    "workload.batch_size": 48,
    "workload.output_tokens": 64,
    "policy.kv_budget_tokens": 512,
}
UNCAPPED = {"policy.fetch_cap": 1.0}
REMOTE = {**UNCAPPED, "placement.kv_tier": "remote"}
ON_DEMAND = {"system": "retrieval"}
H2O, STREAMING, SCISSORHANDS = ({"system": name} for name in ("h2o", "streamingllm", "scissorhands"))
IN_HBM = {"system": "quest", "policy.kv_budget_tokens": 512}
REQUESTS = {
    "model": "Qwen3-0.6B",
    "serving.num_requests": 24,
    "serving.prompt_tokens": 1500,
    "serving.output_tokens": 12,
    "serving.arrivals": "closed",
    "serving.rate_per_s": 20.0,
}
POISSON = {**REQUESTS, "serving.arrivals": "poisson"}
VARIED = {key: value for key, value in REQUESTS.items() if key != "serving.prompt_tokens"}
FULL_HBM = {**REQUESTS, "system": "dense", "engine.hbm_utilization": 0.04, "serving.output_tokens": 900}

# field: (what else is set, value, other value, metric, whether the other value makes it larger; None where the
# direction depends on the trace)
MOVES: dict[str, tuple[dict[str, Any], Any, Any, str, bool | None]] = {
    "system": ({}, "oasiskv", "retrieval", "tpot_mean_s", True),
    "model": ({}, "Qwen3-8B", "Qwen3-14B", "tpot_mean_s", True),
    "hardware": ({"system": "quest"}, "h200-sxm", "h100-sxm", "tpot_mean_s", True),
    "trace_group": ({"system": "dense", "workload.batch_size": 16}, "short", "long", "tpot_mean_s", True),
    "policy.selector": (IN_HBM, "minmax", "all", "t_attention_s", True),
    "policy.recent_share": (H2O, 0.5, 0.0, "recall", None),
    "policy.sink_tokens": ({**STREAMING, "policy.kv_budget_tokens": 64}, 4, 48, "recall", None),
    "policy.history_steps": ({**SCISSORHANDS, "policy.kv_budget_tokens": 256}, 400, 1, "recall", None),
    "policy.mass_history": (H2O, "decode", "prompt", "recall", None),
    "policy.correction_cosine": ({"system": "freekv"}, 0.7, 0.9, "h2d_bytes_per_token", True),
    "policy.dense_below_recall": ({**UNCAPPED, "policy.miss_rule": "dense"}, 0.8, 0.99, "h2d_bytes_per_token", True),
    "policy.key_rank": ({"system": "shadowkv"}, 64, 256, "hbm_bytes_peak", True),
    "policy.predictor": ({"policy.residency": "exact"}, "draft", "current", "exposed_transfer_s", True),
    "policy.draft_pass": ({}, "sparse", "dense", "overlap", True),
    "policy.residency": ({"policy.predictor": "current", **ON_DEMAND}, "exact", "everything", "hbm_bytes_peak", True),
    "policy.slack_blocks": ({}, 1, 16, "hbm_bytes_peak", True),
    "policy.transport": (UNCAPPED, "gather", "ce-per-block", "tpot_mean_s", True),
    "policy.gather_ctas": (UNCAPPED, 16, 2, "exposed_transfer_s", True),
    "policy.miss_rule": ({}, "attend", "stall", "h2d_bytes_per_token", True),
    "policy.kv_dtype": (UNCAPPED, "fp8", "bf16", "h2d_bytes_per_token", True),
    "policy.kv_budget_tokens": ({}, 256, 1024, "hbm_bytes_peak", True),
    "policy.block_size_tokens": ({}, 32, 16, "hbm_bytes_peak", True),
    "policy.fetch_cap": ({}, 0.02, 1.0, "h2d_bytes_per_token", True),
    "policy.fetch_cap_scope": ({"policy.fetch_cap": 0.1}, "head", "layer", "h2d_bytes_per_token", True),
    "policy.lookahead_k": ({}, 1, 4, "t_draft_s", True),
    "policy.lookahead_mode": ({**UNCAPPED, "policy.lookahead_k": 4}, "single", "refine", "h2d_bytes_per_token", True),
    "policy.write_back": ({**UNCAPPED, "policy.transport": "ce-batched"}, "block", "token", "tpot_mean_s", True),
    "policy.metadata_vectors_per_block": ({}, 1, 2, "hbm_bytes_peak", True),
    "policy.metadata_bytes_per_element": ({}, 1.0, 2.0, "hbm_bytes_peak", True),
    "policy.draft_head": ({}, "ngram", "eagle3", "tpot_mean_s", True),
    "policy.verify_drafts": ({"system": "dense", "workload.batch_size": 16}, False, True, "iteration_s", True),
    "workload.batch_size": ({}, 16, 64, "tpot_mean_s", True),
    "workload.context_tokens": (
        {"trace_group": None, "system": "dense", "workload.batch_size": 16},
        2048,
        4096,
        "tpot_mean_s",
        True,
    ),
    "workload.output_tokens": ({}, 64, 512, "hbm_bytes_peak", True),
    "serving.num_requests": (REQUESTS, 8, 32, "duration_s", True),
    "serving.lengths": (
        {"model": "Qwen3-0.6B", "system": "dense", "serving.num_requests": 1},
        "reasoning",
        "reasoning-long",
        "e2e_p50_s",
        True,
    ),
    "serving.prompt_tokens": (REQUESTS, 500, 1500, "ttft_p50_s", True),
    "serving.output_tokens": (REQUESTS, 12, 40, "e2e_p50_s", True),
    "serving.arrivals": (REQUESTS, "poisson", "closed", "queue_mean_s", True),
    "serving.rate_per_s": (POISSON, 5.0, 50.0, "throughput_tokens_per_s", True),
    "serving.burstiness_cv": ({**POISSON, "serving.arrivals": "gamma"}, 1.0, 4.0, "queue_p99_s", True),
    "serving.scheduler": (
        {**VARIED, "serving.max_num_seqs": 1},
        "shortest-remaining-first",
        "fcfs",
        "queue_mean_s",
        True,
    ),
    "serving.max_num_seqs": (REQUESTS, 16, 1, "queue_mean_s", True),
    "serving.max_num_batched_tokens": (REQUESTS, 4096, 512, "num_iterations", True),
    "serving.max_model_len": (VARIED, 100, 4096, "num_finished", True),
    "serving.preemption": (FULL_HBM, "recompute", "swap", "swapped_bytes", True),
    "serving.link_limit": ({**REQUESTS, **UNCAPPED, "system": "retrieval"}, 1.0, 0.01, "queue_mean_s", True),
    "serving.router": (
        {
            **VARIED,
            "serving.arrivals": "poisson",
            "serving.max_num_seqs": 1,
            "serving.rate_per_s": 200.0,
            "placement.num_gpus": 2,
        },
        "round-robin",
        "least-loaded",
        "queue_mean_s",
        None,
    ),
    "serving.disaggregation": (POISSON, "first-set", "full-push", "admission_network_bytes", True),
    "serving.first_token": (
        {**POISSON, "serving.disaggregation": "full-push"},
        "prefill",
        "decode",
        "ttft_p50_s",
        True,
    ),
    "serving.prefill_replicas": ({**REQUESTS, "serving.disaggregation": "full-push"}, 2, 1, "queue_mean_s", True),
    "serving.slo_ttft_s": (REQUESTS, 0.05, 10.0, "slo_attainment", True),
    "serving.slo_tpot_s": (REQUESTS, 0.0001, 10.0, "slo_attainment", True),
    "placement.host_numa": (UNCAPPED, "local", "far", "exposed_transfer_s", True),
    "placement.num_gpus": (UNCAPPED, 1, 8, "throughput_tokens_per_s", True),
    "placement.tensor_parallel": ({}, 4, 1, "tpot_mean_s", True),
    "placement.kv_tier": (UNCAPPED, "host", "remote", "exposed_transfer_s", True),
    "placement.remote_path": (REMOTE, "direct", "staged", "h2d_bytes_per_token", True),
    "placement.nic_numa": (REMOTE, "local", "far", "exposed_transfer_s", True),
    "policy.host_residency": (REMOTE, "full", "none", "remote_bytes_per_token", True),
    "policy.host_cache_tokens": (
        {**REMOTE, "policy.host_residency": "fetched"},
        1536,
        512,
        "remote_bytes_per_token",
        True,
    ),
    "engine.software_overhead_s": ({}, 0.0, 0.001, "tpot_mean_s", True),
    "engine.hbm_utilization": ({}, 0.5, 0.9, "max_batch_size", True),
    "mapping.layers": (ON_DEMAND, "shared", "all", "h2d_bytes_per_token", None),
    "policy.eviction": (
        {"policy.fetch_cap": 0.1},
        "least-recently-selected",
        "lowest-score",
        "h2d_bytes_per_token",
        None,
    ),
}
EXEMPT = {
    "name": "label of the run folder",
    "seed": "random numbers; its effect is tested in test_points",
    "trace": "input file",
    "mapping.rule": "names a mapping or refuses it; tested below and in test_mapping",
    "serving.requests": "input file; tested in serving/test_requests",
    "serving.stamped_batches": "about an input file; tested in serving/test_requests",
    "serving.prefix_cache": "about an input file; tested in serving/test_prefix_reuse",
    "serving.prefix_gpu_tokens": "about an input file; tested in serving/test_prefix_reuse",
    "serving.prefix_host_tokens": "about an input file; tested in serving/test_prefix_reuse",
    "objective.maximize": "chooses among points; tested in test_objective",
    "objective.min_recall": "chooses among points; tested in test_objective",
}


pytestmark = pytest.mark.usefixtures("synthetic")


def point(settings: dict[str, Any]) -> dict[str, Any]:
    (only,) = expand({k: v for k, v in settings.items() if v is not None}, {})
    row = run_point(only, use_cache=False)
    assert row["status"] == "ok", row["error"]
    return row


def test_no_field_is_forgotten():
    assert set(MOVES) | set(EXEMPT) == set(experiment_keys())
    assert not set(MOVES) & set(EXEMPT)


@pytest.mark.parametrize("field", MOVES)
def test_field_moves_a_metric(field):
    others, low, high, metric, larger = MOVES[field]
    settings = {**BASE, **others}
    if field == "policy.selector":
        settings = {k: v for k, v in settings.items() if k != "policy.kv_budget_tokens"}
    before, after = (point({**settings, field: value})[metric] for value in (low, high))
    if larger is None:
        assert before != after
    else:
        assert after > before


def test_a_mapping_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match="identity"):
        point({**BASE, "mapping.rule": "identity"})
