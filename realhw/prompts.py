"""Prompts of a recording: text or chat messages, from JSONL, a text file or standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from simulator.specs.base import PositiveInt, Spec
from simulator.specs.validation import validated
from traces.errors import InputError
from traces.importers.rows import Row, json_lines, jsonl_rows


def encodable(text: str) -> str:
    """`text`. Raises ValueError for half a surrogate pair, which JSON can spell and no tokenizer takes."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("holds half of a surrogate pair, which is no character")
    return text


Text = Annotated[str, AfterValidator(encodable)]


class Message(Spec):
    role: Literal["system", "user", "assistant"]
    content: Text


class Prompt(Spec):
    """One request. `name` becomes its group in the trace."""

    name: str = Field(default="request", pattern=r"^[_-]*[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=200)
    text: Text | None = None
    """Taken as it is."""
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1)
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
    """Prompts of a `.jsonl` file (one object a line: name, text or messages), a text file, or either on stdin (`-`).

    Raises InputError naming the line.
    """
    path = Path(source)
    if path.suffix.lower() == ".jsonl":
        return _prompts(jsonl_rows(path), path)
    text = _text(path)
    if not _is_prompt(text.lstrip().partition("\n")[0]):
        return (Prompt(text=text),)
    if str(source) == "-":
        return _prompts(json_lines(text.split("\n"), Path("stdin")), Path("stdin"))
    raise InputError(f"{path}: holds prompts as JSON lines; such a file must end in .jsonl")


def _prompts(rows: Iterable[Row], source: Path) -> tuple[Prompt, ...]:
    prompts: dict[str, Prompt] = {}
    for row in rows:
        prompt = validated(Prompt, row.fields, f"{source}, line {row.line}")
        if prompt.name in prompts:
            raise InputError(f"{source}, line {row.line}: name {prompt.name!r} is taken by a line before")
        prompts[prompt.name] = prompt
    if not prompts:
        raise InputError(f"{source}: needs at least one prompt")
    return tuple(prompts.values())


def _text(path: Path) -> str:
    try:
        if str(path) == "-":
            if sys.stdin is None:
                raise OSError("it is closed")
            return sys.stdin.read()
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{'stdin' if str(path) == '-' else path}: prompts cannot be read: {reason}") from error


def _is_prompt(line: str) -> bool:
    try:
        return bool(Prompt.model_validate_json(line))
    except ValidationError:
        return False


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
