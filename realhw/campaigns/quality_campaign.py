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
import traceback
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
PREDICTORS = ("previous", "draft1", "draft2", "draft3", "draft4", "oracle", "random")
SHARES = (0.6, 1.0)
"""Of the time that is left for the first pass of each run; what a run then lacks is taken up once more."""
SUMMARY_S = 15.0
"""Kept back for the intervals and for the part that runs longer than the ones before it."""


@dataclass(frozen=True, slots=True)
class Run:
    """Prompts of one context length, (task, number) each."""

    prompts: tuple[tuple[str, int], ...]
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a campaign is. reasoning_tokens, needle_tokens: within which the answer must come."""

    runs: tuple[Run, ...]
    steps: int
    reasoning_tokens: int
    needle_tokens: int
    prompts_per_batch: int
    fetch_caps: tuple[float, ...]
    budgets_tokens: tuple[int, ...]
    block_sizes_tokens: tuple[int, ...]


FULL = Scale(
    runs=(Run((("reasoning", 16), ("code", 16), ("needle", 16)), 4096), Run((("needle", 24),), 2048)),
    steps=48,
    reasoning_tokens=192,
    needle_tokens=24,
    prompts_per_batch=6,
    fetch_caps=(0.02, 0.05, 0.1, 0.2, 1.0),
    budgets_tokens=(256, 512, 1024, 2048),
    block_sizes_tokens=(16, 8, 32),
)
TINY = Scale(
    runs=(Run((("reasoning", 1), ("code", 1)), 384), Run((("needle", 2),), 512)),
    steps=3,
    reasoning_tokens=6,
    needle_tokens=12,
    prompts_per_batch=2,
    fetch_caps=(0.1, 1.0),
    budgets_tokens=(64, 128),
    block_sizes_tokens=(8, 16),
)


def build_prompts(loaded: LoadedModel, examples: Sequence[Example], scale: Scale, run: Run) -> tuple[Prompt, ...]:
    """Prompts of at least the run's context, tasks in turn: solved examples, then a held-out question.

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
    for task, count in run.prompts:
        column = []
        for seed in range(min(count, len(asked[task]))):
            question = asked[task][seed]
            if task == "needle":
                prompt = _needle(loaded, reasoning, scale.needle_tokens, run.context_tokens, seed)
            else:
                others = [e for e in shots[task] if e is not question]
                prompt = _solved_then(loaded, others, question, scale.reasoning_tokens, run.context_tokens, seed)
            column.append(prompt)
        columns.append(column)
    return tuple(p for row in zip_longest(*columns) for p in row if p is not None)


def _solved_then(
    loaded: LoadedModel,
    others: Sequence[Example],
    question: Example,
    answer_tokens: int,
    context_tokens: int,
    seed: int,
) -> Prompt:
    answer = question.answer.rsplit("####", 1)
    prompt = Prompt(
        name=f"{question.task}-{seed}",
        task=question.task,
        text="",
        answer=f"#### {answer[1].strip()}" if len(answer) == 2 else None,
        answer_tokens=answer_tokens,
    )

    def of(count: int) -> Prompt:
        turns = few_shot(others, question.question, count, seed)
        messages = tuple(Message.model_validate(turn) for turn in turns)
        return prompt.model_copy(update={"text": None, "messages": messages})

    return _long_enough(loaded, of, len(others), context_tokens)


def _needle(
    loaded: LoadedModel, documents: Sequence[Example], answer_tokens: int, context_tokens: int, seed: int
) -> Prompt:
    def of(count: int) -> Prompt:
        text, answer = needle_prompt(documents, count, (0.2, 0.5, 0.8)[seed % 3], seed)
        return Prompt(
            name=f"needle-{seed}",
            task="needle",
            messages=(Message(role="user", content=text),),
            answer=answer,
            answer_tokens=answer_tokens,
        )

    return _long_enough(loaded, of, len(documents), context_tokens)


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
    parser.add_argument("--out", type=Path, required=True, help="a folder for each context is made in it")
    parser.add_argument("--model", default="smollm2-135m", help="as `oasis-sim record --model`: its GGUF file, say")
    parser.add_argument("--head", default="smollm2-135m-eagle3", help="the draft head")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--deadline-s", type=float, help="of the whole command, loading included")
    parser.add_argument("--tiny", action="store_true", help="prove the script in minutes on a CPU")
    given = parser.parse_args()
    begun = time.perf_counter()
    scale = TINY if given.tiny else FULL
    loaded = load_model(given.model, given.device, "float32")
    _say(f"model loaded after {time.perf_counter() - begun:.0f} s")
    examples = load_examples([given.prompts / name for name in FILES])
    every = [options_of(loaded, examples, scale, run, given) for run in scale.runs]
    _say(f"prompts made after {time.perf_counter() - begun:.0f} s")
    for options, share in [*zip(every, SHARES, strict=False), *((options, 1.0) for options in every)]:
        spent = time.perf_counter() - begun
        if given.deadline_s is not None:
            left = share * (given.deadline_s - spent) - SUMMARY_S
            if left <= 0:
                continue
            options = options.model_copy(update={"deadline_s": left})
        out = given.out / f"quality-{options.context_tokens}"
        if (out / "manifest.json").exists() and json.loads((out / "manifest.json").read_text())["complete"]:
            continue
        try:
            measure_quality(options, out, loaded, lambda what, *_: _say(f"{time.perf_counter() - begun:6.1f} s {what}"))
        except Exception:  # what was measured is in `out`; the other run still has its time
            traceback.print_exc()
            continue
        manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
        _say(json.dumps({name: manifest[name] for name in ("complete", "wall_s", "seconds", "dense_exact_match")}))


def options_of(
    loaded: LoadedModel, examples: Sequence[Example], scale: Scale, run: Run, given: argparse.Namespace
) -> QualityOptions:
    return QualityOptions(
        model="smollm2-135m",
        prompts=build_prompts(loaded, examples, scale, run),
        context_tokens=run.context_tokens,
        steps=scale.steps,
        fetch_caps=scale.fetch_caps,
        budgets_tokens=scale.budgets_tokens,
        block_sizes_tokens=scale.block_sizes_tokens,
        predictors=PREDICTORS,
        drafter="eagle3",
        draft_model=given.head,
        device=given.device,
        prompts_per_batch=scale.prompts_per_batch,
        command=shlex.join(["python", "-m", "realhw.campaigns.quality_campaign", *sys.argv[1:]]),
    )


def _say(what: str) -> None:
    print(what, flush=True)


if __name__ == "__main__":
    main()
