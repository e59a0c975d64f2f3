"""What a recording starts from: prompts, n-gram guesses, model geometries that are recorded or refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig

from realhw.drafters import NgramDrafter
from realhw.models import LoadedModel, full_attention_layers, geometry_of, load_model
from realhw.prompt_sets import load_examples
from realhw.prompts import Message, Prompt, encode_prompt, fit_context, load_prompts
from realhw.record import record
from realhw.record_options import RecordOptions
from tests.realhw.word_tokenizers import ChatTokenizer, NumberTokenizer
from traces.check import check_trace
from traces.errors import InputError
from traces.reader import FileGroup, open_trace

SHIPPED = Path(__file__).parents[2] / "traces/data/prompts/smollm2-135m-reasoning.jsonl"


class Configured:
    """A model of which only the configuration is looked at."""

    def __init__(self, config: Any) -> None:
        self.config = config


pytestmark = pytest.mark.usefixtures("one_thread")


def test_prompts_as_json_lines_need_their_ending(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('\n{"name": "a", "text": "1"}\n')
    with pytest.raises(InputError, match=r"p\.json: holds prompts as JSON lines; such a file must end in \.jsonl"):
        load_prompts(path)
    path.write_text('{"a": "document in JSON"}')
    assert load_prompts(path) == (Prompt(text=path.read_text()),)


def test_prompt_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "p.txt"
    text.write_text("1 2 3")
    assert load_prompts(text) == (Prompt(text="1 2 3"),)
    monkeypatch.setattr("sys.stdin", io.StringIO("4 5"))
    assert load_prompts("-") == (Prompt(text="4 5"),)
    monkeypatch.setattr("sys.stdin", io.StringIO('{"name": "a", "text": "1"}\n\n{"name": "b", "text": "2 3"}\n'))
    assert load_prompts("-") == (Prompt(name="a", text="1"), Prompt(name="b", text="2 3"))
    monkeypatch.setattr("sys.stdin", io.StringIO('{"name": "a", "text": "1"}\n{"name": "a", "text": "2"}\n'))
    with pytest.raises(InputError, match="stdin, line 2: name 'a' is taken"):
        load_prompts("-")
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match="stdin: prompts cannot be read: it is closed"):
        load_prompts("-")
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"name": "a", "text": "1"}\n\n{"name": "b", "messages": [{"role": "user", "content": "2"}]}\n')
    first, second = load_prompts(lines)
    assert first.name == "a"
    assert second.messages == (Message(role="user", content="2"),)
    assert encode_prompt(ChatTokenizer(), second) == [2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"name": "a", "text": "1"}\n\n{"name": "a", "text": "2"}', "line 3: name 'a' is taken by a line before"),
        ('{"name": "a"}', "line 1: give either text or messages"),
        ('{"name": "a", "text": "1"}\nnonsense', "line 2: not JSON"),
        ("[" * 100_000, "line 1: not JSON"),
        ("[1]", "line 1: expected a JSON object"),
        ('{"name": "../a", "text": "1"}', "line 1: name: string should match"),
        ('{"name": "--", "text": "1"}', "line 1: name: string should match"),
        (f'{{"name": "{"a" * 201}", "text": "1"}}', "line 1: name: string should have at most 200"),
        ('{"name": "a", "txet": "1"}', "line 1: unknown key 'txet': did you mean text"),
        ('{"name": "a", "text": 5}', "line 1: text: input should be a valid string, got 5"),
        ('{"name": "a", "messages": []}', "line 1: messages: .* at least 1 item"),
        ('{"name": "a", "text": "1 \\ud800"}', "line 1: text: holds half of a surrogate pair"),
        ("", "at least one prompt"),
    ],
)
def test_bad_prompt_lines_are_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        load_prompts(path)


def test_only_a_newline_ends_a_line_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    text = "1\u20282\x853\x0c4"
    lines = tmp_path / "p.JSONL"
    lines.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\r\n", encoding="utf-8-sig")
    assert load_prompts(lines) == (Prompt(text=text),)
    plain = tmp_path / "p.txt"
    plain.write_text("5 6", encoding="utf-8-sig")
    assert load_prompts(plain) == (Prompt(text="5 6"),)
    questions = tmp_path / "q.jsonl"
    questions.write_text(json.dumps({"question": text, "answer": 7}, ensure_ascii=False))
    assert load_examples([questions])[0].question == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "line 1: not JSON"),
        ('{"question": null, "answer": "1"}', "line 1, field question: expected a text, got null"),
        ('{"question": "1", "answer": "\\udc00"}', "line 1, field answer: holds half of a surrogate pair"),
        ('{"question": "1"}', "line 1: has none of"),
    ],
)
def test_bad_examples_are_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        load_examples([path])


def test_missing_prompt_file_and_template(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="prompts cannot be read"):
        load_prompts(tmp_path / "none.txt")
    with pytest.raises(InputError, match=r"none\.jsonl: cannot be read: No such file"):
        load_prompts(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="no chat template"):
        encode_prompt(NumberTokenizer(), Prompt(messages=(Message(role="user", content="1"),)))


def test_context_keeps_the_start_and_the_end() -> None:
    assert fit_context(list(range(10)), 6, 2, "p") == [0, 1, 6, 7, 8, 9]
    assert fit_context(list(range(6)), 6, 2, "p") == list(range(6))
    with pytest.raises(InputError, match="'p' has 5 tokens, fewer than the context of 6"):
        fit_context(list(range(5)), 6, 2, "p")


def test_shipped_prompt_is_one_chat() -> None:
    (prompt,) = load_prompts(SHIPPED)
    assert prompt.messages is not None
    assert [message.role for message in prompt.messages[-3:]] == ["user", "assistant", "user"]


def test_ngram_takes_the_longest_then_the_latest_match() -> None:
    drafter = NgramDrafter(max_ngram_tokens=3, min_ngram_tokens=1)
    assert drafter.guess([1, 2, 3, 9, 7, 2, 3, 8, 1, 2, 3], 4) == [9, 7, 2, 3]
    assert drafter.guess([5, 1, 5, 2, 5], 2) == [2, 5]
    assert drafter.guess([1, 2, 3], 4) == []
    assert drafter.guess([7, 7], 4) == [7]
    assert NgramDrafter(3, 2).guess([5, 1, 5, 2, 5], 2) == []


def test_latent_attention_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="deepseek: multi-head latent attention"):
        geometry_of(Configured(DeepseekV3Config()), "deepseek")


def test_sliding_layers_are_left_out() -> None:
    assert full_attention_layers(Configured(MistralConfig(sliding_window=4096))) == ()
    config = Gemma3TextConfig(num_hidden_layers=12)
    assert full_attention_layers(Configured(config)) == (5, 11)


def test_unknown_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="cannot be loaded") as caught:
        load_model(str(tmp_path / "empty"))
    assert "\n" not in str(caught.value)


def test_sliding_window_model_decodes_as_without_the_recorder(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = Gemma3TextConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"] * 2,
        initializer_range=0.4,
        max_position_embeddings=128,
        pad_token_id=0,
    )
    model = Gemma3ForCausalLM(config).eval()
    prompt = [int(token) for token in torch.randint(1, 40, (40,))]
    with torch.inference_mode():
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=19, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, 40:]
    loaded = LoadedModel(model, NumberTokenizer(), geometry_of(model, "tiny-gemma"), "random")
    options = RecordOptions(
        model="tiny-gemma",
        prompts=(Prompt(text=" ".join(map(str, prompt))),),
        steps=20,
        block_sizes_tokens=(4,),
        max_budget_tokens=32,
        prefill_chunk_tokens=16,
    )
    path = record(options, tmp_path / "t.zarr", loaded)
    check_trace(path)
    group = open_trace(path).group("request")
    assert isinstance(group, FileGroup)
    assert group.layers(4) == (1, 3)
    assert group.array("tokens").tolist() == [prompt[-1], *expected.tolist()]
