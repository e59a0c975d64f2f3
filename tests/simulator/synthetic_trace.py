"""A small made-up trace in memory: sticky block scores, a heavy sink, noisy drafts. Not a recording of any model."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from simulator import experiment as experiments
from simulator.draft_pass import residency_rules
from simulator.specs.experiment import ExperimentSpec
from simulator.specs.policy import PolicySpec
from traces.memory import MemoryGroup, memory_group, memory_trace
from traces.reader import Trace
from traces.schema import ModelGeometry

GEOMETRY = ModelGeometry(name="SmolLM2-135M", num_layers=30, num_query_heads=9, num_kv_heads=3, head_dim=64)
LAYERS = {16: (0, 10, 20, 29), 32: (0, 29)}
"""Recorded layers by block size; block size 32 lacks two, as a compact recording would."""
ACCEPTANCE = (0.6, 0.4, 0.3, 0.2)
"""Share of right drafts by distance."""


SPARSE_POLICY = PolicySpec(residency="slack", fetch_cap=0.05, kv_budget_tokens=512)
"""Under which `draft1_sparse` counts as recorded, at blocks of 16."""


def synthetic_group(name: str, context: int, num_steps: int = 48, seed: int = 0) -> MemoryGroup:
    rng = np.random.default_rng(seed)
    kv_len = context + np.arange(num_steps)
    sizes = tuple(LAYERS)
    finest = -(-int(kv_len.max()) // sizes[0])
    heads = GEOMETRY.num_kv_heads
    popular = 1.5 * rng.gumbel(size=(len(LAYERS[16]), heads, finest))
    drift = rng.normal(size=popular.shape)
    scores = np.empty((num_steps, *popular.shape))
    for t in range(num_steps):
        drift = 0.9 * drift + 0.43 * rng.normal(size=drift.shape)
        scores[t] = popular + drift
    scores[..., 0] += 6.0
    rankings, masses = {}, {}
    cosines, prompt = {}, {}
    for size in sizes:
        here = [LAYERS[sizes[0]].index(layer) for layer in LAYERS[size]]
        merged = _merge(scores[:, here], size // sizes[0])
        selectable = (kv_len - 1) // size
        rankings[size] = {"true": _rank(merged, selectable, 1024 // size)}
        for distance in (1, 2, 3, 4):
            noisy = merged + 0.2 * distance * rng.normal(size=merged.shape)
            known = np.concatenate([np.zeros(distance, dtype=np.int64), selectable[:-distance]])
            rankings[size][f"draft{distance}"] = _rank(noisy, known, 1024 // size)
        offset = 0.5 * np.random.default_rng(seed + 1).normal(size=merged.shape)
        rankings[size]["draft1_sparse"] = _rank(merged + offset, np.append(0, selectable[:-1]), 1024 // size)
        rankings[size]["mean"] = _rank(merged + 0.1 * rng.normal(size=merged.shape), selectable, 1024 // size)
        early = _rank(merged + 0.3 * rng.normal(size=merged.shape), selectable, 1024 // size)
        early[:, 0] = -1
        rankings[size]["prev_layer"] = early
        cosines[size] = rng.uniform(0.6, 1.0, merged.shape[:3])
        prompt[size] = np.exp(
            merged[0, ..., : -(-context // size)] + rng.normal(size=(*merged.shape[1:3], -(-context // size)))
        )
        exists = np.arange(merged.shape[-1]) <= selectable[:, None, None, None]
        mass = np.exp(merged) * exists
        masses[size] = mass / mass.sum(axis=-1, keepdims=True)
    accepted = [rng.random(num_steps) < share for share in ACCEPTANCE]
    return memory_group(
        kv_len, rankings, masses, query_cos=cosines, prefill_mass=prompt, prompt_window_mass=prompt,
        accepted=accepted, sparse_policy=residency_rules(SPARSE_POLICY), name=name, layers=LAYERS, model=GEOMETRY,
    )  # fmt: skip


@lru_cache(maxsize=1)
def synthetic_trace() -> Trace:
    """Two requests, `short` (2,048 tokens) and `long` (4,096)."""
    return memory_trace([synthetic_group("short", 2048), synthetic_group("long", 4096, seed=1)], "synthetic")


def open_as_any(monkeypatch: pytest.MonkeyPatch, trace: Trace) -> None:
    """Let experiments open `trace`, whichever they name."""
    monkeypatch.setattr(experiments, "_open", lambda location: trace)
    monkeypatch.setattr(experiments, "resolve_trace", lambda name: name)


def synthetic_point(**settings: Any) -> ExperimentSpec:
    """One point on the request `long`; `workload__batch_size` stands for the key `workload.batch_size`."""
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    (only,) = experiments.expand({"trace": "synthetic", "trace_group": "long", **dotted}, {})
    return only


def _merge(scores: np.ndarray, factor: int) -> np.ndarray:
    blocks = -(-scores.shape[-1] // factor)
    padded = np.full((*scores.shape[:-1], blocks * factor), -np.inf)
    padded[..., : scores.shape[-1]] = scores
    return padded.reshape(*scores.shape[:-1], blocks, factor).max(axis=-1)


def _rank(scores: np.ndarray, selectable: np.ndarray, num_ranked: int) -> np.ndarray:
    allowed = np.arange(scores.shape[-1]) < selectable[:, None, None, None]
    ids = np.argsort(np.where(allowed, -scores, np.inf), axis=-1, kind="stable")[..., :num_ranked]
    return np.where(np.take_along_axis(np.broadcast_to(allowed, scores.shape), ids, -1), ids, -1).astype(np.int32)
