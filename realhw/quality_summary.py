"""From a row per policy and prompt to a row per policy and task, with bootstrap intervals over prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

KEYS = (
    "predictor",
    "policy.kv_budget_tokens",
    "policy.block_size_tokens",
    "policy.fetch_cap",
    "policy.lookahead_k",
)
DENSE, ALL_TASKS = "dense", "all"
CONFIDENCE = 0.95
Means = dict[str, NDArray[np.float64]]
Metric = Callable[[Means], NDArray[np.float64]]

METRICS: dict[str, Metric] = {
    "kl": lambda m: m["kl"],
    "nll_difference": lambda m: m["nll"] - m["nll_dense"],
    "perplexity_ratio": lambda m: np.exp(m["nll"] - m["nll_dense"]),
    "agreement": lambda m: m["agrees"],
    "recall": lambda m: m["recall"],
    "hit_rate": lambda m: m["hit_rate"],
    "h2d_bytes_per_token": lambda m: m["h2d_bytes"],
}
"""Of means over prompts and steps. kl: nats per token, dense to sparse; nll: of the dense model's greedy tokens."""


MEANS = ("kl", "nll", "nll_dense", "agrees", "recall", "hit_rate", "h2d_bytes")


def bootstrap_intervals(
    sums: Means, counts: NDArray[np.float64], metrics: dict[str, Metric], drawn: NDArray[np.float64]
) -> dict[str, Any]:
    """Each metric of means over all steps with `_low` and `_high`, resampling whole prompts.

    sums: per column [prompts]; counts [prompts]; drawn [samples, prompts], how often a resample holds each prompt.
    """
    whole = {name: np.atleast_1d(values.sum() / counts.sum()) for name, values in sums.items()}
    resampled = {name: (drawn @ values) / (drawn @ counts) for name, values in sums.items()}
    out: dict[str, Any] = {}
    for name, metric in metrics.items():
        low, high = np.quantile(metric(resampled), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        out |= {name: float(metric(whole)[0]), f"{name}_low": float(low), f"{name}_high": float(high)}
    return out


@cache
def resamples(num_prompts: int, samples: int, seed: int) -> NDArray[np.float64]:
    """How often each prompt is in each of `samples` draws of as many prompts, with replacement."""
    share = np.full(num_prompts, 1 / num_prompts)
    return np.random.default_rng(seed).multinomial(num_prompts, share, size=samples).astype(float)


def summarise(
    prompts: pa.Table, answers: pa.Table | None, samples: int, seed: int, min_dense_exact_match: float
) -> pa.Table:
    """A row per policy and task (`all`: every prompt): each metric with `_low` and `_high`, a 95 % interval over
    prompts.

    prompts: means per policy and prompt (`KEYS`, prompt, task, num_steps and what `METRICS` read). answers: `found` per
    policy and prompt, and of dense decode. `exact_match` is null where dense finds fewer than `min_dense_exact_match`.
    """
    frame = _columns(prompts)
    found = None if answers is None else _columns(answers)
    dense = {} if answers is None else dense_shares(answers)
    rows: list[dict[str, Any]] = []
    for task in [ALL_TASKS, *dict.fromkeys(str(t) for t in frame["task"] if t != ALL_TASKS)]:
        chosen = frame if task == ALL_TASKS else {name: v[frame["task"] == task] for name, v in frame.items()}
        share = dense.get(task)
        right: dict[tuple[Any, ...], NDArray[np.bool_]] = {}
        if found is not None and share is not None and share >= min_dense_exact_match:
            own = {name: values[found["task"] == task] for name, values in found.items()}
            right = {key: own["found"][index] for key, index in _by_policy(own).items()}
        for key, index in _by_policy(chosen).items():
            counts = chosen["num_steps"][index].astype(float)
            sums = {name: chosen[name][index].astype(float) * counts for name in MEANS}
            row: dict[str, Any] = {**dict(zip(KEYS, key, strict=True)), "task": task}
            row |= bootstrap_intervals(sums, counts, METRICS, resamples(len(index), samples, seed))
            row["exact_match_dense"] = share
            row |= _exact_match(right.get(key), samples, seed)
            row |= {"num_prompts": len(index), "num_steps": int(counts.sum())}
            rows.append(row)
    return pa.Table.from_pylist(rows)


def dense_shares(answers: pa.Table) -> dict[str, float]:
    """Share of the prompts of each task whose answer dense decode finds."""
    frame = _columns(answers)
    dense = frame["predictor"] == DENSE
    tasks = dict.fromkeys(frame["task"][dense].tolist())
    return {task: float(frame["found"][dense & (frame["task"] == task)].mean()) for task in tasks}


def _exact_match(right: NDArray[np.bool_] | None, samples: int, seed: int) -> dict[str, Any]:
    if right is None:
        return {"exact_match": None, "exact_match_low": None, "exact_match_high": None, "num_answers": 0}
    count = len(right)
    metrics: dict[str, Metric] = {"exact_match": lambda m: m["right"]}
    sums, drawn = {"right": right.astype(float)}, resamples(count, samples, seed)
    return bootstrap_intervals(sums, np.ones(count), metrics, drawn) | {"num_answers": count}


def _columns(table: pa.Table) -> dict[str, NDArray[Any]]:
    return {name: np.array(table[name].to_pylist()) for name in table.column_names}


def _by_policy(frame: dict[str, NDArray[Any]]) -> dict[tuple[Any, ...], list[int]]:
    """Row numbers of each policy, in first-seen order."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for index, key in enumerate(zip(*(frame[name].tolist() for name in KEYS), strict=True)):
        found.setdefault(key, []).append(index)
    return found
