"""Draft heads that are none, and trainings that cannot be: one line each, before anything is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from realhw import draft_train
from realhw.draft_train import TrainOptions, new_head, train
from realhw.eagle3 import default_feature_layers, load_head, save_head
from realhw.models import LoadedModel, geometry_of
from tests.realhw.tiny_llama import loaded_model
from tests.realhw.word_tokenizers import NumberTokenizer
from traces.errors import InputError

pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(num_layers: int = 4) -> LoadedModel:
    return loaded_model(24, num_layers=num_layers)


def options(**changes: Any) -> TrainOptions:
    values = {"model": "tiny", "prompts": ("unused.jsonl",), "epochs": 1, "new_tokens": 8, "held_out_share": 0.4}
    return TrainOptions.model_validate(values | changes)


@pytest.fixture
def questions(tmp_path: Path) -> str:
    rng = np.random.default_rng(3)
    lines = [json.dumps({"question": " ".join(map(str, rng.integers(1, 24, 6))), "answer": "1 2 3"}) for _ in range(16)]
    (tmp_path / "set.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "set.jsonl")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and configuration of a head with its own vocabulary."""
    file = tmp_path_factory.mktemp("head") / "head.safetensors"
    save_head(new_head(tiny(), options(draft_vocab_size=16), [[1, 2, 3, 4]]), file)
    with safe_open(file, framework="pt") as opened:
        return {key: opened.get_tensor(key) for key in opened.keys()}, json.loads(opened.metadata()["config"])  # noqa: SIM118


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feature_layers": [0, 1, 4]}, "reads hidden states before layers 0, 1, 4, the base has 0 to 3"),
        ({"feature_layers": [0, 1, -1]}, "reads hidden states before layers 0, 1, -1"),
        ({"num_key_value_heads": 3}, "4 query heads are no multiple of 3 KV heads"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rope_parameters": {"rope_type": "none"}}, "its configuration makes no head"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "its configuration makes no head"),
        ({"intermediate_size": 10**9}, r"mlp.down_proj.weight has shape .*, expected \(32, 1000000000\)"),
        ({"nonsense": 1}, r"head.safetensors: unknown key 'nonsense'"),
        ("{", "configuration in its metadata is not JSON"),
        ("[" * 100_000, "configuration in its metadata is not JSON"),
        ("[]", "configuration in its metadata is no JSON object"),
    ],
)
def test_configurations_that_make_no_head(saved: Any, tmp_path: Path, changes: Any, message: str) -> None:
    tensors, config = saved
    file = tmp_path / "head.safetensors"
    text = changes if isinstance(changes, str) else json.dumps(config | changes)
    save_file(tensors, file, {"config": text})
    with pytest.raises(InputError, match=message) as caught:
        load_head(str(file), 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fc.weight", lambda t: t * torch.nan, "fc.weight is not finite"),
        ("fc.weight", lambda t: t.int(), "fc.weight is of torch.int32, expected torch.float32"),
        ("d2t", lambda t: t + 9, "d2t names tokens beyond the vocabulary of 24"),
        ("d2t", lambda t: t.float(), "d2t is of torch.float32"),
    ],
)
def test_tensors_that_make_no_head(saved: Any, tmp_path: Path, name: str, change: Any, message: str) -> None:
    tensors, config = saved
    save_file(tensors | {name: change(tensors[name])}, tmp_path / "head.safetensors", {"config": json.dumps(config)})
    with pytest.raises(InputError, match=message):
        load_head(str(tmp_path / "head.safetensors"), 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "lacks 'num_attention_heads'"),
        ("[]", "is no JSON object"),
        ('{"num_attention_heads": 0}', "not an EAGLE-3 head's configuration"),
        ('{"num_attention_heads": 4, "head_dim": "x"}', "not an EAGLE-3 head's configuration"),
        ('{"num_attention_heads": 4, "eagle_config": [1]}', "not an EAGLE-3 head's configuration"),
        (
            '{"num_attention_heads": 4, "intermediate_size": "x", "vocab_size": 24}',
            "intermediate_size: input should be",
        ),
    ],
)
def test_folders_that_make_no_head(saved: Any, tmp_path: Path, text: str, message: str) -> None:
    save_file(saved[0], tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=f"config.json: {message}|config.json {message}"):
        load_head(str(tmp_path), 4)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_bases_of_few_layers(num_layers: int, questions: str, tmp_path: Path) -> None:
    assert max(default_feature_layers(num_layers)) < num_layers
    train(options(prompts=(questions,), max_prompts=2), tmp_path / "h.safetensors", tiny(num_layers))
    assert load_head(str(tmp_path / "h.safetensors"), num_layers).config.feature_layers[2] < num_layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"new_tokens": 3}, "no held-out answer has 5 tokens within 256: acceptance cannot be measured"),
        ({"sequence_tokens": 8}, "no held-out answer has 5 tokens within 8"),
        ({"new_tokens": 251}, "a question of 6 tokens and new_tokens 251 exceed the 256 positions of tiny"),
        ({"draft_vocab_size": 25}, "draft_vocab_size 25 exceeds the base's 24 tokens"),
        ({"learning_rate": 1e30, "epochs": 5}, "the loss of step .* is not finite; learning_rate is 1e.30"),
    ],
)
def test_trainings_that_cannot_be(questions: str, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        train(options(prompts=(questions,), **changes), tmp_path / "h.safetensors", tiny())
    assert not list(tmp_path.glob("h.*"))


def test_bases_that_cannot_be(questions: str, tmp_path: Path) -> None:
    broken = tiny()
    with torch.no_grad():
        broken.model.lm_head.weight[3] = torch.nan
    with pytest.raises(InputError, match="tiny: its logits are not finite"):
        train(options(prompts=(questions,)), tmp_path / "h.safetensors", broken)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=24, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    other = LoadedModel(model, NumberTokenizer(), geometry_of(model, "gpt"), "random")
    with pytest.raises(InputError, match=r"GPT2LMHeadModel: an EAGLE-3 head needs a model with model\.layers"):
        train(options(prompts=(questions,)), tmp_path / "h.safetensors", other)


def test_a_training_runs_one_step_at_least_and_none_where_it_could_not_be_written(
    questions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = options(prompts=(questions,), max_seconds=1e-9, temperature=1e-300)
    assert train(settings, tmp_path / "new" / "h.safetensors", tiny())["steps"] == 1
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(draft_train, "load_model", None)
    with pytest.raises(InputError, match=r"file/h\.safetensors: cannot be written: Not a directory"):
        train(settings, tmp_path / "file" / "h.safetensors")


def test_options_of_too_many_distances() -> None:
    with pytest.raises(ValueError, match="less than or equal to 8"):
        options(distances=9)
