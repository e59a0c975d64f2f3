"""Prompts of a recording: text or chat messages, from JSONL, a text file or standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from simulator.specs.base import PositiveInt, Spec
from traces.errors import InputError


class Message(Spec):
    role: Literal["system", "user", "assistant"]
    content: str


class Prompt(Spec):
    """One request. `name` becomes its group in the trace."""

    name: str = Field(default="request", pattern=r"^[A-Za-z0-9_-]+$")
    text: str | None = None
    """Taken as it is."""
    messages: tuple[Message, ...] | None = None
    """Put through the tokenizer's chat template, with a generation prompt."""
    description: str | None = None
    answer: str | None = None
    """What a right continuation contains; `oasis-sim quality` looks for it."""
    answer_tokens: PositiveInt = 32
    """Within how many tokens."""
    task: str = "all"
    """Kind of prompt; `oasis-sim quality` reports each apart."""

    @model_validator(mode="after")
    def _one_of(self) -> Prompt:
        if (self.text is None) == (self.messages is None):
            raise ValueError("give either text or messages")
        return self


def load_prompts(source: str | Path) -> tuple[Prompt, ...]:
    """Prompts of a `.jsonl` file (one object a line: name, text or messages), a text file, or `-` for stdin.

    Raises InputError naming the line.
    """
    if str(source) == "-":
        return (Prompt(text=sys.stdin.read()),)
    path = Path(source)
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: prompts cannot be read: {error}") from error
    if path.suffix != ".jsonl":
        return (Prompt(text=content),)
    prompts: list[Prompt] = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            prompts.append(Prompt.model_validate(json.loads(line)))
        except ValidationError as error:
            raise InputError(f"{path}, line {number}: {error.errors()[0]['msg']}") from error
        except ValueError as error:
            raise InputError(f"{path}, line {number}: not JSON: {error}") from error
    names = [prompt.name for prompt in prompts]
    if len(set(names)) < len(names) or not names:
        raise InputError(f"{path}: needs at least one prompt and a different name for each; names: {names}")
    return tuple(prompts)


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt."""
    if prompt.messages is None:
        return [int(token) for token in tokenizer(prompt.text)["input_ids"]]
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"prompt '{prompt.name}' has messages, but the tokenizer has no chat template")
    text = tokenizer.apply_chat_template(
        [message.model_dump() for message in prompt.messages], tokenize=False, add_generation_prompt=True
    )
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def fit_context(tokens: list[int], context_tokens: int, keep_first_tokens: int, name: str) -> list[int]:
    """Exactly `context_tokens` of a prompt: the first few (attention sinks) and the end; the excess between is cut.

    Raises InputError where the prompt is shorter.
    """
    excess = len(tokens) - context_tokens
    if excess < 0:
        raise InputError(f"prompt '{name}' has {len(tokens)} tokens, fewer than the context of {context_tokens}")
    keep = min(keep_first_tokens, context_tokens)
    return tokens[:keep] + tokens[keep + excess :]
