"""Where predictions miss: which needed blocks, by place in the context, by how they came to be needed, by churn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from traces.errors import InputError
from traces.group import TraceGroup
from traces.overlap import GROUP_SCHEMA, Grid, most_blocks, write_rows
from traces.predicted import Bools, Prediction, Window, guesses, held, members, predictions, set_is_exact, windows

AGE_BOUNDS_TOKENS = (64, 256, 1024, 4096)
"""A block's age: tokens newer than its last. Bins by powers of four."""
CHURN_BOUNDS = (0.05, 0.1, 0.2, 0.4)
"""Share of the true set that was not in it when the prediction was made."""
HISTORY_STEPS = 64
"""A block that was needed within so many steps before the prediction has come back; else it is new."""
CHANGES = ("stayed", "returned", "new")
SCHEMA = pa.schema(
    [
        *GROUP_SCHEMA,
        ("layer", pa.int32()), ("predictor", pa.string()), ("distance", pa.int32()), ("guess", pa.string()),
        ("by", pa.string()), ("bin", pa.string()), ("order", pa.int32()), ("row_share", pa.float32()),
        ("true_blocks", pa.float32()), ("missed_blocks", pa.float32()), ("true_mass", pa.float32()),
        ("missed_mass", pa.float32()), ("set_is_exact", pa.bool_()),
    ]
)  # fmt: skip


def age_bins() -> tuple[str, ...]:
    """Names of the places, the first block first, then by age."""
    bounds = (0, *AGE_BOUNDS_TOKENS)
    names = [f"{low:,} to {high:,}" for low, high in itertools.pairwise(bounds)]
    return ("first block", *names, f"{bounds[-1]:,} and more")


def churn_bins() -> tuple[str, ...]:
    bounds = (0.0, *CHURN_BOUNDS)
    names = [f"{100 * low:g} to {100 * high:g} %" for low, high in itertools.pairwise(bounds)]
    return (*names, f"{100 * bounds[-1]:g} % and more")


def miss_rows(
    group: TraceGroup, block_size_tokens: int, num_blocks: int, max_distance: int = 4
) -> Iterator[dict[str, Any]]:
    """Rows per recorded layer, prediction, kind of guess and bin at K = `num_blocks`.

    Of each bin: true_blocks and missed_blocks, and the softmax mass on them (null where not every block's was
    recorded), per step and KV head: over the bins of one `by` they add up to what a step needs and misses. A needed
    block that filled since the prediction is resident and in no bin. by: place (the context's first block, else age);
    change (stayed: needed by the step that predicted; returned: not by it, but within `HISTORY_STEPS` before it;
    new: neither); churn (of the step's whole set since the prediction; row_share is the share of steps and heads in
    the bin, null elsewhere). Raises InputError for a K that is not ranked at every step.
    """
    if not 1 <= num_blocks <= most_blocks(group, block_size_tokens):
        raise InputError(f"{group.name}: {num_blocks} blocks of {block_size_tokens} are not ranked at every step")
    kinds = {distance: guesses(group, distance) for distance in range(1, max_distance + 1)}
    for index, layer in enumerate(group.layers(block_size_tokens)):
        for prediction in predictions(group, block_size_tokens, max_distance):
            if prediction.selector == "exact":
                continue
            fixed = {
                "layer": layer,
                "predictor": prediction.predictor,
                "distance": prediction.distance,
                "set_is_exact": set_is_exact(group, block_size_tokens, prediction.ranking, num_blocks),
            }
            binned = _binned(group, block_size_tokens, num_blocks, index, prediction)
            chosen_steps: dict[str, Bools] = {"all": np.ones(group.num_positions, bool)}
            chosen_steps |= {str(guess): steps for guess, steps in kinds[prediction.distance].items()}
            for guess, chosen in chosen_steps.items():
                rows = chosen[prediction.distance :]
                if rows.any():
                    yield from _rows(fixed | {"guess": guess}, binned, rows)


def write_misses(names: Sequence[str], path: Path, grid: Grid, budget_tokens: int) -> int:
    """Rows of every group and block size at one budget to a parquet file, a block size at a time; their number."""
    return write_rows(
        names, path, SCHEMA, grid.with_budget(budget_tokens),
        lambda group, size, count: miss_rows(group, size, count, grid.max_distance),
    )  # fmt: skip


