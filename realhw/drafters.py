"""Who guesses the next tokens while a trace is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np
import torch
from transformers import DynamicCache

from realhw.models import LoadedModel, cache_keyword, load_model, text_config
from traces.errors import InputError

_CHUNK_TOKENS = 2048
"""Of a smaller model's prefill, so that its memory does not grow with the context squared."""
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
    """A smaller model of the same tokenizer, decoded greedily with its own KV cache.

    vocab_size: of the base; the smaller model may have been padded further.
    """

    name = "smaller model"

    def __init__(self, loaded: LoadedModel, vocab_size: int) -> None:
        self._model, self._vocab_size = loaded.model, vocab_size
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
            for start in range(0, len(new), _CHUNK_TOKENS):
                logits = self._forward(new[start : start + _CHUNK_TOKENS])
            if not logits.isfinite().any() or logits.isnan().any():
                raise InputError(f"draft_model {self.settings['model']}: its logits are not finite")
            new = [int(logits.argmax())]
            guesses += new
        if count > 1:
            self._cache.crop(1 - count)
        self._cached = history if count else self._cached
        return guesses

    def _forward(self, tokens: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([list(tokens)], device=self._model.device)
        cached = {cache_keyword(self._model): self._cache}
        logits: torch.Tensor = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **cached).logits
        return logits[0, -1, : self._vocab_size]


def require_draft_model(name: DrafterName, draft_model: str | None) -> None:
    """Raises ValueError for a drafter without its model, or with one that it does not look at."""
    if name in ("model", "eagle3") and draft_model is None:
        raise ValueError(f"drafter {name} needs draft_model: {'a head' if name == 'eagle3' else 'a model'} to load")
    if name not in ("model", "eagle3") and draft_model is not None:
        raise ValueError(f"draft_model {draft_model!r} is of drafter model or eagle3, the drafter is {name}")


def make_drafter(
    name: DrafterName,
    base: LoadedModel,
    draft_model: str | None = None,
    max_ngram_tokens: int = 3,
    min_ngram_tokens: int = 1,
    seed: int = 0,
    num_positions: int = 0,
) -> Drafter:
    """A drafter for one request of `base` that ends at position `num_positions`, the last guess included.

    `draft_model`: the smaller model, or the head's file or folder. Raises InputError where it is missing, speaks
    another vocabulary or is too short.
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
    dtype: Any = str(base.model.dtype).removeprefix("torch.")
    smaller = _load_once(draft_model, str(base.model.device), dtype)
    _require_same_tokens(draft_model, smaller, base)
    if smaller.max_positions is not None and num_positions > smaller.max_positions:
        raise InputError(
            f"draft_model {draft_model} has {smaller.max_positions} positions, its last guess is for position "
            f"{num_positions}"
        )
    return ModelDrafter(smaller, vocabulary(base.model))


_load_once = lru_cache(maxsize=1)(load_model)
"""Every request has a drafter, all have one model."""


def _require_same_tokens(name: str, smaller: LoadedModel, base: LoadedModel) -> None:
    """Raises InputError unless both tokenizers give the ids of `base` to the same words (added tokens aside)."""
    of_base, of_draft = base.tokenizer.get_vocab(), smaller.tokenizer.get_vocab()
    added = {*base.tokenizer.added_tokens_decoder, *base.tokenizer.all_special_ids}
    other = [word for word, token in of_base.items() if token not in added and of_draft.get(word) != token]
    if other:
        raise InputError(
            f"draft_model {name}: {len(other)} of {len(of_base)} tokens have another id there or none ({other[0]!r}); "
            "a drafter needs the same tokenizer"
        )
    if vocabulary(smaller.model) < len(of_base):
        raise InputError(f"draft_model {name} has {vocabulary(smaller.model)} tokens, the tokenizer {len(of_base)}")


def vocabulary(model: Any) -> int:
    """Number of tokens."""
    return int(text_config(model).vocab_size)
