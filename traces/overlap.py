"""How well predicted block sets match true ones: a table by trace, layer, KV head, block size, K and distance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from traces.catalog import resolve
from traces.errors import InputError
from traces.file_group import FileGroup
from traces.group import TraceGroup
from traces.predicted import Bools, Prediction, guesses, held, members, predictions, set_is_exact, windows
from traces.reader import open_trace
from traces.schema import MAX_DRAFT_DISTANCE

GROUP_SCHEMA = pa.schema(
    [("trace", pa.string()), ("task", pa.string()), ("model", pa.string()), ("drafter", pa.string())]
    + [(name, pa.int32()) for name in ("context_tokens", "block_size_tokens", "num_blocks")]
)
"""Columns that say which sets a row is about; task is the name of the trace's group."""
SCHEMA = pa.schema(
    [
        *GROUP_SCHEMA,
        ("layer", pa.int32()), ("kv_head", pa.int32()), ("selector", pa.string()), ("predictor", pa.string()),
        ("distance", pa.int32()), ("guess", pa.string()), ("steps", pa.int32()), ("overlap", pa.float32()),
        ("recall", pa.float32()), ("recall_true", pa.float32()), ("agreement", pa.float32()),
        ("set_is_exact", pa.bool_()),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Grid:
    """Which sets are compared, where a trace holds them.

    budgets_tokens: K·P. top_blocks: K besides, at every block size; 20 is the count for which OasisKV publishes
    overlap. block_sizes_tokens: null for all recorded. max_distance: of drafts and of the previous step.
    """

    budgets_tokens: tuple[int, ...] = (256, 512, 1024)
    top_blocks: int | None = 20
    block_sizes_tokens: tuple[int, ...] | None = None
    max_distance: int = 4

    def __post_init__(self) -> None:
        if any(budget < 1 for budget in (*self.budgets_tokens, self.top_blocks or 1)):
            raise InputError(f"budgets and top blocks must be positive, got {self.budgets_tokens}, {self.top_blocks}")
        if not 1 <= self.max_distance <= MAX_DRAFT_DISTANCE:
            raise InputError(f"max_distance {self.max_distance}: 1 … {MAX_DRAFT_DISTANCE} are possible")

    def with_budget(self, budget_tokens: int) -> Grid:
        """The same at one budget alone."""
        return replace(self, budgets_tokens=(budget_tokens,), top_blocks=None)

    def block_counts(self, group: TraceGroup, block_size_tokens: int) -> list[int]:
        """K at a block size, ascending: those that are ranked at every step."""
        if self.block_sizes_tokens is not None and block_size_tokens not in self.block_sizes_tokens:
            return []
        asked = {budget // block_size_tokens for budget in self.budgets_tokens} | {self.top_blocks or 0}
        return sorted(count for count in asked if 1 <= count <= most_blocks(group, block_size_tokens))


def most_blocks(group: TraceGroup, block_size_tokens: int) -> int:
    """Largest K that is ranked at every step."""
    selectable = int((group.kv_len.min() - 1) // block_size_tokens)
    return min(group.max_ranked_blocks(block_size_tokens), selectable)


def group_columns(
    trace: str, group: TraceGroup, block_size_tokens: int, num_blocks: int
) -> dict[str, str | int | None]:
    """Values of `GROUP_SCHEMA`."""
    drafter = group.attributes.drafter if isinstance(group, FileGroup) else None
    return {
        "trace": trace,
        "task": group.name,
        "model": group.model.name,
        "drafter": None if drafter is None else drafter.name,
        "context_tokens": int(group.kv_len[0]),
        "block_size_tokens": block_size_tokens,
        "num_blocks": num_blocks,
    }


def open_groups(names: Sequence[str]) -> Iterator[tuple[str, TraceGroup]]:
    """(name, group) of every request of traces by name, path or URL, one in memory at a time. The name is the trace's,
    with the request's behind it where there are several."""
    seen: dict[str, str] = {}
    for name in names:
        own = open_trace(resolve(name)).attrs.name
        if own in seen:
            raise InputError(f"traces {seen[own]!r} and {name!r} are both named {own!r}: a table would mix them")
        seen[own] = name
    for own, name in seen.items():
        groups = open_trace(resolve(name)).group_names
        for group in groups:
            yield own if len(groups) == 1 else f"{own}/{group}", open_trace(resolve(name)).group(group)


def write_rows(
    names: Sequence[str],
    path: Path,
    schema: pa.Schema,
    grid: Grid,
    rows_of: Callable[[TraceGroup, int, int], Iterable[dict[str, Any]]],
) -> int:
    """Rows of every group of the traces, block size and K of the grid to a parquet file; their number.

    rows_of: group, tokens per block, K → rows of one block size, without the columns of `GROUP_SCHEMA`.
    """
    number = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for trace, group in open_groups(names):
            for size in group.block_sizes:
                for count in grid.block_counts(group, size):
                    fixed = group_columns(trace, group, size, count)
                    rows = [fixed | row for row in rows_of(group, size, count)]
                    writer.write_table(pa.Table.from_pylist(rows, schema))
                    number += len(rows)
    return number


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prediction against the true sets of one layer, per step and head, [S − distance, H]; rows from `distance` on.

    overlap: |predicted ∩ true| / K. recall: softmax mass on the predicted set, the open block and blocks that filled
    since; recall_true: on the true set and the open block. Both null where not every block's mass was recorded.
    """

    overlap: NDArray[np.float64]
    recall: NDArray[np.float64] | None
    recall_true: NDArray[np.float64] | None


def compare(
    group: TraceGroup, block_size_tokens: int, num_blocks: int, index: int, prediction: Prediction
) -> Comparison:
    """One layer (by index among the recorded) at K = `num_blocks`."""
    overlap, recall, recall_true = [], [], []
    for window in windows(group, block_size_tokens, num_blocks, index, prediction):
        overlap.append((window.true & window.predicted).sum(axis=-1) / num_blocks)
        if window.mass is not None:
            recall.append(held(window.mass, window.predicted | window.open | window.filled))
            recall_true.append(held(window.mass, window.true | window.open))
    return Comparison(
        np.concatenate(overlap),
        np.concatenate(recall) if recall else None,
        np.concatenate(recall_true) if recall_true else None,
    )


def expect_random(group: TraceGroup, block_size_tokens: int, num_blocks: int, index: int, distance: int) -> Comparison:
    """The same in expectation over K blocks drawn from those selectable when the prediction is made."""
    selectable = (group.kv_len - 1) // block_size_tokens
    overlap, recall, recall_true = [], [], []
    prediction = Prediction("random", "minmax", distance, "true", distance)
    for window in windows(group, block_size_tokens, num_blocks, index, prediction):
        chance = num_blocks / selectable[window.start - distance : window.stop - distance, None]
        overlap.append(chance * (window.true & ~window.filled).sum(axis=-1) / num_blocks)
        if window.mass is not None:
            always = held(window.mass, np.broadcast_to(window.open | window.filled, window.mass.shape))
            recall.append(always + chance * (1 - always))
            recall_true.append(held(window.mass, window.true | window.open))
    return Comparison(
        np.concatenate(overlap),
        np.concatenate(recall) if recall else None,
        np.concatenate(recall_true) if recall_true else None,
    )


def overlap_rows(
    group: TraceGroup, block_size_tokens: int, num_blocks: int, max_distance: int = 4
) -> Iterator[dict[str, Any]]:
    """A row per recorded layer, KV head, prediction and kind of guess at K = `num_blocks`; means over `steps`.

    predictor: previous (the true set `distance` steps before), draft, draft_sparse, random (in expectation). guess:
    all steps, or those for which the drafter named the right token, a wrong one or none at that distance; previous is
    split alike, to be compared on the same steps. agreement: of draft_sparse, share of the dense draft's set in it.
    set_is_exact: False where a compact copy keeps no set of K of these drafts. Raises InputError for a K that is not
    ranked at every step.
    """
    if not 1 <= num_blocks <= most_blocks(group, block_size_tokens):
        raise InputError(f"{group.name}: {num_blocks} blocks of {block_size_tokens} are not ranked at every step")
    kinds = {distance: guesses(group, distance) for distance in range(1, max_distance + 1)}
    for index, layer in enumerate(group.layers(block_size_tokens)):
        for prediction in predictions(group, block_size_tokens, max_distance):
            found = compare(group, block_size_tokens, num_blocks, index, prediction)
            fixed = {
                "layer": layer,
                "selector": prediction.selector,
                "predictor": prediction.predictor,
                "distance": prediction.distance,
                "set_is_exact": set_is_exact(group, block_size_tokens, prediction.ranking, num_blocks),
            }
            agreement = None
            if prediction.predictor == "draft_sparse":
                agreement = _agreement(group, block_size_tokens, num_blocks, index, prediction.distance)
            yield from _rows(group, fixed, found, kinds[prediction.distance], prediction.distance, agreement)
        for distance in range(1, min(max_distance, group.num_positions - 1) + 1):
            found = expect_random(group, block_size_tokens, num_blocks, index, distance)
            fixed = {"layer": layer, "selector": "minmax", "predictor": "random", "set_is_exact": True}
            yield from _rows(group, fixed | {"distance": distance}, found, {}, distance, None)


def write_overlap(names: Sequence[str], path: Path, grid: Grid) -> int:
    """Rows of every group, block size and K of the traces to a parquet file, a block size at a time; their number.

    Raises InputError where the traces hold none of the grid's sets.
    """
    number = write_rows(
        names, path, SCHEMA, grid, lambda group, size, count: overlap_rows(group, size, count, grid.max_distance)
    )
    if not number:
        raise InputError(
            f"{', '.join(names)}: none ranks a budget of {grid.budgets_tokens} at the block sizes asked for"
        )
    return number


def _rows(
    group: TraceGroup,
    fixed: Mapping[str, Any],
    found: Comparison,
    kinds: Mapping[Any, Bools],
    distance: int,
    agreement: NDArray[np.float64] | None,
) -> Iterator[dict[str, Any]]:
    every = np.ones(group.num_positions, bool)
    columns = {
        "overlap": found.overlap, "recall": found.recall, "recall_true": found.recall_true, "agreement": agreement
    }  # fmt: skip
    for guess, chosen in {"all": every, **kinds}.items():
        rows = chosen[distance:]
        if not rows.any():
            continue
        means = {key: None if value is None else value[rows].mean(axis=0) for key, value in columns.items()}
        for at, head in enumerate(recorded_heads(group)):
            values = {key: None if value is None else float(value[at]) for key, value in means.items()}
            yield {**fixed, "kv_head": head, "guess": guess, "steps": int(rows.sum()), **values}


def recorded_heads(group: TraceGroup) -> tuple[int, ...]:
    """KV heads of the model that the group holds."""
    chosen = group.attributes.kv_heads if isinstance(group, FileGroup) else None
    return tuple(range(group.num_kv_heads)) if chosen is None else chosen


def _agreement(
    group: TraceGroup, block_size_tokens: int, num_blocks: int, index: int, distance: int
) -> NDArray[np.float64] | None:
    """|dense ∩ sparse| / K of the two draft passes, [S − distance, H]; null without the dense one."""
    recorded = group.rankings(block_size_tokens)
    if f"draft{distance}" not in recorded:
        return None
    width = int((group.kv_len[-1] - 1) // block_size_tokens) + 1
    both = [
        members(group.ranking(name, block_size_tokens)[distance:, index, :, :num_blocks], width)
        for name in (f"draft{distance}", f"draft{distance}_sparse")
    ]
    shared: NDArray[np.float64] = (both[0] & both[1]).sum(axis=-1) / num_blocks
    return shared