Counts = dict[tuple[str, int], NDArray[np.float64]]
"""(by, bin) → true blocks, missed blocks, true mass, missed mass, being in the bin: [5, S − distance, H]."""
_BINS = {"place": age_bins(), "change": CHANGES, "churn": churn_bins()}


def _rows(fixed: dict[str, Any], binned: Counts, rows: Bools) -> Iterator[dict[str, Any]]:
    for (by, at), values in binned.items():
        means = values[:, rows].mean(axis=(1, 2))
        if by == "churn" and means[4] == 0:
            continue
        names = ("true_blocks", "missed_blocks", "true_mass", "missed_mass", "row_share")
        told = {name: None if np.isnan(mean) else float(mean) for name, mean in zip(names, means, strict=True)}
        told["row_share"] = told["row_share"] if by == "churn" else None
        yield {**fixed, "by": by, "bin": _BINS[by][at], "order": at, **told}


def _binned(group: TraceGroup, block_size_tokens: int, num_blocks: int, index: int, prediction: Prediction) -> Counts:
    parts: dict[tuple[str, int], list[NDArray[np.float64]]] = {}
    for window in windows(group, block_size_tokens, num_blocks, index, prediction):
        needed = window.true & ~window.filled
        missed = needed & ~window.predicted
        for key, inside in _bins(group, block_size_tokens, num_blocks, index, prediction, window):
            parts.setdefault(key, []).append(_count(window, needed & inside, missed & inside, inside))
    return {key: np.concatenate(part, axis=1) for key, part in parts.items()}


def _count(window: Window, needed: Bools, missed: Bools, inside: Bools) -> NDArray[np.float64]:
    shape = needed.shape[:2]
    masses = [np.full(shape, np.nan)] * 2
    if window.mass is not None:
        masses = [held(window.mass, needed), held(window.mass, missed)]
    whole = np.broadcast_to(inside, needed.shape).any(axis=-1)
    return np.stack([needed.sum(axis=-1), missed.sum(axis=-1), *masses, whole]).astype(np.float64)


def _bins(
    group: TraceGroup, size: int, num_blocks: int, index: int, prediction: Prediction, window: Window
) -> Iterator[tuple[tuple[str, int], Bools]]:
    """(by, bin) and the blocks in it, broadcast to [W, H, n]."""
    block = np.arange(window.true.shape[-1])
    age = group.kv_len[window.start : window.stop, None, None] - (block + 1) * size
    place = np.where(block == 0, 0, 1 + np.digitize(age, AGE_BOUNDS_TOKENS))
    for at in range(len(_BINS["place"])):
        yield ("place", at), np.broadcast_to(place == at, window.true.shape)
    lately = _needed_lately(group, size, num_blocks, index, prediction, window)
    for at, inside in enumerate((window.before, ~window.before & lately, ~window.before & ~lately)):
        yield ("change", at), inside
    churn = 1 - (window.true & window.before).sum(axis=-1, keepdims=True) / num_blocks
    bin_of = np.digitize(churn, CHURN_BOUNDS)
    for at in range(len(_BINS["churn"])):
        yield ("churn", at), np.broadcast_to(bin_of == at, window.true.shape)


def _needed_lately(
    group: TraceGroup, size: int, num_blocks: int, index: int, prediction: Prediction, window: Window
) -> Bools:
    """Blocks in a true set of the `HISTORY_STEPS` before the step that predicted, or as many as were recorded."""
    width = window.true.shape[-1]
    true = group.ranking(prediction.true_ranking, size)
    first = max(0, window.start - prediction.distance - HISTORY_STEPS)
    ever = members(true[first : window.stop - prediction.distance, index, :, :num_blocks], width)
    total = np.cumsum(ever, axis=0, dtype=np.int32)
    total = np.concatenate([np.zeros_like(total[:1]), total])
    at = np.arange(window.start, window.stop) - prediction.distance
    start = np.maximum(at - HISTORY_STEPS, 0)
    lately: Bools = total[at - first] > total[start - first]
    return lately
