"""A small trace with the statistics that policies live on, and the command line as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from oasis_sim.cli import main
from traces.codec import rank_scores
from traces.mass import quantise_mass
from traces.pack import pack
from traces.schema import BlockSizeAttributes, DrafterAttributes, GroupAttributes, ModelGeometry, TraceAttributes
from traces.writer import StepRecord, TraceWriter

REPOSITORY = Path(__file__).resolve().parents[2]
CONTEXT_TOKENS, STEPS, DISTANCES = 1024, 48, 4
NUM_LAYERS, NUM_KV_HEADS = 4, 2
FINEST = 8
RANKINGS = ("true", *(f"draft{j}" for j in range(1, DISTANCES + 1)))
BLOCKS = {
    size: BlockSizeAttributes(
        layers=(0, 1, 2, 3) if size == 16 else (0, 3),
        max_ranked_blocks=256 // size,
        rankings=RANKINGS,
        block_mass=size in (8, 16),
    )
    for size in (8, 16, 32, 64)
}


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """stdout as strict JSON."""

        def refuse(constant: str) -> None:
            raise ValueError(f"{constant} is not JSON")

        return json.loads(self.out, parse_constant=refuse)


Oasis = Callable[..., Done]


@pytest.fixture(scope="session", autouse=True)
def _children_hear_ctrl_c() -> None:
    """A test run in the background of a script ignores SIGINT, and its child processes would too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One request of 1,024 tokens and 48 steps: a few blocks stay important, others come and go; drafts are noisy."""
    folder = tmp_path_factory.mktemp("trace") / "tiny.zarr"
    model = ModelGeometry(name="tiny", num_layers=NUM_LAYERS, num_query_heads=4, num_kv_heads=NUM_KV_HEADS, head_dim=16)
    with TraceWriter(folder, TraceAttributes(name="tiny", model=model)) as writer:
        group = writer.group(
            "reasoning",
            GroupAttributes(
                context_tokens=CONTEXT_TOKENS,
                steps_planned=STEPS,
                blocks=BLOCKS,
                drafter=DrafterAttributes(name="noisy", distances=DISTANCES),
            ),
        )
        for step in _steps():
            group.append(step)
    return pack(folder)


def _steps() -> Iterator[StepRecord]:
    rng = np.random.default_rng(7)
    shape = (NUM_LAYERS, NUM_KV_HEADS, (CONTEXT_TOKENS + STEPS) // FINEST + 1)
    popularity, drift = 2.0 * rng.standard_normal(shape), rng.standard_normal(shape)
    for t in range(STEPS):
        drift = 0.8 * drift + 0.6 * rng.standard_normal(shape)
        kv_len = CONTEXT_TOKENS + t
        scores = (popularity + drift)[..., : -(-kv_len // FINEST)]
        yield _record(kv_len, t, scores, rng)


def _record(kv_len: int, t: int, scores: NDArray[np.float64], rng: np.random.Generator) -> StepRecord:
    weight = np.exp2(scores)
    share = weight / weight.sum(axis=-1, keepdims=True)
    rankings, masses, rests = {}, {}, {}
    for size, block in BLOCKS.items():
        layers, starts = list(block.layers), np.arange(0, share.shape[-1], size // FINEST)
        mass = np.add.reduceat(share[layers], starts, axis=-1)
        best = np.maximum.reduceat(scores[layers], starts, axis=-1)
        for name in RANKINGS:
            j = int(name[5:]) if name.startswith("draft") else 0
            if j <= t:
                exists = -(-(kv_len - j) // size) - 1
                guess = best + 0.4 * j * rng.standard_normal(best.shape)
                rankings[size, name] = rank_scores(guess[..., :exists], block.max_ranked_blocks, 16)
        ids = rankings[size, "true"][0]
        inside = np.where(ids >= 0, np.take_along_axis(mass, np.maximum(ids, 0), axis=-1), 0).sum(axis=-1)
        masses[size], rests[size] = quantise_mass(mass), (1 - inside).astype(np.float32)
    return StepRecord(kv_len, t, rankings, masses, rests, tuple(t if t % 2 else None for _ in range(DISTANCES)))


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def environment(cache_folder: Path) -> dict[str, str]:
    """Of a user's shell, with this checkout's packages and a cache of the tests' own."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OASIS_SIM_CACHE": str(cache_folder), "COLUMNS": "100"}


@pytest.fixture
def oasis_process(tmp_path: Path, environment: dict[str, str]) -> Oasis:
    """`oasis-sim ARGS` in a process of its own, in an empty folder."""

    def run(*arguments: str) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "oasis_sim", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def oasis(
    tmp_path: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Oasis:
    """The same from the entry point on in this process, which saves a second of imports per call."""
    monkeypatch.chdir(tmp_path)
    for name in ("OASIS_SIM_CACHE", "COLUMNS"):
        monkeypatch.setenv(name, environment[name])

    def run(*arguments: str) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Done(ended.value.code, printed.out, printed.err)

    return run
