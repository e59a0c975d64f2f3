"""Who guesses the next tokens while a trace is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    name: str
    settings: dict[str, int | float | str]

    def guess(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow `tokens`; empty where there is nothing to go by."""


class NgramDrafter:
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
