"""A long prompt is recorded in memory that grows with the chunk times the context, and reaches the disk as it goes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from traces.check import check_trace

RECORDING = """
import json, sys
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from realhw.memory_limit import peak_memory_bytes
from realhw.models import LoadedModel, geometry_of
from realhw.prompts import Prompt
from realhw.record import record
from realhw.record_options import RecordOptions

class Words:
    chat_template, eos_token_id = None, 0

    def __call__(self, text):
        return {"input_ids": [int(word) for word in text.split()]}

given = json.loads(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
config = LlamaConfig(
    vocab_size=50, num_hidden_layers=2, max_position_embeddings=1 << 16, attn_implementation="sdpa", **sizes
)
model = LlamaForCausalLM(config).eval()
loaded = LoadedModel(model, Words(), geometry_of(model, "tiny"), "random")
tokens = np.random.default_rng(0).integers(0, 50, given["context"])

def recorded(count, out):
    prompt = Prompt(text=" ".join(map(str, tokens[:count])))
    options = RecordOptions(
        model="tiny", prompts=(prompt,), steps=given["steps"], extras=tuple(given["extras"]), max_budget_tokens=1024,
        prefill_chunk_tokens=512,
    )
    record(options, Path(out), loaded)
    return peak_memory_bytes()

short = recorded(1200, given["out"] + "-short") if given["short"] else 0
print(json.dumps([short, recorded(given["context"], given["out"])]))
"""
SCORES_BYTES = 4
"""Of one fp32 entry of an S x S matrix."""


def _command(out: Path, context: int, steps: int, extras: tuple[str, ...] = (), short: bool = True) -> list[str]:
    given = {"out": str(out), "context": context, "steps": steps, "extras": extras, "short": short}
    return [sys.executable, "-c", RECORDING, json.dumps(given)]


@pytest.mark.parametrize(
    ("context", "extras"),
    [
        (8_192, ("query_cos", "prompt_window_mass")),
        pytest.param(32_768, ("mean", "prev_layer", "query_cos", "prefill_mass", "prompt_window_mass"),
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_peak_memory_is_far_below_the_square_of_the_prompt(
    context: int, extras: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "long.zarr"
    done = subprocess.run(_command(out, context, 3, extras), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    short, long = json.loads(done.stdout.splitlines()[-1])
    heads, square = 4, context * context * SCORES_BYTES
    print(f"{(long - short) / 1e6:.0f} MB more than at 1,200 tokens; S x S: {heads * square / 1e6:.0f} MB")
    assert long - short < heads * square / 10
    assert check_trace(out)["groups"]["request"]["num_positions"] == 3


def test_a_killed_recording_is_a_valid_shorter_trace(tmp_path: Path) -> None:
    out = tmp_path / "killed.zarr"
    running = subprocess.Popen(_command(out, 600, 2_000, short=False), stdout=subprocess.DEVNULL)
    try:
        attributes, deadline = out / "request" / "zarr.json", time.monotonic() + 120
        while _steps_written(attributes) < 64:
            assert running.poll() is None, "the recording ended by itself"
            assert time.monotonic() < deadline, "nothing reached the disk"
            time.sleep(0.05)
    finally:
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
    positions = check_trace(out)["groups"]["request"]["num_positions"]
    assert positions % 64 == 0
    assert 64 <= positions < 2_000


def _steps_written(attributes: Path) -> int:
    try:
        return int(json.loads(attributes.read_text())["attributes"]["group"]["steps_written"])
    except (OSError, ValueError, KeyError):
        return 0
