"""Tiny random Llamas, options to record one, and its attention written out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from realhw.models import LoadedModel, geometry_of
from realhw.prompts import Prompt
from realhw.record_options import RecordOptions
from tests.realhw.word_tokenizers import NumberTokenizer

NUM_LAYERS, NUM_HEADS, GROUP, HEAD_DIM = 3, 2, 2, 8


def loaded_model(
    vocab_size: int = 20, num_layers: int = NUM_LAYERS, initializer_range: float = 0.3, seed: int = 0
) -> LoadedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=NUM_HEADS * GROUP,
        num_key_value_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        initializer_range=initializer_range,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    return LoadedModel(model, NumberTokenizer(), geometry_of(model, "tiny"), "random")


def options(**changes: Any) -> RecordOptions:
    rng = np.random.default_rng(1)
    text = " ".join(str(token) for token in rng.integers(0, 20, size=45))
    values: dict[str, Any] = {
        "model": "tiny",
        "prompts": (Prompt(name="request", text=text),),
        "steps": 70,
        "block_sizes_tokens": (8,),
        "extra_block_sizes_tokens": (4, 16),
        "extra_layers": (0, 2),
        "max_budget_tokens": 64,
        "draft_distances": 3,
        "temperature": 1.0,
        "prefill_chunk_tokens": 17,
    }
    return RecordOptions(**(values | changes))


def eager_rows(loaded: LoadedModel, tokens: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
    """Rotated queries and keys of every layer, [Hq, S, D] and [H, S, D], and eager attention weights."""
    model = loaded.model
    queries, keys = [], []
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        output = model(torch.tensor([tokens]), output_attentions=True, output_hidden_states=True)
        model.set_attn_implementation("sdpa")
        for layer, hidden in enumerate(output.hidden_states[:-1]):
            query, key, _ = rotated(model, layer, hidden)
            queries.append(query)
            keys.append(key)
    return queries, keys, output.attentions


def quest_scores(query: torch.Tensor, keys: torch.Tensor, size: int, num_blocks: int) -> np.ndarray:
    """Min/max bound written out: query [Hq, D], keys [H, S, D] -> [H, num_blocks] in octaves, group maximum."""
    scores = np.empty((NUM_HEADS, num_blocks))
    for head in range(NUM_HEADS):
        for block in range(num_blocks):
            inside = keys[head, block * size : (block + 1) * size]
            low, high = inside.min(dim=0).values, inside.max(dim=0).values
            bounds = [float(torch.maximum(q * low, q * high).sum()) for q in query[head * GROUP : (head + 1) * GROUP]]
            scores[head, block] = max(bounds) * HEAD_DIM**-0.5 / math.log(2)
    return scores


def check_ranking(ids: np.ndarray, scores: np.ndarray) -> None:
    """`ids` [H, M] orders scores [H, n] up to rounding to one sixteenth octave."""
    for row, values in zip(ids, scores, strict=True):
        kept = row[row >= 0]
        assert len(kept) == min(len(row), len(values))
        ranked = values[kept]
        assert np.all(np.diff(ranked) <= 1 / 16 + 1e-4)
        left_out = np.delete(values, kept)
        assert not left_out.size or left_out.max() <= ranked.min() + 1 / 16 + 1e-4


def rotated_query(loaded: LoadedModel, tokens: list[int], layer: int, input_of: int) -> torch.Tensor:
    """Queries [Hq, S, D] that `layer` would have with the input of layer `input_of`."""
    with torch.inference_mode():
        hidden = loaded.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[input_of]
        return rotated(loaded.model, layer, hidden)[0]


def rotated(
    model: Any, layer: int, hidden: torch.Tensor, first_position: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [Hq, S, D], keys and values [H, S, D] that `layer` makes of its input [1, S, hidden]."""
    module = model.model.layers[layer]
    normed = module.input_layernorm(hidden)
    shape = (1, hidden.shape[1], -1, HEAD_DIM)
    query, key, value = (
        getattr(module.self_attn, name)(normed).view(shape).transpose(1, 2) for name in ("q_proj", "k_proj", "v_proj")
    )
    positions = torch.arange(first_position, first_position + hidden.shape[1])[None]
    query, key = apply_rotary_pos_emb(query, key, *model.model.rotary_emb(hidden, positions))
    return query[0].double(), key[0].double(), value[0].double()
