"""Seconds of each kernel of a decode step, alone, inside a captured graph. Pure functions of geometry and profile.

A kernel takes t0 + max(bytes / rate, flops / sustained); GEMM and dense attention use measured tables where the
profile names one and the shape is inside it. Rows: 1 real token per request plus the draft rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulator import kernel_tables
from simulator.selectors.table import SELECTORS
from simulator.specs.hardware import HardwareSpec
from simulator.specs.model import ModelSpec
from simulator.specs.policy import KV_BYTES_PER_ELEMENT, PolicySpec
from simulator.timed_kernels import timed_gemm_s, timed_kernel_s, timed_selection_s

LOOKAHEAD_WINDOW, LOOKAHEAD_CANDIDATES = 15, 15
"""Columns W of lookahead decoding's window and candidate n-grams G. Source: arXiv 2402.02057, its 7B setting."""
HIDDEN_BYTES = 2
"""Activations between layers are bf16."""


def drafts(policy: PolicySpec) -> bool:
    """Whether the step carries draft rows. Oracle and random stand for perfect and useless drafts: same cost."""
    return policy.verify_drafts or policy.predictor in ("draft", "oracle", "random")


def draft_rows(policy: PolicySpec) -> int:
    """Extra rows per request in the layer stack: one per drafted position, 1 … k.

    Lookahead decoding runs W window columns and G candidates of k rows each (n-grams of k + 1 tokens) instead.
    """
    if not drafts(policy):
        return 0
    branches = LOOKAHEAD_WINDOW + LOOKAHEAD_CANDIDATES if policy.draft_head == "lookahead-ngram" else 1
    return policy.lookahead_k * branches


def logit_rows(policy: PolicySpec) -> int:
    """Rows per request whose logits are computed: the real one, verified drafts, all of lookahead decoding's."""
    if drafts(policy) and policy.draft_head == "lookahead-ngram":
        return 1 + draft_rows(policy)
    return 1 + policy.lookahead_k if policy.verify_drafts else 1


def scored_rows(policy: PolicySpec) -> int:
    """Query rows ranked per step and layer: the target's, or all (union), or the farthest and the nearest (refine).

    Verified drafts: the real row and one per drafted position, as the working set serves all of them.
    """
    if policy.verify_drafts:
        return 1 + policy.lookahead_k
    if not drafts(policy):
        return 1
    return {"single": 1, "union": policy.lookahead_k, "refine": 2}[policy.lookahead_mode]


def gemm_s(hardware: HardwareSpec, m: int, n: int, k: int, weight_bytes: float | None = None) -> float:
    """[m, k] x [k, n] in bf16; `weight_bytes` differs from 2 n k for quantised weights (then no table)."""
    kernels = hardware.kernels
    plain = weight_bytes is None or weight_bytes == 2 * n * k
    timed = timed_gemm_s(kernels, m, n, k) if plain else None
    if timed is not None:
        return timed + switch_s(hardware)
    if kernels.table is not None and plain:
        measured = kernel_tables.gemm_s(kernels.table, m, n, k)
        if measured is not None:
            return measured
    weights = 2.0 * n * k if weight_bytes is None else weight_bytes
    moved = (weights + 2.0 * m * (n + k)) / kernels.gemm_bytes_per_s.value
    compute = 2.0 * m * n * k / hardware.gpu.bf16_sustained_flops.value
    return kernels.gemm_t0_s.value + switch_s(hardware) + max(moved, compute)


