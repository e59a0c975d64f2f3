"""Kernel times: order, growth and limits that any of them must have."""

from __future__ import annotations

import pytest

from simulator import catalog, cost, draft_heads
from simulator.specs.policy import PolicySpec

QWEN = catalog.load_model("Qwen3-8B")
H100, H200 = catalog.load_hardware("h100-sxm"), catalog.load_hardware("h200-sxm")
DRAFT = PolicySpec(kv_budget_tokens=2048)


@pytest.mark.parametrize(
    ("batch", "context", "kernel", "micros"),
    [
        (16, 32768, "qkv", 16.0), (16, 32768, "o_ffn", 99.5), (16, 32768, "attention", 40.2),
        (16, 32768, "score", 51.6), (16, 32768, "topk", 20.8), (16, 32768, "lm_head", 284),
        (32, 16384, "qkv", 16.1), (32, 16384, "o_ffn", 102.5), (32, 16384, "attention", 71.7),
        (32, 16384, "score", 52.4), (32, 16384, "topk", 22.7), (64, 16384, "qkv", 16.7),
        (64, 16384, "o_ffn", 110.5), (64, 16384, "attention", 138.1), (64, 16384, "score", 98.6),
        (64, 16384, "topk", 41.0),
    ],
)  # fmt: skip
def test_components_of_the_measured_decode_step(batch, context, kernel, micros):
    """H200 SXM, torch 2.11, Triton 3.6, in a graph, two rows a request."""
    rows, blocks = 2 * batch, context // 16
    seconds = {
        "qkv": lambda: cost.qkv_s(H200, QWEN, rows),
        "o_ffn": lambda: cost.o_ffn_s(H200, QWEN, rows),
        "attention": lambda: cost.attention_s(H200, QWEN, batch, 2048, 2, 2),
        "score": lambda: cost.score_s(H200, QWEN, DRAFT, batch, blocks),
        "topk": lambda: cost.topk_s(H200, QWEN, DRAFT, batch, blocks),
        "lm_head": lambda: cost.lm_head_s(H200, QWEN, batch),
    }[kernel]()
    assert seconds * 1e6 == pytest.approx(micros, rel=0.12)


@pytest.mark.parametrize("hardware", [H100, H200], ids=lambda h: h.name)
def test_no_kernel_beats_the_byte_floor(hardware):
    read = hardware.gpu.hbm_bytes_per_s.value
    assert cost.qkv_s(hardware, QWEN, 32) > QWEN.qkv_bytes / read
    assert cost.o_ffn_s(hardware, QWEN, 32) > (QWEN.o_bytes + QWEN.ffn_bytes) / read
    assert cost.lm_head_s(hardware, QWEN, 32) > QWEN.lm_head_bytes / read
    assert cost.attention_s(hardware, QWEN, 32, 2048, 1, 2) > 32 * 2048 * QWEN.kv_bytes_per_token_per_layer() / read


def test_more_work_takes_longer():
    assert cost.attention_s(H100, QWEN, 32, 4096, 1, 2) > cost.attention_s(H100, QWEN, 32, 2048, 1, 2)
    assert cost.score_s(H100, QWEN, DRAFT, 64, 1024) > cost.score_s(H100, QWEN, DRAFT, 32, 1024)
    assert cost.gemm_s(H100, 4096, 8192, 8192) > cost.gemm_s(H100, 32, 8192, 8192)
    assert cost.prefill_s(H100, QWEN, 8192) > 2 * cost.prefill_s(H100, QWEN, 4096)


def test_draft_rows_follow_the_predictor():
    assert cost.draft_rows(DRAFT.model_copy(update={"lookahead_k": 4})) == 4
    assert cost.draft_rows(PolicySpec(predictor="previous")) == 0
    assert cost.scored_rows(DRAFT.model_copy(update={"lookahead_k": 4, "lookahead_mode": "union"})) == 4


def test_drafting_costs_a_head_per_token_or_a_lookup():
    two = DRAFT.model_copy(update={"lookahead_k": 2})
    assert draft_heads.draft_s(H100, QWEN, two, 32, 4096) > 1.5 * draft_heads.draft_s(H100, QWEN, DRAFT, 32, 4096)
    ngram = DRAFT.model_copy(update={"draft_head": "ngram"})
    assert draft_heads.draft_s(H100, QWEN, ngram, 32, 4096) == draft_heads.NGRAM_LOOKUP_S
    assert draft_heads.draft_s(H100, QWEN, PolicySpec(predictor="previous"), 32, 4096) == 0


def test_a_mixture_of_experts_reads_only_the_experts_it_uses():
    moe = catalog.load_model("Qwen3-30B-A3B")
    assert cost.o_ffn_s(H100, moe, 1) < 0.3 * cost.o_ffn_s(H100, moe, 256)


def test_prefill_of_qwen3_8b_is_near_its_flops():
    """2 x 7.57e9 parameters x 8,192 tokens plus attention, at the sustained rate."""
    seconds = cost.prefill_s(H100, QWEN, 8192)
    assert seconds == pytest.approx(8192 * 2 * 6.95e9 / H100.gpu.bf16_sustained_flops.value, rel=0.2)


def test_chunks_of_a_prompt_cost_its_causal_attention():
    # Any split of a prompt has the pairs of the whole: S (S + 1) / 2, where compute binds.
    whole = cost.chunk_attention_s(H100, QWEN, [(32_768, 0)], 2)
    split = [(2_048, before) for before in range(0, 32_768, 2_048)]
    launches = (len(split) - 1) * (H100.kernels.attention_t0_s.value + cost.switch_s(H100))
    parts = sum(cost.chunk_attention_s(H100, QWEN, [chunk], 2) for chunk in split)
    assert parts - launches == pytest.approx(whole, rel=1e-9)
    flops = 4 * QWEN.num_q_heads * QWEN.head_dim * 32_768 * 32_769 / 2
    t0 = H100.kernels.attention_t0_s.value + cost.switch_s(H100)
    assert whole - t0 == pytest.approx(flops / H100.gpu.bf16_sustained_flops.value, rel=1e-12)


def test_chunk_attention_inside_a_window_counts_each_token():
    pairs = sum(min(before + 1, 100) for before in range(70, 70 + 64))
    seconds = cost.chunk_attention_s(H100, QWEN, [(64, 70)], 2, window_tokens=100)
    flops_s = 4 * QWEN.num_q_heads * QWEN.head_dim * pairs / H100.gpu.bf16_sustained_flops.value
    bytes_s = 134 * QWEN.kv_bytes_per_token_per_layer(2) / H100.kernels.attention_bytes_per_s.value
    t0 = H100.kernels.attention_t0_s.value + cost.switch_s(H100)
    assert seconds == pytest.approx(t0 + max(flops_s, bytes_s), rel=1e-12)
    assert cost.chunk_attention_s(H100, QWEN, [], 2) == 0.0
