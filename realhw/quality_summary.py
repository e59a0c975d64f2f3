"""From a row per policy, prompt and step to a row per policy, with bootstrap intervals over prompts."""

from __future__ import annotations

from collections.abc import Callable
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
CONFIDENCE = 0.95
Means = dict[str, NDArray[np.float64]]

METRICS: dict[str, Callable[[Means], NDArray[np.float64]]] = {
    "kl": lambda m: m["kl"],
    "nll_difference": lambda m: m["nll"] - m["nll_dense"],
    "perplexity_ratio": lambda m: np.exp(m["nll"] - m["nll_dense"]),
    "agreement": lambda m: m["agrees"],
    "recall": lambda m: m["recall"],
    "hit_rate": lambda m: m["hit_rate"],
    "h2d_bytes_per_token": lambda m: m["h2d_bytes"],
}
"""Per policy, of the means over steps. kl: nats per token, dense to sparse; nll: of the dense model's greedy tokens."""


def bootstrap_interval(
    sums: Means, counts: NDArray[np.float64], metric: Callable[[Means], NDArray[np.float64]], draws: NDArray[np.int64]
) -> tuple[float, float, float]:
    """(estimate, low, high) of a metric of means over all steps, resampling whole prompts.

    sums: per column [prompts]; counts [prompts]; draws [samples, prompts], indices of the prompts of each resample.
    """
    total = counts.sum()
    estimate = metric({name: np.atleast_1d(values.sum() / total) for name, values in sums.items()})[0]
    means = {name: values[draws].sum(axis=1) / counts[draws].sum(axis=1) for name, values in sums.items()}
    low, high = np.quantile(metric(means), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(estimate), float(low), float(high)


def summarise(steps: pa.Table, samples: int, seed: int, min_dense_exact_match: float) -> pa.Table:
    """A row per policy: each metric with `_low` and `_high` (95 % interval over prompts), in first-seen order.

    `exact_match`: share of prompts on which the policy's greedy choice equals dense decode's at every step, of those
    whose dense decode holds the answer, relative to all prompts with an answer: a lower bound, null where dense finds
    fewer than `min_dense_exact_match` of them.
    """
    data = {name: steps[name].to_numpy(zero_copy_only=False) for name in steps.column_names}
    prompts, prompt_of = np.unique(data["prompt"], return_inverse=True)
    keys = list(zip(*(data[name] for name in KEYS), strict=True))
    policies = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    policy_of = np.array([policies[key] for key in keys])
    cell = policy_of * len(prompts) + prompt_of
    size = len(policies) * len(prompts)
    shape = (len(policies), len(prompts))
    counts = np.bincount(cell, minlength=size).reshape(shape).astype(float)
    names = ("kl", "nll", "nll_dense", "agrees", "recall", "hit_rate", "h2d_bytes")
    sums = {name: np.bincount(cell, weights=data[name].astype(float), minlength=size).reshape(shape) for name in names}
    draws = np.random.default_rng(seed).integers(len(prompts), size=(samples, len(prompts)))
    found = _dense_found(data, prompt_of, len(prompts))
    rows: list[dict[str, Any]] = []
    for key, index in policies.items():
        row: dict[str, Any] = dict(zip(KEYS, (_plain(value) for value in key), strict=True))
        for metric, function in METRICS.items():
            own = {name: values[index] for name, values in sums.items()}
            estimate, low, high = bootstrap_interval(own, counts[index], function, draws)
            row |= {metric: estimate, f"{metric}_low": low, f"{metric}_high": high}
        whole = sums["agrees"][index] == counts[index]
        asked = [i for i, value in enumerate(found) if value is not None]
        dense_share = float(np.mean([bool(found[i]) for i in asked])) if asked else None
        reported = dense_share is not None and dense_share >= min_dense_exact_match
        row["exact_match_dense"] = dense_share
        row["exact_match"] = float(np.mean([bool(found[i]) and bool(whole[i]) for i in asked])) if reported else None
        row |= {"num_prompts": len(prompts), "num_steps": int(counts[index].sum())}
        rows.append(row)
    return pa.Table.from_pylist(rows)


def _dense_found(data: dict[str, Any], prompt_of: NDArray[np.int64], count: int) -> list[bool | None]:
    found: list[bool | None] = [None] * count
    for prompt, value in zip(prompt_of, data["dense_found_answer"], strict=True):
        found[prompt] = None if value is None else bool(value)
    return found


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
