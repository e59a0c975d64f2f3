"""Prompts of a wanted length in tokens, made of question sets.

python -m realhw.long_prompts FILE [FILE ...] --task multi-document --model gemma3-270m --context 16384 --out P.jsonl
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from realhw.models import load_tokenizer
from realhw.prompt_sets import Example, few_shot, load_examples, multi_document_prompt, needle_prompt
from realhw.prompts import Message, Prompt, encode_prompt
from traces.errors import InputError

Task = Literal["reasoning", "code", "needle", "multi-document"]
NEEDLE_DEPTHS = (0.2, 0.5, 0.8)


def long_prompt(
    tokenizer: Any, examples: Sequence[Example], question: str, task: Task, context_tokens: int, seed: int
) -> Prompt:
    """A prompt of at least `context_tokens` and not much more: solved examples and `question`, or documents.

    A chat where the tokenizer has a template, else text. Raises InputError where the examples are too few.
    """

    def of(count: int) -> Prompt:
        answer = None
        if task == "needle":
            text, answer = needle_prompt(examples, count, NEEDLE_DEPTHS[seed % len(NEEDLE_DEPTHS)], seed)
        elif task == "multi-document":
            text, answer = multi_document_prompt(examples, count, seed)
        turns = [{"role": "user", "content": text}] if answer else few_shot(examples, question, count, seed)
        sources = ", ".join(sorted({e.source for e in examples}))
        about = f"{task}: {count} examples of {sources}{'' if answer else ' and a new question'}, seed {seed}"
        return _prompt(tokenizer, turns, f"{task}-{context_tokens}-{seed}", answer, about)

    def reaches(count: int) -> bool:
        return len(encode_prompt(tokenizer, of(count))) >= context_tokens

    count = 1 + bisect_left(range(1, len(examples) + 1), True, key=reaches)
    if count > len(examples):
        raise InputError(f"{task}: all {len(examples)} examples together are shorter than {context_tokens} tokens")
    return of(count)


def _prompt(tokenizer: Any, turns: Sequence[dict[str, str]], name: str, answer: str | None, about: str) -> Prompt:
    fixed = {"name": name, "answer": answer, "description": about}
    if getattr(tokenizer, "chat_template", None):
        return Prompt(messages=tuple(Message.model_validate(turn) for turn in turns), **fixed)
    said = [turn["content"] for turn in turns]
    if len(turns) > 1:  # a base model follows a form that repeats
        said = [f"{'Question' if turn['role'] == 'user' else 'Answer'}: {turn['content']}" for turn in turns]
    return Prompt(text="\n\n".join(said) + "\n\nAnswer:", **fixed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--task", required=True, choices=get_args(Task))
    parser.add_argument("--model", required=True, help="whose tokenizer counts")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=float, help="only this share, held out of a draft head's training")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    kind = "code" if given.task == "code" else "reasoning"
    examples = [example for example in load_examples(given.files) if example.task == kind]
    if given.held_out is not None:
        examples = [example for example in examples if example.held_out(given.held_out)]
    tokenizer = load_tokenizer(given.model)
    prompt = long_prompt(tokenizer, examples[1:], examples[0].question, given.task, given.context, given.seed)
    given.out.write_text(prompt.model_dump_json(exclude_none=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
