"""The EAGLE-3-style head, its drafter and its training on a tiny random Llama."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import DynamicCache

from realhw.draft_train import TrainOptions, accepted, chain_guesses, fit, new_head, split_examples, train
from realhw.drafters import ModelDrafter, RandomDrafter, make_drafter
from realhw.eagle3 import load_head, save_head
from realhw.eagle3_drafter import Eagle3Drafter
from realhw.models import LoadedModel
from realhw.prompt_sets import Example, load_examples, needle_prompt
from tests.realhw.tiny_llama import loaded_model
from tests.realhw.word_tokenizers import NumberTokenizer
from traces.errors import InputError

pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(seed: int = 0, vocab_size: int = 24) -> LoadedModel:
    return loaded_model(vocab_size, num_layers=4, seed=seed)


@pytest.fixture(scope="module")
def base() -> LoadedModel:
    return tiny()


def options(**changes: object) -> TrainOptions:
    values = {"model": "tiny", "prompts": ("unused.jsonl",), "epochs": 30, "batch_sequences": 4, "new_tokens": 24}
    return TrainOptions.model_validate(values | changes)


def periodic(count: int, length: int = 40) -> list[list[int]]:
    """Sequences that repeat a short pattern, so that there is something to learn."""
    rng = np.random.default_rng(0)
    return [np.resize(rng.integers(1, 24, size=5), length).tolist() for _ in range(count)]


@pytest.mark.parametrize("draft_vocab_size", [None, 16])
def test_loss_falls(base: LoadedModel, draft_vocab_size: int | None) -> None:
    settings = options(draft_vocab_size=draft_vocab_size, learning_rate=3e-3, epochs=15)
    sequences = periodic(8)
    head = new_head(base, settings, sequences)
    losses = fit(head, base, sequences, settings, lambda *_: None)
    assert len(losses) == 30
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])


def test_guesses_of_the_drafter_equal_the_unrolled_chains(base: LoadedModel) -> None:
    """One pass over a sequence, as training sees it, and token by token with caches give the same guesses."""
    sequences = periodic(2, 30)
    head = new_head(base, options(), sequences).eval()
    expected = chain_guesses(head, base, sequences[:1], 3)[0]
    tokens = sequences[0]
    drafter = Eagle3Drafter(base.model, head, "head")
    cache = DynamicCache()
    with torch.inference_mode():
        base.model(torch.tensor([tokens[:9]]), past_key_values=cache)
        for known in range(9, 28):
            guesses = drafter.guess(tokens[: known + 1], 3)
            assert guesses == expected[known - 1].tolist()
            base.model(torch.tensor([[tokens[known], *guesses]]), past_key_values=cache)
            cache.crop(-3)
    drafter.close()


@pytest.mark.parametrize("draft_vocab_size", [None, 16])
def test_checkpoint_round_trips(base: LoadedModel, tmp_path: Path, draft_vocab_size: int | None) -> None:
    head = new_head(base, options(draft_vocab_size=draft_vocab_size), periodic(4)).to(torch.bfloat16)
    save_head(head, tmp_path / "head.safetensors")
    again = load_head(str(tmp_path / "head.safetensors"), 4, torch.bfloat16)
    assert again.config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_hugging_face_folder_loads_and_says_what_is_wrong(base: LoadedModel, tmp_path: Path) -> None:
    head = new_head(base, options(draft_vocab_size=16), periodic(4))
    state = {name: t.contiguous() for name, t in head.state_dict().items() if not name.startswith("rotary")}
    state["t2d"] = torch.zeros(24, dtype=torch.bool)
    save_file(state, tmp_path / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "num_attention_heads": 4, "head_dim": 8, "intermediate_size": 48,
        "vocab_size": 24, "draft_vocab_size": 16, "rms_norm_eps": 1e-6, "rope_theta": 5000.0,
        "max_position_embeddings": 256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_head(str(tmp_path), 4)
    assert loaded.config.feature_layers == (2, 2, 1)
    assert loaded.config.rope_parameters["rope_theta"] == 5000.0
    assert loaded.target_ids is not None
    assert head.target_ids is not None
    assert torch.equal(loaded.target_ids, head.target_ids)
    del state["midlayer.hidden_norm.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"lacks tensor midlayer\.hidden_norm\.weight"):
        load_head(str(tmp_path), 4)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match="pickled weights are not loaded"):
        load_head(str(tmp_path), 4)


def test_head_of_another_model_is_refused(tmp_path: Path) -> None:
    other = tiny(vocab_size=30)
    save_head(new_head(other, options(), periodic(2)), tmp_path / "head.safetensors")
    with pytest.raises(InputError, match="is for vocabulary 30, tiny has 24"):
        make_drafter("eagle3", tiny(), str(tmp_path / "head.safetensors"))


def test_acceptance_by_hand() -> None:
    """Prompt of 3 tokens, 4 generated: with two distances, positions 2, 3 and 4 have guesses for what follows."""
    tokens = [7, 7, 7, 1, 2, 3, 4]
    guesses = np.zeros((7, 2), np.int64)
    guesses[1] = (1, 9)  # known: token 2; the next are 1, 2
    guesses[2] = (9, 3)  # known: token 3; the next are 2, 3
    guesses[3] = (3, 4)  # known: token 4; the next are 3, 4
    hits, count = accepted(guesses, tokens, 3)
    assert count == 3
    assert hits.tolist() == [[True, False], [False, True], [True, True]]


def test_train_writes_a_head_and_its_acceptance(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    lines = [json.dumps({"question": " ".join(map(str, rng.integers(1, 24, 6))), "answer": "1 2 3"}) for _ in range(16)]
    (tmp_path / "set.jsonl").write_text("\n".join(lines))
    settings = options(
        prompts=(str(tmp_path / "set.jsonl"),), held_out_share=0.4, epochs=2, temperature=1.0, generate_sequences=8
    )
    out = tmp_path / "head.safetensors"
    summary = train(settings, out, tiny())
    written = json.loads(out.with_suffix(".json").read_text())
    assert written == summary
    assert len(written["acceptance_by_distance"]) == 4
    assert written["held_out_positions"] > 0
    assert load_head(str(out), 4).config.vocab_size == 24
    splits = split_examples(load_examples(settings.prompts), settings)
    assert not {e.question for e in splits["training"]} & {e.question for e in splits["held out"]}
    again = train(settings, tmp_path / "again.safetensors", tiny())
    assert again["acceptance_by_distance"] == summary["acceptance_by_distance"]
    assert (tmp_path / "again.safetensors").read_bytes() == out.read_bytes()


class Words(NumberTokenizer):
    """Word i of `words` has id i; all after the first `plain` are added tokens."""

    def __init__(self, words: str, plain: int = 20) -> None:
        super().__init__()
        self._ids = {word: token for token, word in enumerate(words.split())}
        self.added_tokens_decoder = {token: word for word, token in self._ids.items() if token >= plain}

    def get_vocab(self) -> dict[str, int]:
        return self._ids


@pytest.mark.parametrize(
    ("words", "vocab_size", "num_positions", "message"),
    [
        ("a b c <x>", 32, 256, None),  # the same words, padded further
        ("a c b <x>", 24, 256, "2 of 4 tokens have another id there or none .'b'.; a drafter needs the same tokenizer"),
        ("a b", 24, 256, "1 of 4 tokens have another id there or none .'c'."),
        ("a b c <y>", 3, 256, "has 3 tokens, the tokenizer 4"),
        ("a b c <y>", 24, 257, "has 256 positions, its last guess is for position 257"),
    ],
)
def test_smaller_models_that_are_taken_and_that_are_not(
    monkeypatch: pytest.MonkeyPatch, words: str, vocab_size: int, num_positions: int, message: str | None
) -> None:
    base = replace(tiny(), tokenizer=Words("a b c <x>", plain=3))
    smaller = replace(tiny(vocab_size=vocab_size), tokenizer=Words(words, plain=3))
    monkeypatch.setattr("realhw.drafters._load_once", lambda *_: smaller)
    if message is None:
        guesses = make_drafter("model", base, "small", num_positions=num_positions).guess([1, 2], 4)
        assert len(guesses) == 4
        assert max(guesses) < 24
        return
    with pytest.raises(InputError, match=message):
        make_drafter("model", base, "small", num_positions=num_positions)


def test_a_smaller_model_whose_logits_are_not_finite() -> None:
    broken = tiny()
    with torch.no_grad():
        broken.model.lm_head.weight[2] = torch.nan
    with pytest.raises(InputError, match="draft_model tiny: its logits are not finite"):
        ModelDrafter(broken, 24).guess([1, 2], 1)


def test_a_smaller_model_reads_a_long_prompt_in_parts(base: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, 24, 50)]
    whole = ModelDrafter(base, 24).guess(tokens, 3)
    monkeypatch.setattr("realhw.drafters._CHUNK_TOKENS", 7)
    assert ModelDrafter(base, 24).guess(tokens, 3) == whole


def test_the_base_as_its_own_smaller_model_is_always_right(base: LoadedModel) -> None:
    drafter = ModelDrafter(base, 24)
    tokens = [3, 4, 5]
    for _ in range(5):
        guesses = drafter.guess(tokens, 3)
        with torch.inference_mode():
            greedy = base.model.generate(torch.tensor([tokens]), max_new_tokens=3, do_sample=False)[0, len(tokens) :]
        assert guesses == greedy.tolist()
        tokens.append(guesses[0])


def test_random_drafter_depends_on_position_and_seed_alone() -> None:
    guesses = RandomDrafter(50, seed=1).guess([1, 2], 4)
    assert guesses == RandomDrafter(50, seed=1).guess([8, 9], 4)
    assert guesses != RandomDrafter(50, seed=2).guess([1, 2], 4)
    assert len(guesses) == 4
    assert all(0 <= token < 50 for token in guesses)


def test_prompt_sets(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n{"prompt": "def f():", "canonical_solution": " pass"}\n')
    assert load_examples([path]) == (Example("set", "reasoning", "a", "b"), Example("set", "code", "def f():", " pass"))
    path.write_text('{"question": "a"}\n')
    with pytest.raises(InputError, match="line 1: has none of"):
        load_examples([path])
    examples = [Example("s", "reasoning", f"q{i}", "x") for i in range(10)]
    text, code = needle_prompt(examples, 10, 0.5, seed=0)
    assert text.count(code) == 1
    assert text.index("Document 5") < text.index(code) < text.index("Document 6")
