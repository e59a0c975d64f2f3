"""Record SmolLM2-135M's attention on five long prompts, in one resumable run on a GPU.

python -m realhw.campaigns.attention_campaign --prompts FOLDER --out FOLDER [--model GGUF] [--device cuda] [--train]

FOLDER of prompts: gsm8k_test.jsonl (GSM8K), math500.jsonl (MATH), humaneval.jsonl (HumanEval). Each trace is zipped as
it is finished and skipped where its zip exists. --train first trains the draft head on what the model generates on
those prompts; without it the packaged head drafts.
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
from realhw.models import LoadedModel, load_model
from realhw.prompt_sets import Example, load_examples
from realhw.prompts import Prompt
from realhw.record import record
from realhw.record_options import RecordOptions
from traces.pack import pack

FILES = ("gsm8k_test.jsonl", "math500.jsonl", "humaneval.jsonl")
LICENCES = {"gsm8k_test": "MIT", "math500": "Apache-2.0", "humaneval": "MIT"}
LAYERS = (0, 4, 8, 12, 17, 21, 25, 29)
"""Eight of SmolLM2-135M's thirty, evenly spread."""
HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a campaign is. contexts: task, tokens, seed."""

    contexts: tuple[tuple[Task, int, int], ...]
    steps: int
    max_prompts: int
    new_tokens: int
    epochs: int
    train_seconds: float


FULL = Scale(
    contexts=(
        ("multi-document", 6144, 4),
        ("reasoning", 2048, 3),
        ("reasoning", 4096, 0),
        ("code", 4096, 1),
        ("needle", 6144, 2),
    ),
    steps=256,
    max_prompts=1024,
    new_tokens=192,
    epochs=8,
    train_seconds=45,
)
TINY = Scale(
    contexts=(("reasoning", 384, 0), ("multi-document", 448, 1)),
    steps=6,
    max_prompts=3,
    new_tokens=8,
    epochs=1,
    train_seconds=20,
)


def build_prompt(tokenizer: Any, examples: Sequence[Example], task: Task, context: int, seed: int) -> Prompt:
    """A prompt of at least `context` tokens whose question, and documents, are held out of the head's training.

    So are the solved examples before the question, except for code, which has too few.
    """
    same = [e for e in examples if e.task == ("code" if task == "code" else "reasoning")]
    own = [e for e in same if e.held_out(HELD_OUT_SHARE)]
    used = own
    if task == "reasoning":
        used = own[1 + seed :]
    if task == "code":
        used = [e for e in same if e is not own[seed]]
    return long_prompt(tokenizer, used, own[seed].question, task, context, seed)


def run(given: argparse.Namespace, scale: Scale, command: str) -> None:
    """All traces; each prints its wall time. One that fails is reported and passed over."""
    given.out.mkdir(parents=True, exist_ok=True)
    clock = _Clock(given.out / "campaign.json", command, given.commit)
    loaded = load_model(given.model, given.device, "float32")
    examples = load_examples([given.prompts / name for name in FILES])
    clock.lap("load")
    head = given.head
    if given.train:
        head = str(_trained_head(given, scale, loaded, command))
        clock.lap("train")
    for task, context, seed in scale.contexts:
        name = f"smollm2-135m-{task}-{round(context / 1024, 1):g}k-{'h200' if given.device == 'cuda' else 'cpu'}"
        packed = given.out / f"{name}.zarr.zip"
        with clock.stage(name):
            if not packed.exists():
                prompt = build_prompt(loaded.tokenizer, examples, task, context, seed)
                options = options_of(prompt, name, task, context, scale.steps, head, given, command)
                folder = given.out / "recording.zarr"
                shutil.rmtree(folder, ignore_errors=True)
                pack(record(options, folder, loaded), packed)
                shutil.rmtree(folder)


def options_of(
    prompt: Prompt, name: str, task: str, context: int, steps: int, head: str, given: argparse.Namespace, command: str
) -> RecordOptions:
    """Blocks of 16 in eight layers with everything that can be recorded besides; --full: all layers, four block sizes,
    budgets to 2,048 tokens."""
    return RecordOptions(
        model="smollm2-135m",
        prompts=(prompt.model_copy(update={"name": task}),),
        name=name,
        context_tokens=context,
        steps=steps,
        layers=None if given.full else LAYERS,
        extra_block_sizes_tokens=(8, 32, 64) if given.full else (),
        max_budget_tokens=2048 if given.full else 1024,
        score_levels_per_octave=8,
        extras=get_args(Extra),
        drafter="eagle3",
        draft_model=head,
        temperature=0.7,
        device=given.device,
        command=command,
        licences=LICENCES,
    )


def _trained_head(given: argparse.Namespace, scale: Scale, loaded: LoadedModel, command: str) -> Path:
    head: Path = given.out / "smollm2-135m-eagle3.safetensors"
    if head.exists():
        return head
    options = TrainOptions(
        model="smollm2-135m",
        prompts=tuple(str(given.prompts / name) for name in FILES),
        held_out_share=HELD_OUT_SHARE,
        max_prompts=scale.max_prompts,
        new_tokens=scale.new_tokens,
        epochs=scale.epochs,
        max_seconds=scale.train_seconds,
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
    parser.add_argument("--model", default="smollm2-135m", help="as `oasis-sim record --model`: its GGUF file, say")
    parser.add_argument("--head", default="smollm2-135m-eagle3", help="the draft head")
    parser.add_argument("--train", action="store_true", help="train the head first, 2 minutes on an H200")
    parser.add_argument("--full", action="store_true", help="all layers and four block sizes, to 2,048 tokens")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="prove the script in a few minutes on a CPU")
    parser.add_argument("--commit", help="of the code, where git cannot say")
    given = parser.parse_args()
    command = shlex.join(["python", "-m", "realhw.campaigns.attention_campaign", *sys.argv[1:]])
    run(given, TINY if given.tiny else FULL, command)


if __name__ == "__main__":
    main()
