"""Tokenizers that split whole words or leave out the first token are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from realhw.gguf_header import gguf_flag
from realhw.models import load_model, load_tokenizer
from realhw.prompts import Prompt, encode_prompt
from tests.realhw.word_tokenizers import NumberTokenizer
from traces.errors import EnvironmentMissing

TEXT = (Path(__file__).parents[2] / "traces/data/prompts/smollm2-135m-reasoning.jsonl").read_text(encoding="utf-8")
FLAG = "tokenizer.ggml.add_bos_token"


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _trainer() -> trainers.BpeTrainer:
    return trainers.BpeTrainer(vocab_size=3000, special_tokens=["<s>"], show_progress=False)


def save(tokenizer: Tokenizer, folder: Path, num_merges: int | None = None) -> str:
    """A model folder with the tokenizer trained on TEXT, all of its merges or only the first."""
    tokenizer.train_from_iterator([TEXT], _trainer())
    parts = json.loads(tokenizer.to_str())
    parts["model"]["merges"] = parts["model"]["merges"][:num_merges]
    cut = Tokenizer.from_str(json.dumps(parts))
    PreTrainedTokenizerFast(tokenizer_object=cut, bos_token="<s>").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("make", "expected"), [(byte_level, "Ġmany"), (sentencepiece, "▁many")])
def test_a_right_tokenizer_passes(tmp_path: Path, make: Callable[[], Tokenizer], expected: str) -> None:
    tokenizer = load_tokenizer(save(make(), tmp_path))
    assert tokenizer.convert_ids_to_tokens(tokenizer("how many")["input_ids"])[1:] == [expected]


@pytest.mark.parametrize(("make", "split"), [(byte_level, "Ġ·a·n·s·w·e·r"), (sentencepiece, "▁·a·n·s·w·e·r")])
def test_one_without_merges_is_refused_in_one_line(tmp_path: Path, make: Callable[[], Tokenizer], split: str) -> None:
    folder = save(make(), tmp_path, num_merges=0)
    with pytest.raises(
        EnvironmentMissing, match=rf"model '{folder}': (\d+) of \1 whole words .*transformers"
    ) as caught:
        load_tokenizer(folder)
    assert split in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_one_with_some_merges_is_refused(tmp_path: Path, make: Callable[[], Tokenizer]) -> None:
    with pytest.raises(EnvironmentMissing, match="whole words"):
        load_tokenizer(save(make(), tmp_path, num_merges=300))


def test_a_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path, 0)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(EnvironmentMissing, match="whole words"):
        load_model(folder)


@pytest.mark.slow
def test_the_packaged_model_passes() -> None:
    tokenizer = load_tokenizer("smollm2-135m")
    assert tokenizer.convert_ids_to_tokens(tokenizer("Document one")["input_ids"]) == ["Document", "Ġone"]


class ForgetfulTokenizer(NumberTokenizer):
    """Starts a text with token 2 only once it is told to, or never."""

    bos_token_id = 2

    def __init__(self, says: bool, learns: bool = True) -> None:
        super().__init__()
        self.add_bos_token, self._learns, self._starts = says, learns, False

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "add_bos_token" and "_starts" in vars(self):
            super().__setattr__("_starts", value and self._learns)
        super().__setattr__(name, value)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [2] * self._starts + [len(word) for word in text.split()]}


def gguf_file(folder: Path, begins: bool | None) -> Path:
    """Only a header, with arrays of strings and numbers before the flag."""
    path = folder / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a", "▁b", ""])
    writer.add_token_scores([0.0, -1.0, -2.0])
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_uint64("count", 1)
    writer.add_bool("another", not begins)
    if begins is not None:
        writer.add_add_bos_token(begins)
    writer.add_string("last", "x")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("begins", [True, False, None])
def test_flag_of_a_gguf_file(tmp_path: Path, begins: bool | None) -> None:
    path = gguf_file(tmp_path, begins)
    assert gguf_flag(path, FLAG) is begins
    assert gguf_flag(path, "another") is (not begins)
    assert gguf_flag(path, "count") is None


def test_a_file_of_another_kind_has_no_flag(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(100))
    assert gguf_flag(path, FLAG) is None


@pytest.mark.parametrize(
    ("says", "file_says", "expected"),
    [(True, None, [2, 1, 3]), (False, True, [2, 1, 3]), (False, None, [1, 3]), (False, False, [1, 3])],
)
def test_a_prompt_starts_with_the_token_that_its_model_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: bool, file_says: bool | None, expected: list[int]
) -> None:
    monkeypatch.setattr("realhw.models.AutoTokenizer.from_pretrained", lambda *_, **__: ForgetfulTokenizer(says))
    path = gguf_file(tmp_path, file_says)
    assert encode_prompt(load_tokenizer(str(path)), Prompt(text="a bcd")) == expected


def test_one_that_leaves_out_the_first_token_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("realhw.models.AutoTokenizer.from_pretrained", lambda *_, **__: ForgetfulTokenizer(True, False))
    with pytest.raises(EnvironmentMissing, match=r"its prompts begin with a BOS token, .* adds none; a newer"):
        load_tokenizer(str(tmp_path))
