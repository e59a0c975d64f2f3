"""Shapes of the decoder models that the harness runs with random weights, and the byte counts that follow."""

from __future__ import annotations

from dataclasses import dataclass

from traces.errors import InputError


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """A dense decoder with grouped-query attention and a gated feed-forward network."""

    name: str
    num_layers: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def qkv_size(self) -> int:
        """Output features of the fused QKV projection."""
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim

    def block_bytes(self, block_size_tokens: int, bytes_per_element: int = 2) -> int:
        """Bytes of one block: keys and values of `block_size_tokens` tokens of one KV head at one layer."""
        return 2 * block_size_tokens * self.head_dim * bytes_per_element

    def layer_weight_shapes(self) -> dict[str, tuple[int, int]]:
        """(input, output) features of each matrix product of one layer."""
        q_size = self.num_q_heads * self.head_dim
        return {
            "qkv": (self.hidden_size, self.qkv_size),
            "o": (q_size, self.hidden_size),
            "gate_up": (self.hidden_size, 2 * self.ffn_size),
            "down": (self.ffn_size, self.hidden_size),
        }


# Source: config.json of Qwen/Qwen3-8B, meta-llama/Llama-3.1-8B and HuggingFaceTB/SmolLM2-135M on Hugging Face.
GEOMETRIES = {
    "Qwen3-8B": ModelGeometry("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936),
    "Llama-3.1-8B": ModelGeometry("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256),
    "SmolLM2-135M": ModelGeometry("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152),
}


def geometry(name: str) -> ModelGeometry:
    """Geometry by model name; `InputError` names the known ones."""
    if name not in GEOMETRIES:
        raise InputError(f"model {name!r}: no geometry for the harness; known: {', '.join(GEOMETRIES)}")
    return GEOMETRIES[name]
