"""Reads a Hugging Face `config.json` into a ModelSpec: the architectures whose decode the cost model can describe."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from simulator.specs.model import MlaSpec, ModelSpec, MoeSpec
from simulator.specs.validation import suggest, validated
from traces.errors import InputError


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a config of this class leaves to its code: Source: the configuration classes of transformers 4.56."""

    tied: bool = False
    """tie_word_embeddings when the key is absent."""
    derives_head_dim: bool = True
    """head_dim may be absent and is then hidden_size / num_attention_heads."""
    window: Literal["none", "all", "qwen", "layer_types", "gemma2", "gemma3"] = "none"
    """Which layers have the sliding window."""
    moe: Literal["none", "qwen3", "mixtral", "gpt-oss", "deepseek"] = "none"
    mla: bool = False


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(window="all"),
    "MixtralForCausalLM": Architecture(window="all", moe="mixtral"),
    "Qwen2ForCausalLM": Architecture(window="qwen"),
    "Qwen3ForCausalLM": Architecture(window="qwen", derives_head_dim=False),
    "Qwen3MoeForCausalLM": Architecture(window="qwen", moe="qwen3"),
    "GemmaForCausalLM": Architecture(tied=True, derives_head_dim=False),
    "Gemma2ForCausalLM": Architecture(tied=True, derives_head_dim=False, window="gemma2"),
    "Gemma3ForCausalLM": Architecture(tied=True, derives_head_dim=False, window="gemma3"),
    "GptOssForCausalLM": Architecture(derives_head_dim=False, window="layer_types", moe="gpt-oss"),
    "DeepseekV3ForCausalLM": Architecture(mla=True, moe="deepseek"),
}
SERVED_DTYPES = {"bfloat16", "float16", "float32"}
"""Checkpoint types served in 16 bits. Source: vLLM's `--dtype auto`."""


class _Config:
    """A config's keys; a missing one is an InputError that names it."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def need(self, key: str) -> Any:
        if self.data.get(key) is None:
            raise InputError(f"{self.where}: missing key {key!r}")
        return self.data[key]

    def count(self, key: str) -> int:
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"{self.where}: {key} must be a non-negative integer, got {value!r}")
        return value

    def refuse(self, problem: str) -> InputError:
        return InputError(f"{self.where}: {problem}")


def load_hf_config(path: str | Path) -> ModelSpec:
    """The model of a `config.json` (or of the folder that holds one), named after its folder.

    Raises InputError naming the file and the key: unreadable, unknown architecture, missing or unusable key.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise InputError(f"{file}: cannot be read: {e.strerror or e}") from None
    except ValueError as e:
        raise InputError(f"{file}: not valid JSON: {e}") from None
    if not isinstance(data, dict):
        raise InputError(f"{file}: a Hugging Face config is a JSON object, got {type(data).__name__}")
    return from_hf_config(data, name=file.resolve().parent.name or file.stem, where=str(file))


def from_hf_config(data: dict[str, Any], name: str, where: str) -> ModelSpec:
    """ModelSpec of a parsed config; `where` names it in errors. Biases, norms and q/k norms are not counted."""
    config = _Config(data, where)
    arch = _architecture(config)
    num_layers, num_q_heads = config.count("num_hidden_layers"), config.count("num_attention_heads")
    hidden = config.count("hidden_size")
    mla = _mla(config) if arch.mla else None
    num_kv_heads = 1
    if mla is not None:
        head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    else:
        num_kv_heads = num_q_heads if data.get("num_key_value_heads") is None else config.count("num_key_value_heads")
        head_dim = _head_dim(config, arch, hidden, num_q_heads)
    linear_bits, expert_bits, quant = _quantisation(config)
    sliding = _sliding_layers(config, arch, num_layers)
    tied = data.get("tie_word_embeddings")
    spec = {
        "name": name,
        "hf_id": data.get("_name_or_path") or None,
        "attention": _attention_kind(mla, num_q_heads, num_kv_heads),
        "num_layers": num_layers,
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden": hidden,
        "intermediate": config.count("intermediate_size"),
        "vocab": config.count("vocab_size"),
        "max_position": config.count("max_position_embeddings"),
        "scaled_position": _scaled_position(config),
        "tie_embeddings": arch.tied if tied is None else tied,
        "linear_weight_bits": linear_bits,
        "expert_weight_bits": expert_bits,
        "weight_quant": quant,
        "sliding_window": config.count("sliding_window") if sliding else None,
        "sliding_layers": sliding,
        "moe": _moe(config, arch),
        "mla": mla,
        "source": f"Hugging Face config {where}",
    }
    return validated(ModelSpec, spec, where)


