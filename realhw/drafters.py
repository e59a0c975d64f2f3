"""Who guesses the next tokens while a trace is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from transformers import DynamicCache

from realhw.models import LoadedModel, cache_keyword, load_model, text_config
from traces.errors import InputError

DrafterName = Literal["ngram", "random", "model", "eagle3"]


class Drafter(Protocol):
    name: str
    settings: dict[str, int | float | str]

    def guess(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow `tokens`; empty where there is nothing to go by."""

    def forget_pass(self) -> None:
        """The base's last pass is not to be learnt from."""
        return

    def close(self) -> None:
        """Let go of the base model."""
        return


class NgramDrafter(Drafter):
    """Prompt lookup: what followed the latest earlier occurrence of the last n tokens, longest n first.

    Source: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding), also vLLM's `ngram` speculator.
    """

    name = "n-gram prompt lookup"

    def __init__(self, max_ngram_tokens: int = 3, min_ngram_tokens: int = 1) -> None:
        self._max, self._min = max_ngram_tokens, min_ngram_tokens
        self.settings: dict[str, int | float | str] = {
            "max_ngram_tokens": max_ngram_tokens,
            "min_ngram_tokens": min_ngram_tokens,
        }

    def guess(self, tokens: Sequence[int], count: int) -> list[int]:
        history = list(tokens)
        for size in range(self._max, self._min - 1, -1):
            suffix = history[-size:]
            for start in range(len(history) - size - 1, -1, -1):
                if history[start : start + size] == suffix:
                    return history[start + size : start + size + count]
        return []


class RandomDrafter(Drafter):
    """Uniform tokens: the lower bound of what a draft's query can know."""

    name = "random token"

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size, self._seed = vocab_size, seed
        self.settings: dict[str, int | float | str] = {"vocab_size": vocab_size, "seed": seed}

    def guess(self, tokens: Sequence[int], count: int) -> list[int]:
        generator = np.random.default_rng([self._seed, len(tokens)])
        return [int(token) for token in generator.integers(self._vocab_size, size=count)]


class ModelDrafter(Drafter):
    """A smaller model of the same tokenizer, decoded greedily with its own KV cache."""

    name = "smaller model"

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self.settings: dict[str, int | float | str] = {"model": loaded.geometry.name}
        self._cached: list[int] = []
        self._cache = DynamicCache()

    @torch.inference_mode()
    def guess(self, tokens: Sequence[int], count: int) -> list[int]:
        history = list(tokens)
        if history[: len(self._cached)] != self._cached:
            self._cached, self._cache = [], DynamicCache()
        new, guesses = history[len(self._cached) :], []
        for _ in range(count):
            ids = torch.tensor([new], device=self._model.device)
            cached = {cache_keyword(self._model): self._cache}
            logits = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **cached).logits
            new = [int(logits[0, -1].argmax())]
            guesses += new
        if count > 1:
            self._cache.crop(1 - count)
        self._cached = history if count else self._cached
        return guesses


def make_drafter(
    name: DrafterName,
    base: LoadedModel,
    draft_model: str | None = None,
    max_ngram_tokens: int = 3,
    min_ngram_tokens: int = 1,
    seed: int = 0,
) -> Drafter:
    """A drafter for one request of `base`. `draft_model`: the smaller model, or the head's file or folder.

    Raises InputError where the draft model is missing or speaks another vocabulary.
    """
    if name == "ngram":
        return NgramDrafter(max_ngram_tokens, min_ngram_tokens)
    if name == "random":
        return RandomDrafter(vocabulary(base.model), seed)
    if draft_model is None:
        raise InputError(f"drafter {name} needs draft_model: {'a head' if name == 'eagle3' else 'a model'} to load")
    if name == "eagle3":
        from realhw.eagle3_drafter import Eagle3Drafter, load_head_for

        return Eagle3Drafter(base.model, load_head_for(draft_model, base), draft_model)
    device = base.model.device
    dtype: Any = str(base.model.dtype).removeprefix("torch.")
    smaller = load_model(draft_model, str(device), dtype)
    if vocabulary(smaller.model) != vocabulary(base.model):
        raise InputError(
            f"draft_model {draft_model} has {vocabulary(smaller.model)} tokens, the recorded model "
            f"{vocabulary(base.model)}: a drafter needs the same tokenizer"
        )
    return ModelDrafter(smaller)


def vocabulary(model: Any) -> int:
    """Number of tokens."""
    return int(text_config(model).vocab_size)
