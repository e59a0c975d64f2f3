"""EAGLE-3-style draft head: one decoder layer that reads three of the base model's hidden states.

Slot i holds the base's features of token i and the embedding of token i + 1; its output predicts token i + 2. To look
further ahead the head takes its own output for the features that it does not have yet.
Source: EAGLE-3 (arXiv 2503.01840), §3; checkpoint keys as `LlamaForCausalLMEagle3` folders on Hugging Face have them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from simulator.specs.base import PositiveFloat, PositiveInt, Spec
from simulator.specs.validation import validated
from traces.errors import InputError

PACKAGED_HEADS = {"smollm2-135m-eagle3": Path(__file__).parent / "data" / "smollm2-135m-eagle3.safetensors"}
NUM_FEATURE_LAYERS = 3
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_LINEARS = ("fc", "midlayer.self_attn.q_proj", "midlayer.self_attn.k_proj", "midlayer.self_attn.v_proj")

Keys = list[tuple[Tensor, Tensor]]
"""Keys and values of one unrolled step each, [B, H, S, D]."""


class Eagle3Config(Spec):
    """Geometry of a head; field names are those of the checkpoint's config.json."""

    hidden_size: PositiveInt
    target_hidden_size: PositiveInt
    """Of the base model."""
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    vocab_size: PositiveInt
    draft_vocab_size: PositiveInt | None = None
    """Rows of the head's own output matrix; null: the base model's output matrix serves, frozen."""
    rms_norm_eps: PositiveFloat = 1e-5
    max_position_embeddings: PositiveInt = 2048
    rope_parameters: dict[str, Any] = Field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    feature_layers: tuple[int, int, int]
    """The base's hidden states before these layers (Hugging Face `hidden_states` indices)."""
    norm_before_residual: bool = False
    architecture: Literal["LlamaForCausalLMEagle3"] = "LlamaForCausalLMEagle3"


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Low, middle and high. Source: the defaults of vLLM and SGLang for EAGLE-3 heads."""
    low, middle, high = min(2, num_layers - 1), num_layers // 2, min(max(num_layers - 3, 1), num_layers - 1)
    return low, middle, high


class Eagle3Head(nn.Module):
    """The head. Embeddings (and, where it has none of its own, the output matrix) are the base model's."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(NUM_FEATURE_LAYERS * config.target_hidden_size, hidden, bias=False)
        self.midlayer = _Layer(config)
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.lm_head: nn.Linear | None = None
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
            offsets = torch.zeros(config.draft_vocab_size, dtype=torch.long)
            self.register_buffer("d2t", offsets)
        rope = LlamaConfig(
            hidden_size=hidden,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
        )
        self.rotary = LlamaRotaryEmbedding(rope)

    @property
    def target_ids(self) -> Tensor | None:
        """Base token of each row of the head's own output matrix, int64 [draft vocabulary]; None: all, in order."""
        if self.lm_head is None:
            return None
        offsets = self.get_buffer("d2t")
        return offsets + torch.arange(len(offsets), device=offsets.device)

    def features(self, hidden: Tensor) -> Tensor:
        """Three hidden states side by side [B, S, 3·D] -> [B, S, hidden]."""
        out: Tensor = self.fc(hidden)
        return out

    def forward(self, embeddings: Tensor, features: Tensor, first_position: int, past: Keys | None = None) -> Tensor:
        """Output before the last norm, [B, S, hidden], of slots first_position … ; causal.

        past: one (keys, values) of the slots before; replaced by one that holds these slots, too.
        """
        positions = torch.arange(first_position, first_position + features.shape[1], device=features.device)[None]
        rotation = self.rotary(features, positions)
        out: Tensor = self.midlayer(embeddings, features, rotation, past if past is not None else [], False)
        return out

    def unrolled(self, embeddings: Tensor, features: Tensor, step: int, past: Keys) -> Tensor:
        """Step `step` of every slot's own chain at once, as training runs it; `past` grows by one entry.

        Slot i attends to the features of slots 0 … i (the first entry) and to the earlier steps of its own chain.
        Source: EAGLE-3, §3.2 (training-time test).
        """
        positions = torch.arange(step, step + features.shape[1], device=features.device)[None]
        out: Tensor = self.midlayer(embeddings, features, self.rotary(features, positions), past, True)
        return out

    def logits(self, output: Tensor, base_output: nn.Module) -> Tensor:
        """Over the draft vocabulary (`target_ids`) from the output of `forward`."""
        matrix = base_output if self.lm_head is None else self.lm_head
        out: Tensor = matrix(self.norm(output))
        return out

    def choose(self, logits: Tensor) -> Tensor:
        """The base's token of the largest logit."""
        best = logits.argmax(dim=-1)
        ids = self.target_ids
        return best if ids is None else ids[best]