def attention_s(
    hardware: HardwareSpec, model: ModelSpec, batch_size: int, kv_tokens: int, rows: int, kv_bytes_per_element: int,
    dense_table: bool = False,
) -> float:  # fmt: skip
    """Split-K decode attention of one layer over `kv_tokens` tokens per KV head; all rows read the same KV.

    `dense_table`: use the measured dense decode-attention table where it reaches (one row, bf16).
    """
    kernels = hardware.kernels
    timed = None
    if kv_bytes_per_element == 2 and model.mla is None:
        timed = _timed_s(hardware, model, "attention", batch_size, kv_tokens, rows)
    if timed is not None:
        return timed
    measured = None
    if dense_table and kernels.table is not None and kv_bytes_per_element == 2 and model.mla is None:
        measured = kernel_tables.decode_attention_s(
            kernels.table, batch_size, kv_tokens, model.num_q_heads, model.num_kv_heads, model.head_dim
        )
    if measured is not None and rows == 1:
        return measured
    num_bytes = batch_size * kv_tokens * model.kv_bytes_per_token_per_layer(kv_bytes_per_element)
    flops = 2.0 * batch_size * rows * kv_tokens * model.num_q_heads * 2 * model.key_elements_per_token_per_head
    moved_s = num_bytes / kernels.attention_bytes_per_s.value
    compute_s = flops / hardware.gpu.bf16_sustained_flops.value
    if measured is not None:  # of one row: further rows read nothing more, and compute
        return max(measured, kernels.attention_t0_s.value + switch_s(hardware) + compute_s)
    return kernels.attention_t0_s.value + switch_s(hardware) + max(moved_s, compute_s)


