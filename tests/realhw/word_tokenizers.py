"""Tokenizers of one token per word, with as much of Hugging Face's interface as is called."""

from __future__ import annotations

from typing import Any


class NumberTokenizer:
    """Words are numbers and stand for themselves; no chats."""

    chat_template: str | None = None
    eos_token_id = 0
    all_special_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.added_tokens_decoder: dict[int, str] = {}

    def get_vocab(self) -> dict[str, int]:
        return {}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


class ChatTokenizer(NumberTokenizer):
    """Chats are the words of their messages."""

    chat_template = "words"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return " ".join(message["content"] for message in messages)


class LengthTokenizer(ChatTokenizer):
    """Any word stands for its length."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}
