"""What sparsity costs SmolLM2-135M in quality, over the whole grid, in one resumable run on a GPU.

python -m realhw.campaigns.quality_campaign --prompts FOLDER --out FOLDER [--device cuda] [--deadline-s S] [--tiny]

FOLDER of prompts: gsm8k_test.jsonl (GSM8K), math500.jsonl (MATH), humaneval.jsonl (HumanEval). Needs torch,
transformers, gguf, pydantic, numba and pyarrow; neither SimPy nor Zarr.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from realhw.models import LoadedModel, load_model
from realhw.prompt_sets import Example, few_shot, load_examples, needle_prompt
from realhw.prompts import Message, Prompt, encode_prompt
from realhw.quality import measure_quality
from realhw.quality_options import QualityOptions
from traces.errors import InputError

FILES = ("gsm8k_test.jsonl", "math500.jsonl", "humaneval.jsonl")
HELD_OUT_SHARE = 0.1
"""Of the draft head's training: the questions asked here are not in it."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a campaign is. prompts: (task, number)."""

    prompts: tuple[tuple[str, int], ...]
    context_tokens: int
    steps: int
    reasoning_tokens: int
    needle_tokens: int
    prompts_per_batch: int
    fetch_caps: tuple[float, ...]
    budgets_tokens: tuple[int, ...]
    block_sizes_tokens: tuple[int, ...]


FULL = Scale(
    prompts=(("reasoning", 24), ("code", 16), ("needle", 24)),
    context_tokens=4096,
    steps=48,
    reasoning_tokens=192,
    needle_tokens=24,
    prompts_per_batch=6,
    fetch_caps=(0.02, 0.05, 0.1, 0.2, 1.0),
    budgets_tokens=(256, 512, 1024, 2048),
    block_sizes_tokens=(16, 8, 32),
)
TINY = Scale(
    prompts=(("reasoning", 1), ("code", 1), ("needle", 2)),
    context_tokens=384,
    steps=3,
    reasoning_tokens=6,
    needle_tokens=12,
    prompts_per_batch=2,
    fetch_caps=(0.1, 1.0),
    budgets_tokens=(64, 128),
    block_sizes_tokens=(8, 16),
)


def build_prompts(loaded: LoadedModel, examples: Sequence[Example], scale: Scale) -> tuple[Prompt, ...]:
    """Prompts of at least the context's length, tasks in turn: solved examples, then a held-out question.

    reasoning asks GSM8K questions, whose answers end in `#### number`; needle asks for a code among documents; code
    completes a function. The solved examples of reasoning and needle are held out, too.
    """
    held_out = [e for e in examples if e.held_out(HELD_OUT_SHARE)]
    reasoning = [e for e in held_out if e.task == "reasoning"]
    asked = {
        "reasoning": [e for e in reasoning if "####" in e.answer],
        "code": [e for e in held_out if e.task == "code"],
        "needle": reasoning,
    }
    shots = {"reasoning": reasoning, "code": [e for e in examples if e.task == "code"]}
    columns = []
    for task, count in scale.prompts:
        column = []
        for seed in range(min(count, len(asked[task]))):
            question = asked[task][seed]
            if task == "needle":
                prompt = _needle(loaded, reasoning, scale, seed)
            else:
                others = [e for e in shots[task] if e is not question]
                prompt = _solved_then(loaded, others, question, scale, seed)
            column.append(prompt)
        columns.append(column)
    return tuple(p for row in zip_longest(*columns) for p in row if p is not None)


def _solved_then(loaded: LoadedModel, others: Sequence[Example], question: Example, scale: Scale, seed: int) -> Prompt:
    answer = question.answer.rsplit("####", 1)
    prompt = Prompt(
        name=f"{question.task}-{seed}",
        task=question.task,
        text="",
        answer=f"#### {answer[1].strip()}" if len(answer) == 2 else None,
        answer_tokens=scale.reasoning_tokens,
    )

    def of(count: int) -> Prompt:
        turns = few_shot(others, question.question, count, seed)
        messages = tuple(Message.model_validate(turn) for turn in turns)
        return prompt.model_copy(update={"text": None, "messages": messages})

    return _long_enough(loaded, of, len(others), scale.context_tokens)


def _needle(loaded: LoadedModel, documents: Sequence[Example], scale: Scale, seed: int) -> Prompt:
    def of(count: int) -> Prompt:
        text, answer = needle_prompt(documents, count, (0.2, 0.5, 0.8)[seed % 3], seed)
        return Prompt(
            name=f"needle-{seed}",
            task="needle",
            messages=(Message(role="user", content=text),),
            answer=answer,
            answer_tokens=scale.needle_tokens,
        )

    return _long_enough(loaded, of, len(documents), scale.context_tokens)


def _long_enough(loaded: LoadedModel, of: Callable[[int], Prompt], most: int, context_tokens: int) -> Prompt:
    """The prompt of the fewest examples that has the context's length; `of`(count) grows with count."""
    low, high = 0, 1
    while len(encode_prompt(loaded.tokenizer, of(high))) < context_tokens:
        if high == most:
            raise InputError(f"{most} examples make less than {context_tokens} tokens")
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if len(encode_prompt(loaded.tokenizer, of(middle))) < context_tokens:
            low = middle
        else:
            high = middle
    return of(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m", help="as `oasis-sim record --model`, for its GGUF file, say")
    parser.add_argument("--head", default="smollm2-135m-eagle3", help="the draft head")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--deadline-s", type=float, help="of the whole command, loading included")
    parser.add_argument("--tiny", action="store_true", help="prove the script in minutes on a CPU")
    given = parser.parse_args()
    started = time.perf_counter()
    scale = TINY if given.tiny else FULL
    loaded = load_model(given.model, given.device, "float32")
    _say(f"model loaded after {time.perf_counter() - started:.0f} s")
    prompts = build_prompts(loaded, load_examples([given.prompts / name for name in FILES]), scale)
    spent = time.perf_counter() - started
    _say(f"{len(prompts)} prompts after {spent:.0f} s")
    options = QualityOptions(
        model="smollm2-135m",
        prompts=prompts,
        context_tokens=scale.context_tokens,
        steps=scale.steps,
        fetch_caps=scale.fetch_caps,
        budgets_tokens=scale.budgets_tokens,
        block_sizes_tokens=scale.block_sizes_tokens,
        predictors=("previous", "draft1", "draft2", "draft3", "draft4", "oracle", "random"),
        drafter="eagle3",
        draft_model=given.head,
        device=given.device,
        prompts_per_batch=scale.prompts_per_batch,
        deadline_s=None if given.deadline_s is None else max(1.0, given.deadline_s - spent),
        command=shlex.join(["python", "-m", "realhw.campaigns.quality_campaign", *sys.argv[1:]]),
    )
    begun = time.perf_counter()
    measure_quality(options, given.out, loaded, lambda what, *_: _say(f"{time.perf_counter() - begun:6.1f} s {what}"))
    manifest = json.loads((given.out / "manifest.json").read_text(encoding="utf-8"))
    _say(json.dumps({name: manifest[name] for name in ("complete", "seconds", "dense_exact_match")}))


def _say(what: str) -> None:
    print(what, flush=True)


if __name__ == "__main__":
    main()