def _architecture(config: _Config) -> Architecture:
    names = config.need("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise config.refuse(f"architectures must name one class, got {names!r}")
    if names[0] not in ARCHITECTURES:
        raise config.refuse(f"unknown architecture {names[0]!r}: {suggest(names[0], ARCHITECTURES)}")
    dtype = config.data.get("torch_dtype", config.data.get("dtype"))
    if dtype is not None and dtype not in SERVED_DTYPES:
        raise config.refuse(f"torch_dtype must be one of {', '.join(sorted(SERVED_DTYPES))}, got {dtype!r}")
    return ARCHITECTURES[names[0]]


def _head_dim(config: _Config, arch: Architecture, hidden: int, num_q_heads: int) -> int:
    if config.data.get("head_dim") is not None or not arch.derives_head_dim:
        return config.count("head_dim")
    if not num_q_heads or hidden % num_q_heads:
        raise config.refuse(f"hidden_size {hidden} is no multiple of num_attention_heads {num_q_heads}: give head_dim")
    return hidden // num_q_heads


def _attention_kind(mla: MlaSpec | None, num_q_heads: int, num_kv_heads: int) -> str:
    if mla is not None:
        return "MLA"
    if num_kv_heads == num_q_heads:
        return "MHA"
    return "MQA" if num_kv_heads == 1 else "GQA"


def _mla(config: _Config) -> MlaSpec:
    return MlaSpec(
        kv_lora_rank=config.count("kv_lora_rank"),
        qk_rope_head_dim=config.count("qk_rope_head_dim"),
        qk_nope_head_dim=config.count("qk_nope_head_dim"),
        v_head_dim=config.count("v_head_dim"),
        q_lora_rank=None if config.data.get("q_lora_rank") is None else config.count("q_lora_rank"),
    )


def _sliding_layers(config: _Config, arch: Architecture, num_layers: int) -> tuple[int, ...]:
    """Layers with the window: `layer_types` where the config has it, else the architecture's rule."""
    data = config.data
    if arch.window == "none" or data.get("sliding_window") is None:
        return ()
    if arch.window == "qwen" and not data.get("use_sliding_window", False):
        return ()
    layer_types = data.get("layer_types")
    if layer_types is not None:
        return _from_layer_types(config, layer_types, num_layers)
    if arch.window == "all":
        return tuple(range(num_layers))
    if arch.window == "qwen":
        return tuple(range(config.count("max_window_layers"), num_layers))
    if arch.window == "layer_types":
        config.need("layer_types")
    period = 2 if arch.window == "gemma2" else config.count("sliding_window_pattern")
    if not period:
        raise config.refuse("sliding_window_pattern must be positive, got 0")
    return tuple(layer for layer in range(num_layers) if (layer + 1) % period)


def _from_layer_types(config: _Config, layer_types: Any, num_layers: int) -> tuple[int, ...]:
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise config.refuse(f"layer_types must list num_hidden_layers = {num_layers} entries")
    for layer, kind in enumerate(layer_types):
        if kind not in {"full_attention", "sliding_attention"}:
            raise config.refuse(f"layer_types[{layer}] must be full_attention or sliding_attention, got {kind!r}")
    return tuple(layer for layer, kind in enumerate(layer_types) if kind == "sliding_attention")


def _moe(config: _Config, arch: Architecture) -> MoeSpec | None:
    if arch.moe == "none":
        return None
    if arch.moe in {"mixtral", "gpt-oss"}:
        return MoeSpec(
            num_experts=config.count("num_local_experts"),
            experts_per_token=config.count("num_experts_per_tok"),
            moe_intermediate=config.count("intermediate_size"),
        )
    if arch.moe == "qwen3":
        if config.data.get("mlp_only_layers") or config.data.get("decoder_sparse_step", 1) != 1:
            raise config.refuse("dense layers among experts (mlp_only_layers, decoder_sparse_step) are not supported")
        return MoeSpec(
            num_experts=config.count("num_experts"),
            experts_per_token=config.count("num_experts_per_tok"),
            moe_intermediate=config.count("moe_intermediate_size"),
        )
    if config.data.get("moe_layer_freq", 1) != 1:
        raise config.refuse(f"moe_layer_freq must be 1, got {config.data['moe_layer_freq']!r}")
    return MoeSpec(
        num_experts=config.count("n_routed_experts"),
        experts_per_token=config.count("num_experts_per_tok"),
        moe_intermediate=config.count("moe_intermediate_size"),
        shared_experts=config.count("n_shared_experts"),
        first_dense_layers=config.count("first_k_dense_replace"),
    )


def _quantisation(config: _Config) -> tuple[float, float, str | None]:
    """Bits of a projection weight and of an expert weight, scales included, and the method."""
    quant = config.data.get("quantization_config")
    if quant is None:
        return 16.0, 16.0, None
    method = quant.get("quant_method") if isinstance(quant, dict) else None
    if method == "mxfp4":
        # Source: OCP Microscaling Formats v1.0: 32 elements of 4 bits share an 8-bit scale. gpt-oss: experts only.
        return 16.0, 4.25, "mxfp4"
    if method == "fp8":
        block = quant.get("weight_block_size")
        scale_bits = 32 / (block[0] * block[1]) if block else 0.0
        return 8.0 + scale_bits, 8.0 + scale_bits, "fp8"
    raise config.refuse(f"quantization_config.quant_method must be mxfp4 or fp8, got {method!r}")


def _scaled_position(config: _Config) -> int | None:
    """Positions of YaRN, factor x the original ones, where they are more than the config's own; else null."""
    scaling = config.data.get("rope_scaling")
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) != "yarn":
        return None
    own = config.count("max_position_embeddings")
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings", own)
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (factor, original))
    if not numbers or not 1 <= factor * original <= 2**31:
        raise config.refuse(f"rope_scaling: factor x original_max_position_embeddings is no length, got {scaling!r}")
    return int(factor * original) if factor * original > own else None
