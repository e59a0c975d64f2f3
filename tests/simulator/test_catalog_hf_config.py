"""Hugging Face configs: each architecture's fields, windows and experts; what is missing is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulator.catalog import load_model
from simulator.hf_config import from_hf_config
from simulator.specs.model import ModelSpec
from traces.errors import InputError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"], "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936,
    "max_position_embeddings": 40960, "head_dim": 128, "use_sliding_window": False, "sliding_window": None,
    "max_window_layers": 36,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
    "max_position_embeddings": 131072, "sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
    "max_position_embeddings": 163840, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "tie_word_embeddings": False, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
GEMMA2 = LLAMA | {
    "architectures": ["Gemma2ForCausalLM"], "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "sliding_window": 4096, "num_hidden_layers": 26,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "Llama-3.1-8B"),
        (QWEN3, "Qwen3-8B"),
        (QWEN3_MOE, "Qwen3-30B-A3B"),
        (GPT_OSS, "gpt-oss-20b"),
        (DEEPSEEK_V3, "DeepSeek-V3"),
    ],
)
def test_config_gives_the_catalogs_model(config: dict[str, Any], name: str) -> None:
    read = from_hf_config(config, name, "config.json")
    told_apart = {"hf_id", "source", "unverified", "scaled_position"}
    assert read.model_dump(exclude=told_apart) == load_model(name).model_dump(exclude=told_apart)


def test_model_from_a_folder_or_file(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert load_model(str(folder)) == load_model(folder / "config.json")
    assert load_model(folder).name == "my-model"
    assert load_model(folder).kv_bytes_per_token() == 131_072


def test_windows_by_architecture() -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    assert from_hf_config(mistral, "m", "c").num_full_attention_layers == 0
    assert from_hf_config(mistral | {"sliding_window": None}, "m", "c").num_full_attention_layers == 32
    assert from_hf_config(GEMMA2, "g", "c").sliding_layers == tuple(range(0, 26, 2))
    gemma3 = GEMMA2 | {"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 6}
    assert from_hf_config(gemma3, "g", "c").full_attention_layers == (5, 11, 17, 23)
    qwen = QWEN3 | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 30}
    assert from_hf_config(qwen, "q", "c").sliding_layers == tuple(range(30, 36))
    assert from_hf_config(QWEN3 | {"sliding_window": 4096}, "q", "c").sliding_window is None


def test_head_counts_name_the_attention() -> None:
    assert from_hf_config(LLAMA | {"num_key_value_heads": None}, "m", "c").attention == "MHA"
    assert from_hf_config(LLAMA | {"num_key_value_heads": 1}, "m", "c").attention == "MQA"
    assert from_hf_config({k: v for k, v in GEMMA2.items() if k != "tie_word_embeddings"}, "g", "c").tie_embeddings


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "c.json: missing key 'vocab_size'"),
        ({k: v for k, v in QWEN3.items() if k != "head_dim"}, "missing key 'head_dim'"),
        ({k: v for k, v in GPT_OSS.items() if k != "layer_types"}, "missing key 'layer_types'"),
        ({k: v for k, v in DEEPSEEK_V3.items() if k != "kv_lora_rank"}, "missing key 'kv_lora_rank'"),
        (LLAMA | {"architectures": ["LlamaForCausalLm2"]}, "unknown architecture .* did you mean LlamaForCausalLM"),
        ({}, "missing key 'architectures'"),
        (LLAMA | {"hidden_size": 4100}, "hidden_size 4100 is no multiple of num_attention_heads 32"),
        (LLAMA | {"num_hidden_layers": 0}, "num_layers: input should be greater than 0, got 0"),
        (LLAMA | {"num_hidden_layers": "32"}, "num_hidden_layers must be a non-negative integer, got '32'"),
        (LLAMA | {"num_key_value_heads": 7}, "num_q_heads 32 is no multiple of num_kv_heads 7"),
        (LLAMA | {"torch_dtype": "int4"}, "torch_dtype must be one of"),
        (LLAMA | {"quantization_config": {"quant_method": "awq"}}, "quant_method must be mxfp4 or fp8, got 'awq'"),
        (GPT_OSS | {"layer_types": ["full_attention"]}, "layer_types must list num_hidden_layers = 24 entries"),
        (GPT_OSS | {"layer_types": ["linear_attention"] * 24}, r"layer_types\[0\] must be full_attention or"),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, "dense layers among experts"),
    ],
)
def test_unusable_config_is_refused_in_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        from_hf_config(config, "m", "c.json")
    assert "\n" not in str(caught.value)


def test_unreadable_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="not valid JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(InputError, match="is a JSON object, got list"):
        load_model(tmp_path)


def test_head_dim_is_derived_where_the_architecture_derives_it() -> None:
    without = {key: value for key, value in QWEN3_MOE.items() if key != "head_dim"}
    assert from_hf_config(without, "m", "c").head_dim == 2048 // 32
    assert from_hf_config(LLAMA | {"head_dim": 64}, "m", "c").head_dim == 64


def test_yarn_gives_more_positions_and_other_scaling_does_not():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

    def loaded(scaling: object) -> ModelSpec:
        return from_hf_config(QWEN3 | {"rope_scaling": scaling}, "mine", "config.json")

    assert (loaded(yarn).max_position, loaded(yarn).longest_context) == (40960, 131072)
    assert loaded({"type": "yarn", "factor": 2.0}).scaled_position == 81920
    assert loaded({**yarn, "factor": 1.0}).scaled_position is None
    for other in (None, {"rope_type": "llama3", "factor": 8.0}):
        assert loaded(other).longest_context == 40960
    with pytest.raises(InputError, match=r"config\.json: rope_scaling: factor x original"):
        loaded({**yarn, "factor": "four"})
