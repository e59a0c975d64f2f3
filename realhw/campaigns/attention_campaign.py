"""Record a model's attention on long prompts, in one resumable run on a GPU.

python -m realhw.campaigns.attention_campaign --prompts FOLDER --out FOLDER [--plan NAME] [--model GGUF] [--train]

FOLDER of prompts: gsm8k_test.jsonl (GSM8K), math500.jsonl (MATH), humaneval.jsonl (HumanEval). Each trace is zipped as
it is finished and skipped where its zip exists; campaign.json has the wall time and the peak memory of each, and what
the model wrote is beside it as text. --train first trains SmolLM2's draft head on what the model generates on those
prompts; without it the packaged head drafts.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from realhw.draft_train import TrainOptions, train
from realhw.hook import Extra
from realhw.long_prompts import Task, long_prompt
from realhw.memory_limit import peak_memory_bytes
from realhw.models import LoadedModel, load_model
from realhw.prompt_sets import Example, load_examples
from realhw.prompts import Prompt
from realhw.record import record
from realhw.record_options import RecordOptions
from traces.pack import pack
from traces.reader import FileGroup, open_trace

FILES = ("gsm8k_test.jsonl", "math500.jsonl", "humaneval.jsonl")
LICENCES = {"gsm8k_test": "MIT", "math500": "Apache-2.0", "humaneval": "MIT"}
LAYERS = (0, 4, 8, 12, 17, 21, 25, 29)
"""Eight of SmolLM2-135M's thirty, evenly spread."""
HELD_OUT_SHARE = 0.1
GEMMA_SEEDS: dict[Task, tuple[int, ...]] = {"multi-document": (5, 6, 7), "reasoning": (3, 4, 5)}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a campaign records. contexts: task, tokens, seed of the prompt. head: of drafter eagle3; None: n-grams."""

    model: str
    contexts: tuple[tuple[Task, int, int], ...]
    steps: int = 256
    layers: tuple[int, ...] | None = LAYERS
    head: str | None = "smollm2-135m-eagle3"
    temperature: float = 0.7
    max_budget_tokens: int = 1024
    block_sizes_tokens: tuple[int, ...] = ()
    """Besides blocks of 16, in the same layers."""
    max_prompts: int = 1024
    """Of the head's training, as the rest."""
    new_tokens: int = 192
    epochs: int = 8
    train_seconds: float = 45


PLANS = {
    "smollm2-135m": Plan(
        "smollm2-135m",
        (
            ("multi-document", 6144, 4),
            ("reasoning", 2048, 3),
            ("reasoning", 4096, 0),
            ("code", 4096, 1),
            ("needle", 6144, 2),
        ),
    ),
    "gemma3-270m": Plan(
        "gemma3-270m",
        tuple(
            (task, context, seed) for task, seeds in GEMMA_SEEDS.items() for context in (16128, 32256) for seed in seeds
        ),
        layers=None,
        head=None,
        temperature=1.0,
        max_budget_tokens=4096,
        block_sizes_tokens=(8, 32, 64),
    ),
    "tiny": Plan(
        "smollm2-135m",
        (("reasoning", 384, 0), ("multi-document", 448, 1)),
        steps=6,
        max_prompts=3,
        new_tokens=8,
        epochs=1,
        train_seconds=20,
    ),
}
"""Gemma-3 reaches position 32,768, guesses included: twice 16,128 tokens and 256 steps. The same seed draws the same
documents first, so that the shorter prompt's documents are the longer one's first half. Below temperature 1 this base
model soon repeats itself."""


def build_prompt(
    tokenizer: Any, examples: Sequence[Example], task: Task, context: int, seed: int, share: float = HELD_OUT_SHARE
) -> Prompt:
    """A prompt of at least `context` tokens whose question, and documents, are held out of the head's training.

    So are the solved examples before the question, except for code, which has too few. share: of all examples that
    are held out; 1 where no head was trained.
    """
    same = [e for e in examples if e.task == ("code" if task == "code" else "reasoning")]
    own = [e for e in same if e.held_out(share)]
    used = own
    if task == "reasoning":
        used = own[1 + seed :]
    if task == "code":
        used = [e for e in same if e is not own[seed]]
    return long_prompt(tokenizer, used, own[seed].question, task, context, seed)


def run(given: argparse.Namespace, plan: Plan, command: str) -> None:
    """All traces; each prints its wall time. One that fails is reported and passed over."""
    given.out.mkdir(parents=True, exist_ok=True)
    clock = _Clock(given.out / "campaign.json", command, given.commit)
    loaded = load_model(given.model or plan.model, given.device, "float32")
    examples = load_examples([given.prompts / name for name in FILES])
    clock.lap("load")
    head = given.head or plan.head
    if given.train:
        head = str(_trained_head(given, plan, loaded, command))
        clock.lap("train")
    place = "h200" if given.device == "cuda" else "cpu"
    for (task, context, seed), name in zip(plan.contexts, trace_names(plan, place), strict=True):
        packed = given.out / f"{name}.zarr.zip"
        if packed.exists() or not (given.only is None or any(part in name for part in given.only.split(","))):
            continue
        with clock.stage(name):
            share = HELD_OUT_SHARE if plan.head else 1.0
            prompt = build_prompt(loaded.tokenizer, examples, task, context, seed, share)
            options = options_of(plan, prompt, name, task, context, head, given, command)
            folder = given.out / "recording.zarr"
            shutil.rmtree(folder, ignore_errors=True)
            record(options, folder, loaded)
            _write_text(loaded.tokenizer, folder, given.out / f"{name}.txt")
            pack(folder, packed)
            shutil.rmtree(folder)


