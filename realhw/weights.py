"""Random weights of a whole decoder, one matrix per product, stored [out, in]."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from realhw.geometry import ModelGeometry

DRAFT_VOCAB = 32_000
"""Rows of an EAGLE-3 head's own lm_head. Source: EAGLE-3 (arXiv 2503.01840), released heads."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """EAGLE-3 head: three hidden states fused, one layer over (embedding, hidden), its own lm_head."""

    fuse: torch.Tensor
    layer: LayerWeights
    lm_head: torch.Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    geometry: ModelGeometry
    layers: list[LayerWeights]
    lm_head: torch.Tensor
    draft: DraftWeights


def random_weights(
    g: ModelGeometry, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> ModelWeights:
    """Normal weights scaled by 1 / sqrt(inputs), so that activations keep their size from layer to layer."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def matrix(inputs: int, outputs: int) -> torch.Tensor:
        weight = torch.randn(outputs, inputs, device=device, dtype=dtype, generator=generator)
        return weight.mul_(inputs**-0.5)

    def layer(qkv_inputs: int) -> LayerWeights:
        shapes = g.layer_weight_shapes()
        return LayerWeights(
            matrix(qkv_inputs, g.qkv_size), matrix(*shapes["o"]), matrix(*shapes["gate_up"]), matrix(*shapes["down"])
        )

    draft = DraftWeights(
        matrix(3 * g.hidden_size, g.hidden_size),
        layer(2 * g.hidden_size),
        matrix(g.hidden_size, min(g.vocab_size, DRAFT_VOCAB)),
    )
    layers = [layer(g.hidden_size) for _ in range(g.num_layers)]
    return ModelWeights(g, layers, matrix(g.hidden_size, g.vocab_size), draft)
