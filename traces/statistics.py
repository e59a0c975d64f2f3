"""What a trace's attention is like: overlaps, churn and mass held, to compare traces and to check them by eye."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError
from traces.group import TraceGroup
from traces.schema import draft_distance


@dataclass(frozen=True, slots=True)
class AttentionStatistics:
    """Means over steps, recorded layers and KV heads, at K ranked blocks of P tokens.

    overlap: |predicted ∩ true| / K per predictor, over the steps that have the prediction: previous1, … (the ranking
    so many steps before), draft1, … (as many as recorded), and random (K of the selectable blocks, in expectation).
    mass_true, mass_exact: softmax mass on the top K and on the open block, which is always read.
    """

    block_size_tokens: int
    num_blocks: int
    overlap: dict[str, float]
    mass_true: float
    mass_exact: float


def attention_statistics(group: TraceGroup, block_size_tokens: int, num_blocks: int) -> AttentionStatistics:
    """Statistics at K = `num_blocks`. Raises InputError where K exceeds the recorded ranking or the context."""
    selectable = (group.kv_len - 1) // block_size_tokens
    limit = min(group.max_ranked_blocks(block_size_tokens), int(selectable.min()))
    if not 1 <= num_blocks <= limit:
        raise InputError(f"statistics at {num_blocks} blocks of {block_size_tokens}: 1 … {limit} are possible")
    true = _top(group, "true", block_size_tokens, num_blocks)
    names = [name for name in group.rankings(block_size_tokens) if draft_distance(name)]
    overlap = {f"previous{j}": _overlap(true[j:], true[:-j]) for j in range(1, max(1, len(names)) + 1)}
    for name in names:
        j = draft_distance(name)
        overlap[name] = _overlap(true[j:], _top(group, name, block_size_tokens, num_blocks)[j:])
    overlap["random"] = float(np.mean(num_blocks / selectable))
    dense = group.mass(block_size_tokens).dense()
    open_mass = np.take_along_axis(dense, np.broadcast_to(selectable[:, None, None, None], (*dense.shape[:3], 1)), -1)
    held = {}
    for name in ("true", "exact"):
        ids = _top(group, name, block_size_tokens, num_blocks)
        held[name] = float((np.take_along_axis(dense, ids, axis=-1).sum(axis=-1) + open_mass[..., 0]).mean())
    return AttentionStatistics(block_size_tokens, num_blocks, overlap, held["true"], held["exact"])


def _top(group: TraceGroup, name: str, size: int, count: int) -> NDArray[np.int32]:
    return group.ranking(name, size)[..., :count]


def _overlap(true: NDArray[np.int32], predicted: NDArray[np.int32]) -> float:
    """Mean share of true [S, L, H, K] that predicted holds."""
    width = int(max(true.max(), predicted.max())) + 1
    member = np.zeros((*true.shape[:3], width + 1), bool)
    np.put_along_axis(member, predicted.astype(np.int64) % (width + 1), True, axis=-1)
    member[..., width] = False
    return float(np.take_along_axis(member, true.astype(np.int64), axis=-1).mean())