def trace_names(plan: Plan, place: str) -> list[str]:
    """Of the plan's contexts; further prompts of one task and context are numbered from 2."""
    names: list[str] = []
    for at, (task, context, _) in enumerate(plan.contexts):
        number = 1 + [other[:2] for other in plan.contexts[:at]].count((task, context))
        again = "" if number == 1 else f"-{number}"
        names.append(f"{plan.model}-{task}-{round(context / 1024)}k{again}-{place}")
    return names


def options_of(
    plan: Plan,
    prompt: Prompt,
    name: str,
    task: str,
    context: int,
    head: str | None,
    given: argparse.Namespace,
    command: str,
) -> RecordOptions:
    """The plan's layers and block sizes with everything that can be recorded besides; --full: all layers, four block
    sizes, budgets to at least 2,048 tokens."""
    full = (8, 32, 64) if given.full else ()
    layers = None if given.full else plan.layers
    return RecordOptions(
        model=plan.model,
        prompts=(prompt.model_copy(update={"name": task}),),
        name=name,
        context_tokens=context,
        steps=plan.steps,
        layers=layers,
        extra_block_sizes_tokens=full or plan.block_sizes_tokens,
        max_budget_tokens=max(plan.max_budget_tokens, 2048 if given.full else 0),
        score_levels_per_octave=8,
        extras=get_args(Extra),
        drafter="eagle3" if head else "ngram",
        draft_model=head,
        temperature=plan.temperature,
        device=given.device,
        command=command,
        licences=LICENCES,
    )


def _write_text(tokenizer: Any, trace: Path, out: Path) -> None:
    """What the model wrote."""
    recorded = open_trace(trace)
    for name in recorded.group_names:
        group = recorded.group(name)
        assert isinstance(group, FileGroup)
        out.write_text(tokenizer.decode(group.array("tokens").tolist()) + "\n", encoding="utf-8")


def _trained_head(given: argparse.Namespace, plan: Plan, loaded: LoadedModel, command: str) -> Path:
    head: Path = given.out / "smollm2-135m-eagle3.safetensors"
    if head.exists():
        return head
    options = TrainOptions(
        model="smollm2-135m",
        prompts=tuple(str(given.prompts / name) for name in FILES),
        held_out_share=HELD_OUT_SHARE,
        max_prompts=plan.max_prompts,
        new_tokens=plan.new_tokens,
        epochs=plan.epochs,
        max_seconds=plan.train_seconds,
        generate_sequences=1024 if given.device == "cuda" else 16,
        device=given.device,
        command=command,
    )
    torch.set_float32_matmul_precision("high")
    summary = train(options, head, loaded, _say)
    torch.set_float32_matmul_precision("highest")
    print(json.dumps({k: v for k, v in summary.items() if k != "options"}), flush=True)
    return head


class _Clock:
    """Wall time and peak memory of each stage, printed and kept beside the results."""

    def __init__(self, path: Path, command: str, commit: str | None) -> None:
        self._path, self._start = path, time.perf_counter()
        cuda = torch.cuda.is_available()
        self._content: dict[str, Any] = {
            "command": command,
            "device": torch.cuda.get_device_name() if cuda else "CPU",
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
            "commit": commit or _output("git", "rev-parse", "HEAD"),
            "torch": torch.__version__,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "stages_s": {},
            "peak_memory_bytes": {},
        }

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Times what is inside and survives its failure."""
        try:
            yield
        except Exception:
            traceback.print_exc()
            what += " (failed)"
        self.lap(what)

    def lap(self, what: str) -> None:
        now, peak = time.perf_counter(), peak_memory_bytes()
        self._content["stages_s"][what] = round(now - self._start, 1)
        self._content["peak_memory_bytes"][what] = peak
        self._start = now
        self._path.write_text(json.dumps(self._content, indent=1) + "\n", encoding="utf-8")
        print(f"{what}: {self._content['stages_s'][what]} s, at most {peak / 1e9:.2f} GB in use", flush=True)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _say(what: str, done: int, total: int) -> None:
    if total < 10 or done == total or done % max(1, total // 5) == 0:
        print(f"{what}: {done} of {total}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plan", default="smollm2-135m", choices=tuple(PLANS), help="tiny: a few minutes on a CPU")
    parser.add_argument("--only", metavar="PART,...", help="traces with one of these in their name")
    parser.add_argument("--model", help="the plan's, from elsewhere; as `oasis-sim record --model`: its GGUF file, say")
    parser.add_argument("--head", help="the draft head, if not the plan's")
    parser.add_argument("--train", action="store_true", help="train the head first, 2 minutes on an H200")
    parser.add_argument("--full", action="store_true", help="all layers and four block sizes, to 2,048 tokens")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--commit", help="of the code, where git cannot say")
    given = parser.parse_args()
    command = shlex.join(["python", "-m", "realhw.campaigns.attention_campaign", *sys.argv[1:]])
    run(given, PLANS[given.plan], command)


if __name__ == "__main__":
    main()