def ranked_blocks(policy: PolicySpec, num_blocks: int) -> int:
    """Blocks per KV head that a step ranks: all of the context, or the resident ones where the others are gone."""
    if policy.residency != "drop" or policy.kv_budget_tokens is None:
        return num_blocks
    return min(num_blocks, policy.kv_budget_tokens // policy.block_size_tokens + 1)


def scored_bytes(model: ModelSpec, policy: PolicySpec, num_blocks: int) -> float:
    """What ranking a step's blocks reads, per request and over all layers.

    Compressed keys: L H n v d s_m. A selector that reads attention has its weights from one more pass over the
    resident keys, L H n P d s: fused attention kernels do not write weights. An assumption.
    """
    reads = "nothing" if policy.selector == "all" else SELECTORS[policy.selector].reads
    if reads == "nothing":
        return 0.0
    ranked = ranked_blocks(policy, num_blocks)
    if reads == "keys":
        return model.metadata_bytes(ranked, policy.metadata_vectors_per_block, policy.metadata_bytes_per_element)
    return model.metadata_bytes(ranked, policy.block_size_tokens, KV_BYTES_PER_ELEMENT[policy.kv_dtype])


def selection_s(
    hardware: HardwareSpec, model: ModelSpec, policy: PolicySpec, batch_size: int, num_blocks: int, num_slots: int
) -> tuple[float, float, float]:
    """(scoring, top-K, plan) of one layer; nothing where positions alone decide, no plan where everything stays."""
    if SELECTORS[policy.selector].reads == "nothing":
        return 0.0, 0.0, 0.0
    ranked = ranked_blocks(policy, num_blocks)
    return (
        score_s(hardware, model, policy, batch_size, ranked),
        topk_s(hardware, model, policy, batch_size, ranked),
        0.0 if policy.residency == "everything" else plan_s(hardware, model, policy, batch_size, num_slots),
    )


def query_s(hardware: HardwareSpec, model: ModelSpec, rows: int) -> float:
    """A layer's query projection alone."""
    return gemm_s(hardware, rows, model.num_q_heads * model.head_dim, model.hidden)


def moved_block_bytes(model: ModelSpec, policy: PolicySpec) -> int:
    """What of a block crosses the link: keys and values, or values alone where low-rank keys stay in HBM."""
    whole = model.block_bytes(policy.block_size_tokens, KV_BYTES_PER_ELEMENT[policy.kv_dtype])
    return whole if policy.key_rank is None else whole // 2


def rebuild_keys_s(hardware: HardwareSpec, model: ModelSpec, policy: PolicySpec, num_blocks: float) -> float:
    """Keys of arriving blocks from their low-rank form: one batched product, [P, rank] x [rank, d] per block.

    Source: ShadowKV (arXiv 2410.21465) section 4; serial before attention here, beside the value fetch there.
    """
    if policy.key_rank is None or num_blocks == 0:
        return 0.0
    tokens = num_blocks * policy.block_size_tokens
    moved_s = 2.0 * tokens * (policy.key_rank + model.head_dim) / hardware.kernels.gemm_bytes_per_s.value
    compute_s = 2.0 * tokens * policy.key_rank * model.head_dim / hardware.gpu.bf16_sustained_flops.value
    return hardware.kernels.gemm_t0_s.value + switch_s(hardware) + max(moved_s, compute_s)


def score_s(hardware: HardwareSpec, model: ModelSpec, policy: PolicySpec, batch_size: int, num_blocks: int) -> float:
    """Score a layer's compressed keys (or resident keys, `scored_bytes`), read once for all rows."""
    plain = (policy.metadata_vectors_per_block, policy.metadata_bytes_per_element) == (2, 2.0)
    plain = plain and SELECTORS[policy.selector].reads == "keys"
    timed = _timed_s(hardware, model, "score", batch_size, num_blocks) if plain else None
    if timed is not None:
        return timed
    num_bytes = batch_size * scored_bytes(model, policy, num_blocks) / model.num_full_attention_layers
    moved_s = num_bytes / hardware.kernels.score_bytes_per_s.value
    return hardware.kernels.score_t0_s.value + switch_s(hardware) + moved_s


def topk_s(hardware: HardwareSpec, model: ModelSpec, policy: PolicySpec, batch_size: int, num_blocks: int) -> float:
    timed = _timed_selection_s(hardware, model, "topk", batch_size * scored_rows(policy), num_blocks, policy)
    if timed is not None:
        return timed
    scores = batch_size * model.num_kv_heads * num_blocks * scored_rows(policy)
    return hardware.kernels.topk_t0_s.value + switch_s(hardware) + scores * hardware.kernels.topk_s_per_score.value


def plan_s(hardware: HardwareSpec, model: ModelSpec, policy: PolicySpec, batch_size: int, num_slots: int) -> float:
    timed = _timed_selection_s(hardware, model, "plan", batch_size, num_slots, policy)
    if timed is not None:
        return timed
    slots = batch_size * model.num_kv_heads * num_slots
    return hardware.kernels.plan_t0_s.value + switch_s(hardware) + slots * hardware.kernels.plan_s_per_slot.value


def _timed_s(
    hardware: HardwareSpec, model: ModelSpec, kind: str, batch_size: int, size: int, rows: int = 1
) -> float | None:
    """A launch as calibration timed it, where it did for this head dimension."""
    timed = timed_kernel_s(hardware.kernels, kind, batch_size * model.num_kv_heads, size, model.head_dim, rows)
    return None if timed is None else timed + switch_s(hardware)


def _timed_selection_s(
    hardware: HardwareSpec, model: ModelSpec, kind: str, batch_size: int, size: int, policy: PolicySpec
) -> float | None:
    """A top-K or plan launch as calibration timed it, at the policy's K; their time does not ask for head_dim."""
    if policy.kv_budget_tokens is None:
        return None
    kept = policy.kv_budget_tokens // policy.block_size_tokens
    timed = timed_selection_s(hardware.kernels, kind, batch_size * model.num_kv_heads, size, kept)
    return None if timed is None else timed + switch_s(hardware)


def side_streams_s(hardware: HardwareSpec) -> float:
    """What a layer costs more where side streams work for it, beside what their kernels take, where it was timed."""
    timed = hardware.kernels.side_streams_s
    return 0.0 if timed is None else timed.value


def switch_s(hardware: HardwareSpec) -> float:
    """What each launch costs more in a step than in a row of its own kind, where calibration timed it."""
    timed = hardware.kernels.switch_s
    return 0.0 if timed is None else timed.value


def qkv_s(hardware: HardwareSpec, model: ModelSpec, rows: int) -> float:
    """Query, key and value projections of one layer for `rows` tokens, as one product."""
    if model.mla is not None:  # several products over the same tokens; their weights dominate
        return gemm_s(hardware, rows, model.qkv_params // model.hidden, model.hidden, model.qkv_bytes)
    n = (model.num_q_heads + 2 * model.num_kv_heads) * model.head_dim
    return gemm_s(hardware, rows, n, model.hidden, model.qkv_bytes) + small_kernel_s(hardware)


def o_ffn_s(hardware: HardwareSpec, model: ModelSpec, rows: int) -> float:
    """Output projection and feed-forward of one layer, mean over the layers (MoE models may start dense)."""
    o = gemm_s(hardware, rows, model.hidden, model.o_params // model.hidden, model.o_bytes)
    dense = moe = 0.0
    if model.num_dense_ffn_layers:
        gate_up_bytes, down_bytes = model.ffn_bytes * 2 // 3, model.ffn_bytes // 3
        dense = gemm_s(hardware, rows, 2 * model.intermediate, model.hidden, gate_up_bytes) + gemm_s(
            hardware, rows, model.hidden, model.intermediate, down_bytes
        )
    if model.moe is not None and model.num_moe_layers:
        active = model.moe.experts_per_token + model.moe.shared_experts
        flops = 2.0 * rows * (active * model.expert_params + model.router_params)
        kernels = hardware.kernels
        moved_s = model.moe_layer_read_bytes(rows) / kernels.gemm_bytes_per_s.value
        # Router, grouped gate/up, grouped down.
        moe = 3 * kernels.gemm_t0_s.value + max(moved_s, flops / hardware.gpu.bf16_sustained_flops.value)
    ffn = (dense * model.num_dense_ffn_layers + moe * model.num_moe_layers) / model.num_layers
    return o + ffn + small_kernel_s(hardware)


def small_kernel_s(hardware: HardwareSpec) -> float:
    """Appending new KV, and the gated activation: a launch each, charged where calibration timed it."""
    timed = hardware.kernels.small_kernel_s
    return 0.0 if timed is None else timed.value + switch_s(hardware)


def allreduce_s(hardware: HardwareSpec, num_bytes: float, tensor_parallel: int) -> float:
    """Sum `num_bytes` over the GPUs of a replica, each ending with the result: the faster of two algorithms.

    One phase: every GPU reads the others' buffers, t0 + (n − 1) bytes / B. Two phases (reduce-scatter, all-gather):
    2 t0 + 2 (n − 1)/n bytes / B, the least that any all-reduce without switch arithmetic moves. Source: Patarasuk and
    Yuan, JPDC 69(2), 2009, for the bound; both algorithms as in vLLM's custom all-reduce.
    """
    if tensor_parallel == 1:
        return 0.0
    n, nvlink = tensor_parallel, hardware.nvlink
    one_way_s = num_bytes * (n - 1) / nvlink.bytes_per_s.value
    t0_s = nvlink.allreduce_t0_s.value
    return min(t0_s + one_way_s, 2 * t0_s + 2 * one_way_s / n)


def allgather_s(hardware: HardwareSpec, num_bytes: float, tensor_parallel: int) -> float:
    """Every GPU ends with the `num_bytes` of which each had an equal part: one phase of the all-reduce's two."""
    if tensor_parallel == 1:
        return 0.0
    part = num_bytes / tensor_parallel
    return hardware.nvlink.allreduce_t0_s.value + part * (tensor_parallel - 1) / hardware.nvlink.bytes_per_s.value


def layer_allreduces_s(hardware: HardwareSpec, model: ModelSpec, rows: int) -> float:
    """Both all-reduces of one layer, after O and after the feed-forward, of `rows` hidden states."""
    return 2 * allreduce_s(hardware, float(HIDDEN_BYTES * rows * model.hidden), model.tensor_parallel)


def step_collectives_s(hardware: HardwareSpec, model: ModelSpec, rows: int, logit_rows: int) -> float:
    """Once per step: the all-reduce of embeddings split by vocabulary, and the gathering of bf16 logits."""
    embedded = allreduce_s(hardware, float(HIDDEN_BYTES * rows * model.hidden), model.tensor_parallel)
    return embedded + logits_gather_s(hardware, model, logit_rows, model.vocab)


def logits_gather_s(hardware: HardwareSpec, model: ModelSpec, rows: int, vocab: int) -> float:
    """Gathering of `rows` rows of bf16 logits of which every GPU has `vocab`."""
    return allgather_s(hardware, 2.0 * rows * vocab * model.tensor_parallel, model.tensor_parallel)


def lm_head_s(hardware: HardwareSpec, model: ModelSpec, rows: int) -> float:
    """Logits of `rows` rows. So large a matrix streams at the HBM read rate."""
    kernels = hardware.kernels
    timed = timed_gemm_s(kernels, rows, model.lm_head_params // model.hidden, model.hidden)
    if timed is not None:
        return timed + switch_s(hardware)
    moved_s = (model.lm_head_bytes + 2.0 * rows * model.vocab) / hardware.gpu.hbm_read_bytes_per_s.value
    flops = 2.0 * rows * model.lm_head_params
    return kernels.gemm_t0_s.value + max(moved_s, flops / hardware.gpu.bf16_sustained_flops.value)


def sampling_s(hardware: HardwareSpec, model: ModelSpec, rows: int) -> float:
    """One pass over fp32 logits [rows, vocab], on every GPU of a replica alike."""
    kernels = hardware.kernels
    return kernels.sampling_t0_s.value + 4.0 * rows * model.num_logits / kernels.sampling_bytes_per_s.value


def prefill_s(hardware: HardwareSpec, model: ModelSpec, context_tokens: int) -> float:
    """One request's prompt, compute-bound: 2 x active parameters x tokens, plus causal attention: 2 H_q d L S^2.

    All-reduces of a split model are not hidden behind it.
    """
    active = model.num_layers * (model.qkv_params + model.o_params) + model.num_dense_ffn_layers * model.ffn_params
    if model.moe is not None:
        experts = model.moe.experts_per_token + model.moe.shared_experts
        active += model.num_moe_layers * (experts * model.expert_params + model.router_params)
    window = model.sliding_window or context_tokens
    pairs = model.num_full_attention_layers * context_tokens**2 / 2
    pairs += len(model.sliding_layers) * context_tokens * min(window, context_tokens)
    flops = 2.0 * active * context_tokens + 4.0 * model.num_q_heads * model.head_dim * pairs
    allreduces_s = model.num_layers * layer_allreduces_s(hardware, model, context_tokens)
    return flops / hardware.gpu.bf16_sustained_flops.value + allreduces_s


def chunk_attention_s(
    hardware: HardwareSpec, model: ModelSpec, chunks: Sequence[tuple[int, int]], kv_bytes_per_element: int,
    window_tokens: int | None = None,
) -> float:  # fmt: skip
    """One layer's causal attention of prefill chunks, one launch: each (chunk tokens, tokens before it).

    A chunk of c tokens after p computes c p + c (c + 1) / 2 query-key pairs per query head and reads p + c tokens of
    KV; `window_tokens` bounds what a token attends to (sliding-window layers). Nothing without chunks.
    """
    if not chunks:
        return 0.0
    total_s = 0.0
    for tokens, before in chunks:
        pairs = tokens * before + tokens * (tokens + 1) / 2
        read = tokens + before
        if window_tokens is not None:
            # Token i of the chunk attends to min(before + i, window) tokens.
            growing = min(max(window_tokens - before, 0), tokens)
            pairs = growing * before + growing * (growing + 1) / 2 + (tokens - growing) * window_tokens
            read = min(read, tokens + window_tokens)
        flops = 4.0 * model.num_q_heads * model.head_dim * pairs
        num_bytes = read * model.kv_bytes_per_token_per_layer(kv_bytes_per_element)
        compute_s = flops / hardware.gpu.bf16_sustained_flops.value
        total_s += max(compute_s, num_bytes / hardware.kernels.attention_bytes_per_s.value)
    return hardware.kernels.attention_t0_s.value + switch_s(hardware) + total_s
