"""Speed of replay, in block ids per second of CPU time on one core; `pytest -m bench`.

An id is one entry of a ranking that the policy reads: S · L · H · K for the selector's ranking, and as many again for
the predictor's where that is another array. Rows are counted once, although a lookahead policy passes twice over the
predictor's (to plan, and to compare with the true set).
"""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from simulator.mapping import Mapping
from simulator.predictors import predicted_ranking, selector_ranking
from simulator.replay import miss_arrays, replay, replayed_heads, run_kernel
from simulator.replay_settings import blocks_per_step, resolve_settings
from simulator.specs.policy import PolicySpec
from traces.memory import MemoryGroup, memory_group

pytestmark = [pytest.mark.bench, pytest.mark.benchmark(timer=time.process_time)]
NUM_STEPS, NUM_LAYERS, NUM_HEADS, NUM_RANKED, NUM_KEPT = 128, 30, 3, 128, 64
POLICIES = {
    "on demand": {"predictor": "current", "miss_rule": "stall"},
    "previous": {"predictor": "previous"},
    "draft": {"predictor": "draft"},
    "draft, cap 0.05": {"predictor": "draft", "fetch_cap": 0.05},
    "draft, cap 0.05 by request": {"predictor": "draft", "fetch_cap": 0.05, "fetch_cap_scope": "request"},
    "draft, lowest score": {"predictor": "draft", "fetch_cap": 0.05, "eviction": "lowest-score"},
}


@pytest.fixture(scope="module")
def group() -> MemoryGroup:
    """SmolLM2's geometry at 4K tokens, one block in twenty changing a step."""
    rng = np.random.default_rng(0)
    kv_len = 4096 + np.arange(NUM_STEPS)
    num_blocks = -(-kv_len // 16)
    shape = (NUM_STEPS, NUM_LAYERS, NUM_HEADS, int(num_blocks.max()))
    score = rng.pareto(1.5, size=shape[1:]) * np.exp(0.12 * np.cumsum(rng.normal(size=shape), axis=0))
    hidden = np.arange(shape[-1]) >= (num_blocks - 1)[:, None, None, None]

    def rank(values: np.ndarray) -> np.ndarray:
        return np.argsort(np.where(hidden, np.inf, -values), axis=-1)[..., :NUM_RANKED].astype(np.int32)

    draft = rank(score * np.exp(0.1 * rng.normal(size=shape)))
    mass = score / score.sum(axis=-1, keepdims=True)
    return memory_group(kv_len, {16: {"true": rank(score), "draft1": draft}}, {16: mass})


def policy(name: str) -> PolicySpec:
    return PolicySpec(kv_budget_tokens=16 * NUM_KEPT, **POLICIES[name])


MAPPING = Mapping(
    "identity", np.arange(NUM_LAYERS, dtype=np.int32), np.arange(NUM_HEADS, dtype=np.int32), "the trace's own geometry"
)


def num_ids(name: str) -> int:
    return NUM_STEPS * NUM_LAYERS * NUM_HEADS * NUM_KEPT * (2 if "draft" in name else 1)


@pytest.mark.parametrize("name", POLICIES)
def test_kernel(benchmark, group: MemoryGroup, name: str) -> None:
    """The compiled loop alone, arrays in memory."""
    settings, num_blocks = resolve_settings(group, policy(name)), blocks_per_step(group, 16)
    heads = replayed_heads(MAPPING, settings.fetch_cap_scope)
    true, levels = selector_ranking(group, settings, num_blocks), group.mass(16).levels
    predicted = predicted_ranking(group, settings, num_blocks, true, 0)
    given = (settings, num_blocks, true, predicted, levels, heads, miss_arrays(group, settings))
    benchmark.pedantic(run_kernel, given, rounds=15, warmup_rounds=2)
    report(benchmark, name)


@pytest.mark.parametrize("name", POLICIES)
def test_replay(benchmark, group: MemoryGroup, name: str) -> None:
    """Everything from policy to demand, without the cache."""
    run = {"use_cache": False}
    benchmark.pedantic(replay, (group, policy(name), MAPPING), run, rounds=15, warmup_rounds=2)
    report(benchmark, name)


def test_replay_from_the_cache(benchmark, group: MemoryGroup, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OASIS_SIM_CACHE", str(tmp_path))
    assert len(group.content_hash) == 64, "hashed before the clock starts"
    benchmark.pedantic(replay, (group, policy("draft"), MAPPING), rounds=15, warmup_rounds=1)
    assert benchmark.stats.stats.min < 0.02, "seconds"


@pytest.mark.parametrize("start", ["cold", "cached"])
def test_start_of_the_kernel(benchmark, tmp_path, monkeypatch, start: str) -> None:
    """CPU time to the first result in a fresh process, compiled or loaded from numba's cache; imports not counted."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    code = """
import time, numpy as np
from simulator import residency_kernel as kernel
from traces.memory import memory_group
from simulator.mapping import Mapping
from simulator.replay import replay
from simulator.specs.policy import PolicySpec
ids = np.broadcast_to(np.arange(8, dtype=np.int32), (9, 1, 1, 8))
group = memory_group(np.full(9, 160), {16: {"true": ids}}, {16: np.ones((9, 1, 1, 10))})
one = Mapping("identity", np.zeros(1, np.int32), np.zeros(1, np.int32), "")
begin = time.process_time()
replay(group, PolicySpec(kv_budget_tokens=64, predictor="previous"), one, use_cache=False)
print(time.process_time() - begin)
"""
    if start == "cached":
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    took = benchmark.pedantic(
        lambda: float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout), rounds=1
    )
    benchmark.extra_info["first_replay_cpu_s"] = round(took, 3)
    assert took < (20 if start == "cold" else 1)


def report(benchmark, name: str) -> None:
    seconds = benchmark.stats.stats.min
    benchmark.extra_info["million_ids_per_s"] = round(num_ids(name) / seconds / 1e6, 1)
