"""Catalog: byte identities, every model and profile loads, figures are sourced, misses name the nearest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator.catalog import DATA, hardware, hardware_names, load_hardware, load_model, models
from simulator.specs.base import Figure, Spec
from traces.errors import InputError

PUBLISHED_PARAMETERS_B = {
    "Qwen3-0.6B": 0.6,
    "Qwen3-8B": 8.2,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
    "Qwen3-30B-A3B": 30.5,
    "Llama-3.1-8B": 8.03,
    "Llama-3.1-70B": 70.6,
    "Mistral-7B-v0.3": 7.25,
    "SmolLM2-135M": 0.135,
    "SmolLM2-360M": 0.362,
    "SmolLM2-1.7B": 1.71,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "DeepSeek-V3": 671.0,
}
"""Billions of parameters that the model cards state, two to four digits."""


def test_catalog_has_all_models_and_profiles() -> None:
    assert len(models()) == 18
    assert len({model.name.casefold() for model in models()}) == 18
    assert hardware_names() == (
        "a100-sxm", "b200-sxm", "gh200", "h100-pcie", "h100-sxm", "h200-sxm", "h200-sxm-calibrated", "l40s",
        "rtx-4090",
    )  # fmt: skip
    assert {profile.name for profile in hardware()} == set(hardware_names())


def test_qwen3_8b_byte_identities() -> None:
    model = load_model("Qwen3-8B")
    assert model.kv_bytes_per_token() == 147_456
    assert model.kv_bytes(32_768) == 4.5 * 2**30
    assert model.working_set_bytes(num_blocks=128, block_size_tokens=16) == 288 * 2**20
    assert model.block_bytes(16) == 8192
    # Compressed keys at P=16, v=2: 1/16 of full KV, and at 32K as many bytes as the 2,048-token working set.
    assert model.metadata_bytes(32_768 // 16) == model.kv_bytes(32_768) / 16 == 288 * 2**20


def test_kv_bytes_per_token_of_every_model() -> None:
    expected = {
        "Qwen3-0.6B": 114_688, "Qwen3-4B": 147_456, "Qwen3-8B": 147_456, "Qwen3-14B": 163_840,
        "Qwen3-32B": 262_144, "Qwen3-30B-A3B": 98_304, "Llama-3.1-8B": 131_072, "Llama-3.1-70B": 327_680,
        "Llama-3.3-70B": 327_680, "DeepSeek-R1-Distill-Qwen-7B": 57_344, "Mistral-7B-v0.1": 131_072,
        "Mistral-7B-v0.3": 131_072, "SmolLM2-135M": 23_040, "SmolLM2-360M": 40_960, "SmolLM2-1.7B": 196_608,
        "gpt-oss-20b": 49_152, "gpt-oss-120b": 73_728, "DeepSeek-V3": 70_272,
    }  # fmt: skip
    assert {model.name: model.kv_bytes_per_token() for model in models()} == expected


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS_B)
def test_parameter_count_is_the_model_cards(name: str) -> None:
    model = load_model(name)
    total = model.num_layers * (model.qkv_params + model.o_params) + model.num_dense_ffn_layers * model.ffn_params
    if model.moe is not None:
        experts = model.moe.num_experts + model.moe.shared_experts
        total += model.num_moe_layers * (experts * model.expert_params + model.router_params)
    total += model.embedding_params + (0 if model.tie_embeddings else model.lm_head_params)
    assert total == pytest.approx(PUBLISHED_PARAMETERS_B[name] * 1e9, rel=0.012)


def test_weight_bytes_follow_the_bits() -> None:
    model = load_model("Qwen3-8B")
    assert model.qkv_bytes == 2 * 4096 * (32 + 16) * 128
    assert model.o_bytes == 2 * 4096 * 4096
    assert model.ffn_bytes == 2 * 3 * 4096 * 12288
    assert model.lm_head_bytes == 2 * 151_936 * 4096
    layers = 36 * (model.qkv_bytes + model.o_bytes + model.ffn_bytes)
    assert model.weight_bytes == layers + model.lm_head_bytes + model.embedding_bytes
    tied = model.model_copy(update={"tie_embeddings": True})
    assert tied.weight_bytes == model.weight_bytes - model.lm_head_bytes
    fp4 = load_model("gpt-oss-20b")
    assert fp4.expert_bytes == fp4.expert_params * 4.25 / 8
    assert fp4.qkv_bytes == 2 * fp4.qkv_params


def test_moe_reads_from_few_experts_to_all() -> None:
    model = load_model("Qwen3-30B-A3B")
    assert model.moe is not None
    assert model.moe.expected_active_experts(1) == pytest.approx(8)
    assert model.moe.expected_active_experts(4096) == pytest.approx(128)
    reads = [model.moe_layer_read_bytes(tokens) for tokens in (1, 2, 16, 256)]
    assert reads == sorted(reads)
    assert reads[0] == pytest.approx(8 * model.expert_bytes + 2 * model.router_params)
    assert load_model("Qwen3-8B").moe_layer_read_bytes(8) == 0


def test_sliding_windows_stop_growing() -> None:
    model = load_model("gpt-oss-20b")
    assert model.num_full_attention_layers == 12
    assert model.full_attention_layers == tuple(range(1, 24, 2))
    per_layer = model.kv_bytes_per_token_per_layer()
    assert model.kv_bytes(100) == 24 * 100 * per_layer
    assert model.kv_bytes(8192) == 12 * (8192 + 128) * per_layer
    assert load_model("mistral-7b-v0.1").full_attention_layers == ()


def test_mla_caches_one_latent() -> None:
    model = load_model("DeepSeek-V3")
    assert model.kv_bytes_per_token_per_layer() == (512 + 64) * 2
    assert model.key_elements_per_token_per_head == 576
    assert model.num_kv_heads == 1


def figures(spec: Spec, where: str = "") -> list[tuple[str, Figure]]:
    found: list[tuple[str, Figure]] = []
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        parts = value if isinstance(value, tuple) else (value,)
        for part in parts:
            if isinstance(part, Figure):
                found.append((f"{where}{name}", part))
            elif isinstance(part, Spec):
                found += figures(part, f"{where}{name}.")
    return found


@pytest.mark.parametrize("name", hardware_names())
def test_every_figure_says_where_it_comes_from(name: str) -> None:
    profile = load_hardware(name)
    sourced = figures(profile)
    assert len(sourced) > 90
    for where, figure in sourced:
        assert len(figure.source) > 10, where
        if not figure.assumption:
            assert not figure.source.startswith(("as ", "assum")), where
    assert profile.gpu.hbm_read_bytes_per_s.value <= profile.gpu.hbm_bytes_per_s.value
    assert profile.gpu.bf16_sustained_flops.value <= profile.gpu.bf16_flops.value
    for kernel in ("gemm", "attention", "score"):
        rate = getattr(profile.kernels, f"{kernel}_bytes_per_s").value
        assert 0.3 * profile.gpu.hbm_bytes_per_s.value < rate < profile.gpu.hbm_bytes_per_s.value
    link = profile.link
    assert link.duplex_h2d_bytes_per_s.value <= link.h2d_bytes_per_s.value
    assert link.gather_cta_bytes_per_s.value < link.gather_bytes_per_s.value <= link.h2d_bytes_per_s.value
    assert all(0 < rate.kernel_rate.value <= 1 and 0 < rate.beside_rate.value <= 1 for rate in profile.pairs)


def test_h200_component_figures_reproduce_the_measured_rows() -> None:
    """The fits are of single components; the times of whole steps are never used."""
    kernels = load_hardware("h200-sxm").kernels
    rows = [
        (kernels.attention_t0_s, kernels.attention_bytes_per_s, 134.2e6, 40.2e-6),
        (kernels.attention_t0_s, kernels.attention_bytes_per_s, 268.4e6, 71.7e-6),
        (kernels.attention_t0_s, kernels.attention_bytes_per_s, 536.9e6, 138.1e-6),
        (kernels.score_t0_s, kernels.score_bytes_per_s, 134.2e6, 52.0e-6),
        (kernels.score_t0_s, kernels.score_bytes_per_s, 268.4e6, 98.6e-6),
        (kernels.gemm_t0_s, kernels.gemm_bytes_per_s, 50.33e6, 16.0e-6),
        (kernels.gemm_t0_s, kernels.gemm_bytes_per_s, 1244.7e6, 284e-6),
    ]
    for t0_s, rate, num_bytes, measured_s in rows:
        assert t0_s.value + num_bytes / rate.value == pytest.approx(measured_s, rel=0.015)
    topk = [kernels.topk_t0_s.value + scores * kernels.topk_s_per_score.value for scores in (262_144, 524_288)]
    assert topk == pytest.approx([(20.8e-6 + 22.7e-6) / 2, 41.0e-6], rel=0.02)


@pytest.mark.parametrize(
    ("name", "near"), [("qwen3-9b", "Qwen3-8B"), ("llama3.1-8b", "Llama-3.1-8B"), ("deepseek", "DeepSeek-V3")]
)
def test_unknown_model_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(InputError, match=near) as caught:
        load_model(name)
    assert "\n" not in str(caught.value)


def test_names_ignore_case_and_hub_ids_work() -> None:
    assert load_model("QWEN3-8b") is load_model("Qwen/Qwen3-8B")
    assert load_hardware("H100-SXM") is load_hardware("h100-sxm")
    with pytest.raises(InputError, match="h100-sxm"):
        load_hardware("h100sxm")
    with pytest.raises(InputError, match=r"unknown hardware 'nonesuch': one of a100-sxm"):
        load_hardware("nonesuch")


def test_a_file_with_another_ending_is_told_which_one_it_needs(tmp_path: Path) -> None:
    for name in ("mine", "mine.txt"):
        (tmp_path / name).write_text("name: mine\n", encoding="utf-8")
        with pytest.raises(InputError, match=rf"{name}: a hardware profile is a file that must end in \.yaml"):
            load_hardware(tmp_path / name)
        with pytest.raises(InputError, match=rf"{name}: a model's file is .* and must end in \.json"):
            load_model(tmp_path / name)
    with pytest.raises(InputError, match="a hardware profile is a file"):
        load_hardware(tmp_path)


def test_profile_from_a_file(tmp_path: Path) -> None:
    text = (DATA / "hardware" / "h100-sxm.yaml").read_text(encoding="utf-8")
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    assert load_hardware(str(file)) == load_hardware("h100-sxm")
    file.write_text(text.replace("  hbm_bytes:\n", "  hbm_bites:\n"), encoding="utf-8")
    with pytest.raises(InputError, match=rf"{file}: gpu.hbm_bytes: required key is missing"):
        load_hardware(file)
    file.write_text(text + "gpus: 3\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"unknown key 'gpus': did you mean gpu"):
        load_hardware(file)
    file.write_text(text.replace("value: 85899345920", "value: -1"), encoding="utf-8")
    with pytest.raises(InputError, match=r"gpu\.hbm_bytes\.value: input should be greater than or equal to 0, got -1"):
        load_hardware(file)
    with pytest.raises(InputError, match="cannot be read"):
        load_hardware(tmp_path / "absent.yaml")


def test_shipped_model_rows_have_no_stray_keys() -> None:
    rows = json.loads((DATA / "models.json").read_text(encoding="utf-8"))["models"]
    assert all(row["source"] and isinstance(row["unverified"], list) for row in rows)
