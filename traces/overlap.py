"""How well predicted block sets match true ones: a table by trace, layer, block size, K, predictor and distance.

python -m traces.overlap TRACE [TRACE ...] --out overlap.parquet
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from traces.catalog import resolve
from traces.errors import InputError
from traces.group import TraceGroup
from traces.reader import FileGroup, open_trace

DEFAULT_BUDGETS_TOKENS = (128, 256, 512, 1024)
"""K·P of the rows, where the trace ranks and the context holds so many."""
TOP_BLOCKS = 20
"""A row for the top 20 blocks as well, the count for which OasisKV publishes overlap."""
MAX_DISTANCE = 4
Sets = NDArray[np.int32]


def overlap_rows(group: TraceGroup, block_size_tokens: int, num_blocks: int) -> Iterator[dict[str, Any]]:
    """A row per recorded layer, predictor and distance at K = `num_blocks`.

    overlap: mean |predicted ∩ true| / K over steps and KV heads. recall: softmax mass on the predicted set, the open
    block and blocks that filled after the prediction, which are resident without a fetch (docs/decisions.md, 1);
    recall_true: on the true set and the open block. overlap_right, overlap_wrong: over the steps whose
    draft token was right or wrong (drafts only). accepted: share of right draft tokens. Predictors: previous (the
    true ranking `distance` steps before), draft, random (in expectation).
    """
    selectable = (group.kv_len - 1) // block_size_tokens
    if num_blocks > min(group.max_ranked_blocks(block_size_tokens), int(selectable.min())):
        raise InputError(f"{group.name}: {num_blocks} blocks of {block_size_tokens} are not ranked at every step")
    true = group.ranking("true", block_size_tokens)[..., :num_blocks]
    dense = group.mass(block_size_tokens).dense()
    steps = np.arange(len(selectable))
    open_mass = dense[steps, :, :, selectable]
    recorded = group.rankings(block_size_tokens)
    layers = group.layers(block_size_tokens)
    recall_true = _held(dense, true) + open_mass
    for distance in range(1, min(MAX_DISTANCE, len(steps) - 1) + 1):
        kinds = {"previous": true[:-distance]}
        if f"draft{distance}" in recorded:
            kinds["draft"] = group.ranking(f"draft{distance}", block_size_tokens)[distance:, ..., :num_blocks]
        right = None
        if isinstance(group, FileGroup) and "draft" in kinds:
            right = group.array(f"draft{distance}/accepted")[distance:].astype(bool)
        chance = num_blocks / selectable[distance:]
        always = open_mass[distance:] + _filled(dense, selectable, distance)
        for kind, predicted in kinds.items():
            shared = _overlap(true[distance:], predicted)
            recall = _held(dense[distance:], predicted) + always
            for index, layer in enumerate(layers):
                own = shared[:, index]
                row = {
                    "layer": layer,
                    "predictor": kind,
                    "distance": distance,
                    "overlap": float(own.mean()),
                    "recall": float(recall[:, index].mean()),
                    "recall_true": float(recall_true[distance:, index].mean()),
                    "accepted": None,
                    "overlap_right": None,
                    "overlap_wrong": None,
                }
                if kind == "draft" and right is not None:
                    row["accepted"] = float(right.mean())
                    row["overlap_right"] = float(own[right].mean()) if right.any() else None
                    row["overlap_wrong"] = float(own[~right].mean()) if not right.all() else None
                yield row
        for index, layer in enumerate(layers):
            rest = 1 - always[:, index]
            yield {
                "layer": layer,
                "predictor": "random",
                "distance": distance,
                "overlap": float(chance.mean()),
                "recall": float((always[:, index] + chance[:, None] * rest).mean()),
                "recall_true": float(recall_true[distance:, index].mean()),
                "accepted": None,
                "overlap_right": None,
                "overlap_wrong": None,
            }


def overlap_table(names: Sequence[str], budgets_tokens: Sequence[int] = DEFAULT_BUDGETS_TOKENS) -> pa.Table:
    """Rows of every group, block size and K that the traces hold."""
    rows: list[dict[str, Any]] = []
    for name in names:
        trace = open_trace(resolve(name))
        for group_name in trace.group_names:
            group = trace.group(group_name)
            for size in group.block_sizes:
                most = min(group.max_ranked_blocks(size), int((group.kv_len.min() - 1) // size))
                counts = [budget // size for budget in budgets_tokens]
                for count in sorted({c for c in (*counts, TOP_BLOCKS) if 1 <= c <= most}):
                    fixed = {
                        "trace": trace.attrs.name,
                        "group": group_name,
                        "context_tokens": int(group.kv_len[0]),
                        "steps": group.num_positions,
                        "drafter": _drafter(group),
                        "block_size_tokens": size,
                        "num_blocks": count,
                    }
                    rows += [fixed | row for row in overlap_rows(group, size, count)]
    return pa.Table.from_pylist(rows)


def _overlap(true: Sets, predicted: Sets) -> NDArray[np.float64]:
    """Share of true [S, L, H, K] in predicted, mean over heads: [S, L]."""
    width = int(max(true.max(), predicted.max())) + 1
    member = np.zeros((*true.shape[:3], width + 1), bool)
    np.put_along_axis(member, np.where(predicted < 0, width, predicted).astype(np.int64), True, axis=-1)
    member[..., width] = False
    found: NDArray[np.float64] = np.take_along_axis(member, true.astype(np.int64), axis=-1).mean(axis=(2, 3))
    return found


def _filled(dense: NDArray[np.float32], selectable: NDArray[np.integer], distance: int) -> NDArray[np.float64]:
    """Mass on the blocks that filled within the last `distance` steps, [S − distance, L, H]."""
    now, before = selectable[distance:], selectable[:-distance]
    block = np.arange(dense.shape[-1])
    new = (block >= before[:, None]) & (block < now[:, None])
    mass: NDArray[np.float64] = (dense[distance:] * new[:, None, None]).sum(axis=-1, dtype=np.float64)
    return mass


def _held(dense: NDArray[np.float32], ids: Sets) -> NDArray[np.float64]:
    """Mass on the blocks of ids, [S, L, H]."""
    mass = np.take_along_axis(dense, np.maximum(ids, 0).astype(np.int64), axis=-1)
    held: NDArray[np.float64] = np.where(ids >= 0, mass, 0).sum(axis=-1, dtype=np.float64)
    return held


def _drafter(group: TraceGroup) -> str | None:
    drafter = group.attributes.drafter if isinstance(group, FileGroup) else None
    return None if drafter is None else drafter.name


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    pq.write_table(overlap_table(given.traces), given.out)


if __name__ == "__main__":
    main()
