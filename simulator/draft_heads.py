"""What drafting costs: seconds before layer 0, weights and KV in HBM, and extra rows in the layer stack.

Every head drafts one chain of k = `lookahead_k` tokens, no tree: a trace knows one guess per distance. Pure functions.
"""

from __future__ import annotations

from simulator import cost
from simulator.specs.hardware import HardwareSpec
from simulator.specs.model import ModelSpec
from simulator.specs.policy import PolicySpec

NGRAM_LOOKUP_S = 20e-6
"""Prompt lookup on the CPU for a batch, before the step can start. Assumption: a hash probe per request."""
EAGLE3_DRAFT_VOCAB = 32_000
"""Rows of an EAGLE-3 head's own lm_head. Source: EAGLE-3 (arXiv 2503.01840) released heads, draft_vocab_size."""
WEIGHT_BYTES = 2
"""Heads are bf16."""


def draft_s(hardware: HardwareSpec, model: ModelSpec, policy: PolicySpec, batch_size: int, kv_len: int) -> float:
    """Seconds that drafting k tokens takes before layer 0; 0 where the policy does not draft.

    lookahead-ngram and self draft inside the layer stack: their cost is their rows (`cost.draft_rows`).
    """
    if not cost.drafts(policy) or policy.draft_head in ("lookahead-ngram", "self"):
        return 0.0
    if policy.draft_head == "ngram":
        return NGRAM_LOOKUP_S
    if policy.draft_head == "medusa":
        return _medusa_s(hardware, model, batch_size, policy.lookahead_k)
    if policy.draft_head == "mtp":
        return policy.lookahead_k * _mtp_pass_s(hardware, model, batch_size, kv_len)
    fuse = cost.gemm_s(hardware, batch_size, model.hidden, 3 * model.hidden)
    return fuse + policy.lookahead_k * _eagle3_pass_s(hardware, model, batch_size, kv_len)


def head_bytes(model: ModelSpec, policy: PolicySpec) -> int:
    """Weights of the draft head in HBM; 0 for the drafters that have none."""
    if not cost.drafts(policy):
        return 0
    h = model.hidden
    if policy.draft_head == "eagle3":
        return eagle3_head_bytes(model)
    if policy.draft_head == "medusa":
        return WEIGHT_BYTES * policy.lookahead_k * h * (h + model.vocab)
    if policy.draft_head == "mtp":
        dense = model.num_moe_layers == 0
        ffn = model.ffn_bytes if dense else model.moe_layer_bytes
        return WEIGHT_BYTES * 2 * h * h + model.qkv_bytes + model.o_bytes + ffn
    return 0


def kv_bytes(model: ModelSpec, policy: PolicySpec, kv_len: int) -> int:
    """The head's own KV of one request: one layer over the whole context for eagle3 and mtp."""
    keeps_kv = cost.drafts(policy) and policy.draft_head in ("eagle3", "mtp")
    return model.kv_bytes_per_token_per_layer(2) * kv_len if keeps_kv else 0


def eagle3_head_bytes(model: ModelSpec) -> int:
    """bf16 weights of a one-layer head: fusion 3h -> h, attention on 2h inputs, o, FFN, its own lm_head.

    Source: EAGLE-3 (arXiv 2503.01840) section 3: three hidden states fused, token embedding concatenated.
    """
    h = model.hidden
    qkv = 2 * h * (model.num_q_heads + 2 * model.num_kv_heads) * model.head_dim
    params = 3 * h * h + qkv + model.num_q_heads * model.head_dim * h + 3 * h * model.intermediate
    return WEIGHT_BYTES * (params + h * _draft_vocab(model))


def _eagle3_pass_s(hardware: HardwareSpec, model: ModelSpec, batch_size: int, kv_len: int) -> float:
    h, heads = model.hidden, (model.num_q_heads + 2 * model.num_kv_heads) * model.head_dim
    return (
        cost.gemm_s(hardware, batch_size, heads, 2 * h)
        + cost.attention_s(hardware, model, batch_size, kv_len, 1, 2, dense_table=True)
        + cost.gemm_s(hardware, batch_size, h, model.num_q_heads * model.head_dim)
        + cost.gemm_s(hardware, batch_size, 2 * model.intermediate, h)
        + cost.gemm_s(hardware, batch_size, h, model.intermediate)
        + cost.gemm_s(hardware, batch_size, _draft_vocab(model), h)
        + cost.layer_allreduces_s(hardware, model, batch_size)
        + cost.logits_gather_s(hardware, model, batch_size, _draft_vocab(model))
    )


def _medusa_s(hardware: HardwareSpec, model: ModelSpec, batch_size: int, num_drafts: int) -> float:
    """k heads on the last hidden state, one batched product each for their residual layers and their vocabularies.

    Source: Medusa (arXiv 2401.10774) section 2.1.1: head k is W2 (SiLU(W1 h) + h), W1 h x h, W2 h x vocab.
    """
    return (
        cost.gemm_s(hardware, batch_size, num_drafts * model.hidden, model.hidden)
        + cost.gemm_s(hardware, batch_size, num_drafts * model.vocab, model.hidden)
        + cost.logits_gather_s(hardware, model, batch_size, num_drafts * model.vocab)
    )


def _mtp_pass_s(hardware: HardwareSpec, model: ModelSpec, batch_size: int, kv_len: int) -> float:
    """Projection of hidden state and embedding, one layer like the model's own, the shared output matrix.

    Source: DeepSeek-V3 (arXiv 2412.19437) section 2.2. One module drafts all k tokens in turn, an assumption that
    holds for the released weights, which have one.
    """
    return (
        cost.gemm_s(hardware, batch_size, model.hidden, 2 * model.hidden)
        + cost.qkv_s(hardware, model, batch_size)
        + cost.attention_s(hardware, model, batch_size, kv_len, 1, 2, dense_table=True)
        + cost.o_ffn_s(hardware, model, batch_size)
        + cost.lm_head_s(hardware, model, batch_size)
        + cost.layer_allreduces_s(hardware, model, batch_size)
        + cost.logits_gather_s(hardware, model, batch_size, model.vocab)
    )


def _draft_vocab(model: ModelSpec) -> int:
    return min(model.vocab, -(-EAGLE3_DRAFT_VOCAB // model.tensor_parallel))
