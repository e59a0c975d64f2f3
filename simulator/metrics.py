"""Names and units of every result column. Standard library only: read by analysis and the command line alike."""

from __future__ import annotations

PARAMETERS = (
    "system",
    "model",
    "hardware",
    "trace",
    "trace_group",
    "mapping",
    "workload.batch_size",
    "workload.context_tokens",
    "workload.output_tokens",
    "policy.kv_budget_tokens",
    "policy.block_size_tokens",
    "policy.fetch_cap",
    "policy.lookahead_k",
    "placement.host_numa",
    "placement.num_gpus",
    "placement.tensor_parallel",
    "placement.kv_tier",
    "seed",
)
"""Always present; keys that an experiment sets beyond these are added under their dotted names."""

METRICS = {
    "throughput_tokens_per_s": "tokens/s",
    "tpot_mean_s": "s",
    "tpot_p50_s": "s",
    "tpot_p99_s": "s",
    "ttft_p50_s": "s",
    "exposed_transfer_s": "s",
    "hidden_fraction": "1",
    "hit_rate": "1",
    "overlap": "1",
    "recall": "1",
    "recall_upper": "1",
    "churn": "1",
    "h2d_bytes_per_token": "bytes",
    "d2h_bytes_per_token": "bytes",
    "remote_bytes_per_token": "bytes",
    "admission_bytes": "bytes",
    "link_utilization": "1",
    "hbm_bytes_peak": "bytes",
    "host_bytes_peak": "bytes",
    "max_batch_size": "requests",
    "bound": "",
}

BREAKDOWN = (
    "t_qkv_s",
    "t_attention_s",
    "t_ffn_s",
    "t_score_s",
    "t_plan_s",
    "t_gather_s",
    "t_exposed_wait_s",
    "t_allreduce_s",
    "t_draft_s",
    "t_sampling_s",
    "t_lm_head_s",
    "t_software_s",
    "t_other_s",
)
"""Mean seconds of a step by what the compute stream runs or, when idle, waits for, per token that it gains; they sum to
tpot_mean_s."""

EXTRA = {
    "throughput_per_gpu_tokens_per_s": "tokens/s",
    "kv_bytes_read_per_token": "bytes",
    "hbm_ceiling_tokens_per_s": "tokens/s",
    "h2d_ceiling_tokens_per_s": "tokens/s",
    "remote_ceiling_tokens_per_s": "tokens/s",
    "compute_ceiling_tokens_per_s": "tokens/s",
    "link_busy_s": "s",
    "nvme_bytes_per_token": "bytes",
    "remote_busy_s": "s",
    "remote_utilization": "1",
    "remote_bytes_peak": "bytes",
    "tokens_per_iteration": "tokens",
    "iteration_s": "s",
    "draft_overhead_s": "s",
    "min_recall": "1",
    "bound_detail": "",
}
"""For plots and explanations: bytes of KV and metadata that HBM serves per token; tokens/s if only that bound; of
speculation the tokens that a request gains per step, the step's mean seconds, and what drafting and its rows add to
the kernels of a step.

`remote_*`: the way beyond the host, whatever is there; `remote_bytes_per_token` what crosses the NIC, both ways,
`nvme_bytes_per_token` what drives read and write.
"""

SERVING = {
    "num_requests": "requests",
    "num_finished": "requests",
    "num_refused": "requests",
    "first_refused": "",
    "duration_s": "s",
    "requests_per_s": "requests/s",
    "goodput_requests_per_s": "requests/s",
    "slo_attainment": "1",
    "offered_tokens_per_s": "tokens/s",
    "offered_prompt_tokens_per_s": "tokens/s",
    "served_share": "1",
    "drain_s": "s",
    "overloaded": "bool",
    "ttft_mean_s": "s",
    "ttft_p90_s": "s",
    "ttft_p99_s": "s",
    "tpot_p90_s": "s",
    "itl_mean_s": "s",
    "itl_p50_s": "s",
    "itl_p90_s": "s",
    "itl_p99_s": "s",
    "e2e_mean_s": "s",
    "e2e_p50_s": "s",
    "e2e_p90_s": "s",
    "e2e_p99_s": "s",
    "queue_mean_s": "s",
    "queue_p50_s": "s",
    "queue_p90_s": "s",
    "queue_p99_s": "s",
    "in_system_mean": "requests",
    "batch_mean": "requests",
    "batch_peak": "requests",
    "num_iterations": "iterations",
    "iteration_mean_s": "s",
    "gpu_utilization": "1",
    "d2h_utilization": "1",
    "prefill_tokens_per_s": "tokens/s",
    "num_preemptions": "preemptions",
    "memory_wait_share": "1",
    "num_swaps": "preemptions",
    "recomputed_tokens": "tokens",
    "swapped_bytes": "bytes",
    "second_token_mean_s": "s",
    "second_token_p50_s": "s",
    "second_token_p90_s": "s",
    "second_token_p99_s": "s",
    "handover_mean_s": "s",
    "handover_p50_s": "s",
    "handover_p90_s": "s",
    "handover_p99_s": "s",
    "prefill_gpu_utilization": "1",
    "prefill_blocked_s": "s",
    "prefill_staging_bytes_peak": "bytes",
    "admission_network_bytes": "bytes",
    "network_bytes_per_request": "bytes",
    "network_utilization": "1",
    "network_peak_bytes_per_s": "bytes/s",
    "network_burst_factor": "1",
    "network_backlog_peak_bytes": "bytes",
    "layer_push_share": "1",
    "prefix_hit_share": "1",
    "prefix_host_hit_share": "1",
    "prefix_reused_tokens": "tokens",
    "prefix_loaded_bytes": "bytes",
    "host_bytes_per_request_mean": "bytes",
    "host_bytes_per_request_peak": "bytes",
    "full_kv_bytes_peak": "bytes",
    "sparse_kv_bytes_peak": "bytes",
    "compressed_keys_bytes_peak": "bytes",
    "draft_kv_bytes_peak": "bytes",
    "kv_pool_utilization_peak": "1",
    "trace_groups": "",
}
"""Only in rows of serving runs. There TPOT, TTFT, E2E and queue time are quantiles over finished requests, the
breakdown is per iteration, and pools are per GPU. A request that never fits is refused; the first one is named.

`offered_*` (output and prompt tokens), `served_share`, `drain_s`, `overloaded`: `simulator.serving.offered`; under
overload latencies and the SLO's share are those of one burst, not of a rate. The SLO looks at TTFT and the mean TPOT
of a request, so a stop in the middle (a preemption) is spread over all its tokens; what one does to a request is in
its E2E, in `num_preemptions` and in `itl_*`, the time from one arrival of tokens to the next over all requests
(inter-token latency). Tokens that a verified step brings together arrive once, as vLLM's serving benchmark counts.

`second_token_*`: from arrival to the second token. `handover_*`: from the end of a prompt on a prefill replica until
decoding could start elsewhere. `prefill_blocked_s`: a prefill replica's idle time with prompts that had no memory.
`network_peak_bytes_per_s` is over 0.1 s; `network_burst_factor` divides it by the mean over such windows with traffic.
With prefill elsewhere `remote_*` is what plans fetch from there. `layer_push_share`: handovers whose layers could be
sent as they were computed."""

STATUS = ("point_key", "status", "error")
STATUSES = ("ok", "does_not_fit", "failed")
COLUMNS = (*STATUS, *PARAMETERS, *METRICS, *BREAKDOWN, *EXTRA)