class _Layer(nn.Module):
    """Decoder layer whose attention reads embedding and features side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        )  # fmt: skip
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * hidden, width, bias=False),
                "k_proj": nn.Linear(2 * hidden, kv_width, bias=False),
                "v_proj": nn.Linear(2 * hidden, kv_width, bias=False),
                "o_proj": nn.Linear(width, hidden, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, config.intermediate_size, bias=False),
                "up_proj": nn.Linear(hidden, config.intermediate_size, bias=False),
                "down_proj": nn.Linear(config.intermediate_size, hidden, bias=False),
            }
        )

    def forward(
        self, embeddings: Tensor, features: Tensor, rotation: tuple[Tensor, Tensor], past: Keys, own_chain: bool
    ) -> Tensor:
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        query, key, value = (
            self._heads(self.self_attn[name](both), count)
            for name, count in zip(_PROJECTIONS, (self.num_heads, self.num_kv_heads, self.num_kv_heads), strict=True)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotation)
        attend = self._attend_chain if own_chain else self._attend
        mixed = attend(query, key, value, past).transpose(1, 2).flatten(2)
        hidden = residual + self.self_attn["o_proj"](mixed)
        normed = self.post_attention_layernorm(hidden)
        gated = functional.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        out: Tensor = hidden + self.mlp["down_proj"](gated)
        return out

    def _heads(self, rows: Tensor, count: int) -> Tensor:
        return rows.view(*rows.shape[:2], count, self.head_dim).transpose(1, 2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, past: Keys) -> Tensor:
        if past:
            before = past.pop()
            key, value = torch.cat([before[0], key], dim=2), torch.cat([before[1], value], dim=2)
        past.append((key, value))
        rows, total = query.shape[2], key.shape[2]
        reach = torch.arange(total - rows, total, device=query.device)[:, None]
        mask = None if rows == 1 else torch.arange(total, device=query.device)[None] <= reach
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    def _attend_chain(self, query: Tensor, key: Tensor, value: Tensor, past: Keys) -> Tensor:
        groups = self.num_heads // self.num_kv_heads
        past.append((key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)))
        first_key, first_value = past[0]
        size = query.shape[2]
        causal = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()
        scores = (query @ first_key.transpose(2, 3)).masked_fill(~causal, float("-inf"))
        own = [(query * keys).sum(dim=-1, keepdim=True) for keys, _ in past[1:]]
        weights = (torch.cat([scores, *own], dim=-1).float() * self.head_dim**-0.5).softmax(dim=-1).to(query.dtype)
        mixed: torch.Tensor = weights[..., :size] @ first_value
        for i, (_, values) in enumerate(past[1:]):
            mixed = mixed + weights[..., size + i, None] * values
        return mixed


def save_head(head: Eagle3Head, path: Path) -> None:
    """Write a `.safetensors` file in bf16 with the configuration in its metadata."""
    tensors = {
        name: (tensor if name == "d2t" else tensor.to(torch.bfloat16)).contiguous().cpu()
        for name, tensor in head.state_dict().items()
        if not name.startswith("rotary.")
    }
    if head.target_ids is not None:
        known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        known[head.target_ids.cpu()] = True
        tensors["t2d"] = known
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, {"config": head.config.model_dump_json()})
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be written: {error}") from error


def load_head(name_or_path: str, num_base_layers: int, dtype: torch.dtype = torch.float32) -> Eagle3Head:
    """Load a head: a packaged name, a `.safetensors` file that `save_head` wrote, or a Hugging Face folder.

    Pickled weights (.bin) are refused. Raises InputError in one line.
    """
    path = PACKAGED_HEADS.get(name_or_path.lower(), Path(name_or_path))
    file = path
    if path.is_dir():
        file = path / "model.safetensors"
        if not file.is_file():
            raise InputError(f"{path}: has no model.safetensors; pickled weights are not loaded, convert them first")
    if not file.is_file():
        known = ", ".join(PACKAGED_HEADS)
        raise InputError(f"draft head '{name_or_path}' is neither a packaged head ({known}), a file nor a folder")
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {_own_name(key): opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            metadata = opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: not readable as safetensors: {error}") from error
    if path.is_dir():
        config = _folder_config(path / "config.json", tensors, num_base_layers)
    elif "config" in metadata:
        config = validated(
            Eagle3Config, _parsed(metadata["config"], f"{file}: configuration in its metadata"), str(file)
        )
    else:
        raise InputError(f"{file}: its metadata holds no configuration; give the folder with its config.json")
    for unused in ("t2d", "embed_tokens.weight"):
        tensors.pop(unused, None)
    if max(config.feature_layers) >= num_base_layers or min(config.feature_layers) < 0:
        layers = ", ".join(map(str, config.feature_layers))
        raise InputError(f"{file}: reads hidden states before layers {layers}, the base has 0 to {num_base_layers - 1}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise InputError(
            f"{file}: {config.num_attention_heads} query heads are no multiple of {config.num_key_value_heads} KV heads"
        )
    if config.head_dim % 2:
        raise InputError(f"{file}: head_dim {config.head_dim} is odd, rotary embeddings turn pairs")
    try:
        with torch.device("meta"):  # shapes only: a wrong configuration may ask for any amount of memory
            wanted = {name: t for name, t in Eagle3Head(config).state_dict().items() if not name.startswith("rotary.")}
        _check_tensors(file, tensors, wanted, config)
        head = Eagle3Head(config)
    except InputError:
        raise
    except Exception as error:  # whatever transformers and torch say of a geometry or a rotation that is none
        raise InputError(f"{file}: its configuration makes no head: {' '.join(str(error).split())}") from error
    head.load_state_dict(tensors, strict=False)
    return head.to(dtype).eval()


def _check_tensors(file: Path, tensors: dict[str, Tensor], wanted: dict[str, Tensor], config: Eagle3Config) -> None:
    for name in sorted(wanted.keys() | tensors.keys()):
        if name not in tensors or name not in wanted:
            raise InputError(f"{file}: {'lacks' if name in wanted else 'has an unknown'} tensor {name}")
        found, expected = tensors[name], wanted[name]
        if found.shape != expected.shape:
            raise InputError(f"{file}: {name} has shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
        if found.is_floating_point() != expected.is_floating_point():
            raise InputError(f"{file}: {name} is of {found.dtype}, expected {expected.dtype}")
        if not found.isfinite().all():
            raise InputError(f"{file}: {name} is not finite")
    if "d2t" in tensors:
        targets = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        if targets.min() < 0 or targets.max() >= config.vocab_size:
            raise InputError(f"{file}: d2t names tokens beyond the vocabulary of {config.vocab_size}")


def _parsed(text: str, what: str) -> dict[str, Any]:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{what} is no JSON object")
    return raw


def _own_name(key: str) -> str:
    return key.removeprefix("model.").replace("layers.0.", "midlayer.")


def _folder_config(path: Path, tensors: dict[str, Tensor], num_base_layers: int) -> Eagle3Config:
    """Eagle3Config of a Hugging Face config.json; what it leaves out follows from the tensors."""
    try:
        raw = _parsed(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not readable: {error}") from error
    missing = [f"{name}.weight" for name in _LINEARS if f"{name}.weight" not in tensors]
    if missing:
        raise InputError(f"{path.parent}: lacks tensor {missing[0]}; not an EAGLE-3 head")
    if raw.get("attention_bias") or raw.get("mlp_bias"):
        raise InputError(f"{path}: heads with biases are not supported")
    try:
        values = _folder_values(raw, tensors, num_base_layers)
    except KeyError as error:
        raise InputError(f"{path}: lacks {error}") from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, IndexError) as error:
        raise InputError(f"{path}: not an EAGLE-3 head's configuration: {error}") from error
    return validated(Eagle3Config, values, str(path))


def _folder_values(raw: dict[str, Any], tensors: dict[str, Tensor], num_base_layers: int) -> dict[str, Any]:
    hidden = int(tensors["fc.weight"].shape[0])
    head_dim = int(raw.get("head_dim") or hidden // int(raw["num_attention_heads"]))
    own = raw.get("eagle_config") or {}
    layers = own.get("eagle_aux_hidden_state_layer_ids") or default_feature_layers(num_base_layers)
    rope = raw.get("rope_parameters") or {
        "rope_type": "default", "rope_theta": raw.get("rope_theta", 10000.0), **(raw.get("rope_scaling") or {}),
    }  # fmt: skip
    lm_head = tensors.get("lm_head.weight")
    return {
        "hidden_size": hidden,
        "target_hidden_size": tensors["fc.weight"].shape[1] // NUM_FEATURE_LAYERS,
        "num_attention_heads": tensors["midlayer.self_attn.q_proj.weight"].shape[0] // head_dim,
        "num_key_value_heads": tensors["midlayer.self_attn.k_proj.weight"].shape[0] // head_dim,
        "head_dim": head_dim,
        "intermediate_size": raw["intermediate_size"],
        "vocab_size": raw["vocab_size"],
        "draft_vocab_size": None if lm_head is None else int(lm_head.shape[0]),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "max_position_embeddings": raw.get("max_position_embeddings", 2048),
        "rope_parameters": rope,
        "feature_layers": tuple(layers),
        "norm_before_residual": bool(raw.get("norm_before_residual", False)),
    }
