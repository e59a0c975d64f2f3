"""Geometry of a decoder-only language model and the bytes that follow from it.

Only what moves bytes or operations is here: norms, biases and q/k norms are left out of every weight count (together
below 0.05 % of the catalog's models).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from simulator.specs.base import NonNegativeInt, PositiveFloat, PositiveInt, Spec

AttentionKind = Literal["GQA", "MHA", "MQA", "MLA"]
UNQUANTISED_BITS = 16.0


class MoeSpec(Spec):
    """Mixture of experts that replaces the feed-forward of every layer past `first_dense_layers`."""

    num_experts: PositiveInt
    experts_per_token: PositiveInt
    moe_intermediate: PositiveInt
    shared_experts: NonNegativeInt = 0
    """Experts that every token passes, of the same width."""
    first_dense_layers: NonNegativeInt = 0

    @model_validator(mode="after")
    def _routes_to_existing_experts(self) -> MoeSpec:
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}")
        return self

    def expected_active_experts(self, num_tokens: int) -> float:
        """Distinct routed experts that a layer reads for `num_tokens` tokens: E (1 − (1 − k/E)^tokens).

        Uniform independent routing: an assumption; real routers are skewed and read fewer.
        """
        missed = (1.0 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1.0 - missed)


class MlaSpec(Spec):
    """Multi-head latent attention: the cache holds one latent per token and layer, shared by all query heads."""

    kv_lora_rank: PositiveInt
    qk_rope_head_dim: PositiveInt
    qk_nope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    q_lora_rank: PositiveInt | None = None
    """Null: the query projection is not factored."""


class ModelSpec(Spec):
    """One model. Weight counts are parameters; their bytes use the bits of the part they belong to."""

    name: str = Field(min_length=1)
    hf_id: str | None = None
    attention: AttentionKind
    num_layers: PositiveInt
    num_q_heads: PositiveInt
    num_kv_heads: PositiveInt
    """Heads that the cache holds: 1 for MLA (the latent), whatever the config calls its up-projected heads."""
    head_dim: PositiveInt
    """Of a query-key dot product; for MLA the un-absorbed qk_nope + qk_rope."""
    hidden: PositiveInt
    intermediate: PositiveInt
    """Width of the dense feed-forward; for MoE the base value, used only by its dense layers."""
    vocab: PositiveInt
    max_position: PositiveInt
    """Positions without any scaling."""
    scaled_position: PositiveInt | None = None
    """Positions with the RoPE scaling that the publisher names; null: none is named."""
    tie_embeddings: bool | None = None
    """Null: unknown, counted as untied (more memory, never less)."""
    linear_weight_bits: PositiveFloat = UNQUANTISED_BITS
    """Bits per parameter, scales included, of attention projections and dense feed-forward."""
    expert_weight_bits: PositiveFloat = UNQUANTISED_BITS
    """Same, of routed and shared experts. The router, embeddings and lm_head stay at 16 bits."""
    weight_quant: str | None = None
    sliding_window: PositiveInt | None = None
    """Tokens that a sliding-window layer attends to."""
    sliding_layers: tuple[NonNegativeInt, ...] = ()
    """Indices of the layers with the window; the others attend to the whole context."""
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    source: str = Field(min_length=1)
    unverified: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Fields that the source does not state."""
    tensor_parallel: PositiveInt = 1
    """GPUs that share the model. Above 1 this is one GPU's part (`simulator.parallel.shard`), never a catalog row."""

    @model_validator(mode="after")
    def _consistent(self) -> ModelSpec:
        if (self.mla is not None) != (self.attention == "MLA"):
            raise ValueError(f"{self.name}: attention {self.attention!r} and mla do not agree")
        if self.mla is not None and self.num_kv_heads != 1:
            raise ValueError(f"{self.name}: MLA caches one latent, num_kv_heads must be 1, got {self.num_kv_heads}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.name}: num_q_heads {self.num_q_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.attention == "MHA" and self.num_kv_heads != self.num_q_heads:
            raise ValueError(f"{self.name}: MHA needs as many KV heads as query heads ({self.num_q_heads})")
        if self.attention == "MQA" and self.num_kv_heads != 1:
            raise ValueError(f"{self.name}: MQA needs one KV head, got {self.num_kv_heads}")
        if self.sliding_layers and self.sliding_window is None:
            raise ValueError(f"{self.name}: sliding_layers need a sliding_window")
        if len(set(self.sliding_layers)) < len(self.sliding_layers) or any(
            layer >= self.num_layers for layer in self.sliding_layers
        ):
            raise ValueError(f"{self.name}: sliding_layers must be distinct and below num_layers {self.num_layers}")
        if self.moe is not None and self.moe.first_dense_layers > self.num_layers:
            raise ValueError(f"{self.name}: first_dense_layers {self.moe.first_dense_layers} exceeds num_layers")
        return self

    # Layers

    @property
    def longest_context(self) -> int:
        """Positions at most, with scaling where there is one. What scaling costs in quality is not simulated."""
        return max(self.max_position, self.scaled_position or 0)

    @property
    def full_attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that attend to the whole context: the ones a sparse system selects in."""
        sliding = set(self.sliding_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in sliding)

    @property
    def num_full_attention_layers(self) -> int:
        return self.num_layers - len(self.sliding_layers)

    @property
    def num_moe_layers(self) -> int:
        return 0 if self.moe is None else self.num_layers - self.moe.first_dense_layers

    @property
    def num_dense_ffn_layers(self) -> int:
        return self.num_layers - self.num_moe_layers

    # KV cache

    @property
    def key_elements_per_token_per_head(self) -> int:
        """Elements of what a query is scored against: d, or for MLA kv_lora_rank + qk_rope_head_dim (absorbed)."""
        return self.head_dim if self.mla is None else self.mla.kv_lora_rank + self.mla.qk_rope_head_dim

    @property
    def kv_elements_per_token_per_head(self) -> int:
        """2 d (key and value); for MLA kv_lora_rank + qk_rope_head_dim, which serve as both."""
        return 2 * self.head_dim if self.mla is None else self.key_elements_per_token_per_head

    def kv_bytes_per_token_per_layer(self, bytes_per_element: int = 2) -> int:
        """H_kv · 2 · d · s; MLA: (kv_lora_rank + qk_rope_head_dim) · s. Source (MLA): arXiv 2405.04434, §2.1."""
        return self.num_kv_heads * self.kv_elements_per_token_per_head * bytes_per_element

    def kv_bytes_per_token(self, bytes_per_element: int = 2) -> int:
        """L · H_kv · 2 · d · s: what one new token adds over all layers, windows not yet full."""
        return self.num_layers * self.kv_bytes_per_token_per_layer(bytes_per_element)

    def kv_bytes(self, kv_len: int, bytes_per_element: int = 2) -> int:
        """Whole cache of one request: full layers hold kv_len tokens, sliding layers min(kv_len, window)."""
        windowed = kv_len if self.sliding_window is None else min(kv_len, self.sliding_window)
        tokens = self.num_full_attention_layers * kv_len + len(self.sliding_layers) * windowed
        return tokens * self.kv_bytes_per_token_per_layer(bytes_per_element)

    def block_bytes(self, block_size_tokens: int, bytes_per_element: int = 2) -> int:
        """One block of one KV head at one layer: 2 · P · d · s."""
        return block_size_tokens * self.kv_elements_per_token_per_head * bytes_per_element

    def working_set_bytes(self, num_blocks: int, block_size_tokens: int, bytes_per_element: int = 2) -> int:
        """K blocks per KV head over the full-attention layers: L_full · H_kv · K · 2 · P · d · s."""
        heads = self.num_full_attention_layers * self.num_kv_heads
        return heads * num_blocks * self.block_bytes(block_size_tokens, bytes_per_element)

    def metadata_bytes(self, num_blocks: int, vectors_per_block: int = 2, bytes_per_element: float = 2.0) -> float:
        """Compressed keys of one request: L_full · H_kv · n · v · d · s_m (d as scored against)."""
        heads = self.num_full_attention_layers * self.num_kv_heads
        return heads * num_blocks * vectors_per_block * self.key_elements_per_token_per_head * bytes_per_element

    # Weights, in parameters

    @property
    def qkv_params(self) -> int:
        """Per layer: h · (H_q + 2 H_kv) · d.

        MLA: query h · r_q + r_q · H_q · (nope + rope), or h · H_q · (nope + rope) un-factored;
        latent h · (r_kv + rope); up-projections r_kv · H_q · (nope + v), read whole by an absorbed decode too.
        Source: DeepSeek-V3 §2.1.1.
        """
        if self.mla is None:
            return self.hidden * (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim
        m = self.mla
        query_out = self.num_q_heads * (m.qk_nope_head_dim + m.qk_rope_head_dim)
        query = self.hidden * query_out
        if m.q_lora_rank is not None:
            query = m.q_lora_rank * (self.hidden + query_out)
        latent = self.hidden * (m.kv_lora_rank + m.qk_rope_head_dim)
        return query + latent + m.kv_lora_rank * self.num_q_heads * (m.qk_nope_head_dim + m.v_head_dim)

    @property
    def o_params(self) -> int:
        """Per layer: H_q · d · h (MLA: H_q · v_head_dim · h)."""
        value_dim = self.head_dim if self.mla is None else self.mla.v_head_dim
        return self.num_q_heads * value_dim * self.hidden

    @property
    def ffn_params(self) -> int:
        """A dense layer's gate, up and down: 3 · h · intermediate."""
        return 3 * self.hidden * self.intermediate

    @property
    def expert_params(self) -> int:
        """One expert's gate, up and down: 3 · h · moe_intermediate; 0 without experts."""
        return 0 if self.moe is None else 3 * self.hidden * self.moe.moe_intermediate

    @property
    def router_params(self) -> int:
        """Per MoE layer: h · num_experts."""
        return 0 if self.moe is None else self.hidden * self.moe.num_experts

    @property
    def embedding_params(self) -> int:
        """vocab · h."""
        return self.vocab * self.hidden

    @property
    def num_logits(self) -> int:
        """Logits that sampling sees per row: the gathered vocabulary, padded to whole shards."""
        return self.vocab * self.tensor_parallel

    @property
    def lm_head_params(self) -> int:
        """vocab · h, read every step whether tied or not."""
        return self.vocab * self.hidden

    # Weights, in bytes

    @property
    def qkv_bytes(self) -> int:
        """qkv_params at linear_weight_bits, per layer."""
        return _bytes(self.qkv_params, self.linear_weight_bits)

    @property
    def o_bytes(self) -> int:
        """o_params at linear_weight_bits, per layer."""
        return _bytes(self.o_params, self.linear_weight_bits)

    @property
    def ffn_bytes(self) -> int:
        """ffn_params at linear_weight_bits, per dense layer."""
        return _bytes(self.ffn_params, self.linear_weight_bits)

    @property
    def expert_bytes(self) -> int:
        """expert_params at expert_weight_bits."""
        return _bytes(self.expert_params, self.expert_weight_bits)

    @property
    def lm_head_bytes(self) -> int:
        """lm_head_params at 16 bits."""
        return _bytes(self.lm_head_params, UNQUANTISED_BITS)

    @property
    def embedding_bytes(self) -> int:
        """embedding_params at 16 bits."""
        return _bytes(self.embedding_params, UNQUANTISED_BITS)

    def moe_layer_read_bytes(self, num_tokens: int) -> float:
        """Router, shared experts and the expected distinct routed experts that one MoE layer reads in a step."""
        if self.moe is None:
            return 0.0
        experts = self.moe.shared_experts + self.moe.expected_active_experts(num_tokens)
        return _bytes(self.router_params, UNQUANTISED_BITS) + experts * self.expert_bytes

    @property
    def moe_layer_bytes(self) -> int:
        """Router and all experts of one MoE layer; 0 without experts."""
        if self.moe is None:
            return 0
        experts = self.moe.num_experts + self.moe.shared_experts
        return experts * self.expert_bytes + _bytes(self.router_params, UNQUANTISED_BITS)

    @property
    def weight_bytes(self) -> int:
        """All weights that HBM holds: every layer, embeddings, and lm_head unless tied."""
        total = self.num_layers * (self.qkv_bytes + self.o_bytes) + self.num_dense_ffn_layers * self.ffn_bytes
        total += self.num_moe_layers * self.moe_layer_bytes
        return total + self.embedding_bytes + (0 if self.tie_embeddings else self.lm_head_bytes)


def _bytes(params: int, bits: float) -> int:
    """Whole bytes of `params` parameters at `bits` bits each, rounded up."""
    return -int(-params * bits // 8)
