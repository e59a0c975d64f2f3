"""Everything that a GPU measures about SmolLM2-135M's attention, in one resumable run.

python -m realhw.campaigns.attention_campaign --prompts FOLDER --out FOLDER [--device cuda] [--tiny]

FOLDER of prompts: gsm8k_test.jsonl (GSM8K), math500.jsonl (MATH), humaneval.jsonl (HumanEval). Stages, each skipped
where its result exists: train the draft head; record compact traces; measure quality over the grid; pack.
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
from typing import Any

import torch

from realhw.draft_train import TrainOptions, train
from realhw.models import LoadedModel, load_model
from realhw.prompt_sets import Example, few_shot, load_examples, needle_prompt
from realhw.prompts import Message, Prompt, encode_prompt
from realhw.quality import measure_quality
from realhw.quality_options import QualityOptions
from realhw.record import record
from realhw.record_options import RecordOptions
from traces.pack import pack

FILES = ("gsm8k_test.jsonl", "math500.jsonl", "humaneval.jsonl")
LICENCES = {"gsm8k_test": "MIT", "math500": "Apache-2.0", "humaneval": "MIT"}
COMPACT_LAYERS = (0, 4, 8, 12, 17, 21, 25, 29)
"""Eight of SmolLM2-135M's thirty, evenly spread."""
HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a campaign is."""

    max_prompts: int | None
    new_tokens: int
    epochs: int
    train_seconds: float
    contexts: tuple[tuple[str, int], ...]
    steps: int
    quality_prompts: tuple[tuple[str, int], ...]
    quality_steps: int
    fetch_caps: tuple[float, ...]
    budgets_tokens: tuple[int, ...]
    block_sizes_tokens: tuple[int, ...]


FULL = Scale(
    max_prompts=1024,
    new_tokens=192,
    epochs=8,
    train_seconds=45,
    contexts=(("reasoning", 4096), ("code", 4096), ("needle", 7680), ("reasoning", 2048)),
    steps=256,
    quality_prompts=(("reasoning", 4096), ("code", 4096), ("needle", 4096)),
    quality_steps=48,
    fetch_caps=(0.02, 0.05, 0.1, 0.2, 1.0),
    budgets_tokens=(256, 512, 1024, 2048),
    block_sizes_tokens=(8, 16, 32),
)
TINY = Scale(
    max_prompts=3,
    new_tokens=8,
    epochs=1,
    train_seconds=20,
    contexts=(("reasoning", 384), ("needle", 448)),
    steps=6,
    quality_prompts=(("code", 384), ("needle", 384)),
    quality_steps=3,
    fetch_caps=(0.1, 1.0),
    budgets_tokens=(64, 128),
    block_sizes_tokens=(8, 16),
)


def build_prompt(loaded: LoadedModel, examples: Sequence[Example], task: str, context: int, seed: int) -> Prompt:
    """A prompt of at least `context` tokens and not much more: solved examples, then a held-out question.

    The solved examples are held out, too, except for code, which has too few.
    """
    same = [e for e in examples if e.task == ("code" if task == "code" else "reasoning")]
    own = [e for e in same if e.held_out(HELD_OUT_SHARE)]
    shots = own[1 + seed :] if task != "code" else [e for e in same if e is not own[seed]]
    name = f"{task}-{context}-{seed}"
    for count in range(1, len(own if task == "needle" else shots)):
        if task == "needle":
            text, answer = needle_prompt(own, count, (0.2, 0.5, 0.8)[seed % 3], seed)
            prompt = Prompt(name=name, messages=(Message(role="user", content=text),), answer=answer)
        else:
            turns = few_shot(shots, own[seed].question, count, seed)
            prompt = Prompt(name=name, messages=tuple(Message.model_validate(turn) for turn in turns))
        if len(encode_prompt(loaded.tokenizer, prompt)) >= context:
            break
    sources = ", ".join(sorted({e.source for e in own}))
    return prompt.model_copy(
        update={"description": f"{task}: {count} examples of {sources} and a held-out question, seed {seed}"}
    )


def run(
    prompts: Path, out: Path, device: str, scale: Scale, command: str, quality_repeats: int, commit: str | None
) -> None:
    """All stages; each prints its wall time. A trace or a quality run that fails is reported and passed over."""
    out.mkdir(parents=True, exist_ok=True)
    clock = _Clock(out / "campaign.json", command, commit)
    loaded = load_model("smollm2-135m", device, "float32")
    examples = load_examples([prompts / name for name in FILES])
    clock.lap("load")
    head = out / "smollm2-135m-eagle3.safetensors"
    if not head.exists():
        options = TrainOptions(
            model="smollm2-135m",
            prompts=tuple(str(prompts / name) for name in FILES),
            held_out_share=HELD_OUT_SHARE,
            max_prompts=scale.max_prompts,
            new_tokens=scale.new_tokens,
            epochs=scale.epochs,
            max_seconds=scale.train_seconds,
            generate_sequences=1024 if device == "cuda" else 16,
            device=device,
            command=command,
        )
        torch.set_float32_matmul_precision("high")
        summary = train(options, head, loaded, _say)
        torch.set_float32_matmul_precision("highest")
        print(json.dumps({k: v for k, v in summary.items() if k != "options"}), flush=True)
    clock.lap("train")
    traces = out / "traces"
    traces.mkdir(exist_ok=True)
    for number, (task, context) in enumerate(scale.contexts):
        short = f"{context // 1024}k" if context >= 1024 else str(context)
        name = f"smollm2-135m-{task}-{short}-{'h200' if device == 'cuda' else 'cpu'}"
        with clock.stage(f"trace {name}"):
            prompt = build_prompt(loaded, examples, task, context, number)
            record_compact(loaded, prompt, name, task, context, scale.steps, head, traces, device, command)
    for repeats in sorted({1, quality_repeats}):
        for task, context in scale.quality_prompts:
            with clock.stage(f"quality {task} {context}, {repeats} prompts"):
                chosen = tuple(build_prompt(loaded, examples, task, context, seed) for seed in range(repeats))
                measured = QualityOptions(
                    model="smollm2-135m",
                    prompts=chosen,
                    context_tokens=context,
                    steps=scale.quality_steps,
                    fetch_caps=scale.fetch_caps,
                    budgets_tokens=scale.budgets_tokens,
                    block_sizes_tokens=scale.block_sizes_tokens,
                    predictors=("previous", "draft1", "draft2", "draft3", "draft4", "oracle", "random"),
                    drafter="eagle3",
                    draft_model=str(head),
                    device=device,
                    command=command,
                )
                measure_quality(measured, out / f"quality-{task}-{context}", loaded, _say)


def record_compact(
    loaded: LoadedModel,
    prompt: Prompt,
    name: str,
    task: str,
    context: int,
    steps: int,
    head: Path,
    traces: Path,
    device: str,
    command: str,
) -> None:
    """Record eight layers at blocks of 16 and pack them into `traces`, unless that is done."""
    packed = traces / f"{name}.zarr.zip"
    if packed.exists():
        return
    folder = traces / "recording.zarr"
    shutil.rmtree(folder, ignore_errors=True)
    options = RecordOptions(
        model="smollm2-135m",
        prompts=(prompt.model_copy(update={"name": task}),),
        name=name,
        context_tokens=context,
        steps=steps,
        block_sizes_tokens=(),
        extra_block_sizes_tokens=(16,),
        extra_layers=COMPACT_LAYERS,
        max_budget_tokens=64 * 16,
        score_levels_per_octave=8,
        drafter="eagle3",
        draft_model=str(head),
        temperature=0.7,
        device=device,
        command=command,
        licences=LICENCES,
    )
    record(options, folder, loaded)
    pack(folder, packed)
    shutil.rmtree(folder)


class _Clock:
    """Wall time of each stage, printed and kept beside the results."""

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
        now = time.perf_counter()
        self._content["stages_s"][what] = round(now - self._start, 1)
        self._start = now
        self._path.write_text(json.dumps(self._content, indent=1) + "\n", encoding="utf-8")
        print(f"{what}: {self._content['stages_s'][what]} s", flush=True)


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
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="prove the script in a few minutes on a CPU")
    parser.add_argument("--quality-prompts", type=int, default=3, help="per task")
    parser.add_argument("--commit", help="of the code, where git cannot say")
    given = parser.parse_args()
    command = shlex.join(["python", "-m", "realhw.campaigns.attention_campaign", *sys.argv[1:]])
    scale = TINY if given.tiny else FULL
    run(given.prompts, given.out, given.device, scale, command, given.quality_prompts, given.commit)


if __name__ == "__main__":
    main()
