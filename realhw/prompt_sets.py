"""Question sets, their held-out split, and long-context prompts made of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from realhw.prompts import encodable
from traces.errors import InputError
from traces.importers.rows import Row, jsonl_rows

FIELDS = (
    ("prompt", "canonical_solution", "code"),
    ("question", "answer", "reasoning"),
    ("problem", "solution", "reasoning"),
    ("prompt", "answer", "reasoning"),
)
"""(question's key, answer's key, task) of the JSONL files that are understood: HumanEval, GSM8K, MATH."""


@dataclass(frozen=True, slots=True)
class Example:
    """One question with its reference answer. `source`: the file's stem."""

    source: str
    task: str
    question: str
    answer: str

    def held_out(self, share: float) -> bool:
        """Whether the example is kept out of training: a fixed function of its question."""
        digest = hashlib.sha256(self.question.encode()).digest()
        return int.from_bytes(digest[:4], "big") < share * 2**32


def load_examples(paths: Sequence[str | Path]) -> tuple[Example, ...]:
    """Examples of JSONL files with the keys of `FIELDS`. Raises InputError naming the line."""
    examples: list[Example] = []
    for path in map(Path, paths):
        for row in jsonl_rows(path):
            for question, answer, task in FIELDS:
                if question in row.fields and answer in row.fields:
                    examples.append(Example(path.stem, task, _text(row, question), _text(row, answer)))
                    break
            else:
                expected = ", ".join(f"{question} with {answer}" for question, answer, _ in FIELDS)
                raise InputError(f"{path}, line {row.line}: has none of {expected}")
    if not examples:
        raise InputError("no examples in " + ", ".join(map(str, paths)))
    return tuple(examples)


def _text(row: Row, field: str) -> str:
    value = row.get(field)
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise row.error(field, f"expected a text, got {json.dumps(value)[:60]}")
    try:
        return encodable(str(value))
    except ValueError as error:
        raise row.error(field, str(error)) from None


def few_shot(examples: Sequence[Example], question: str, count: int, seed: int) -> list[dict[str, str]]:
    """Chat of `count` solved examples, drawn with `seed`, and a new question."""
    order = np.random.default_rng(seed).permutation(len(examples))[:count]
    turns: list[dict[str, str]] = []
    for index in order:
        turns.append({"role": "user", "content": examples[index].question})
        turns.append({"role": "assistant", "content": examples[index].answer})
    return [*turns, {"role": "user", "content": question}]


def needle_prompt(examples: Sequence[Example], num_documents: int, depth: float, seed: int) -> tuple[str, str]:
    """Numbered documents with one fact to find at relative `depth`; (prompt, answer).

    Documents are the examples' questions and answers in an order drawn with `seed`; the fact is a drawn number.
    """
    generator = np.random.default_rng(seed)
    code = str(int(generator.integers(10000, 100000)))
    order = generator.permutation(len(examples))[:num_documents]
    place = min(int(depth * num_documents), num_documents - 1)
    parts = []
    for number, index in enumerate(order):
        if number == place:
            parts.append(f"Note: the access code of the archive is {code}.")
        parts.append(f"Document {number + 1}: {examples[index].question}\n{examples[index].answer}")
    parts.append("Question: what is the access code of the archive? Answer with the code, then say what it opens.")
    return "\n\n".join(parts), code


def multi_document_prompt(examples: Sequence[Example], num_documents: int, seed: int) -> tuple[str, str]:
    """Numbered documents, four solved look-ups and a question for eight more; (prompt, how the first answer starts).

    A look-up repeats the first sentence and the last line of a document. Documents, their order and those asked for are
    drawn with `seed`.
    """
    generator = np.random.default_rng(seed)
    chosen = [examples[i] for i in generator.permutation(len(examples))[:num_documents]]
    parts = [f"Document {number}: {e.question}\n{e.answer}" for number, e in enumerate(chosen, start=1)]
    asked = [int(i) for i in generator.permutation(num_documents)[:12]]
    solved, open_ones = asked[:4], asked[4:] or asked
    for index in solved:
        parts.append(f"Question: how does document {index + 1} begin and end?")
        parts.append(f"Answer: {_look_up(index, chosen[index])}")
    numbers = ", ".join(str(index + 1) for index in open_ones)
    parts.append(f"Question: how do documents {numbers} begin and end? Go through all of them.")
    return "\n\n".join(parts), _look_up(open_ones[0], chosen[open_ones[0]])


def _look_up(index: int, example: Example) -> str:
    first = re.match(r".*?[.?!](?=\s|$)", example.question, flags=re.DOTALL)
    begins = first[0] if first else example.question
    return f'Document {index + 1} begins "{begins}" and ends "{example.answer.strip().splitlines()[-1]}".'
