"""Block ids that drive a decode run, and hashes of what moved that do not depend on order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class StepTrace:
    """Rankings of one recorded request on the model's layers and heads, and where each request of a batch starts.

    true: int32 [S, L, H, M], the selector's ranking. predicted: the same for the step that a row is about. shift: the
    ranking for step u is predicted[u − shift]. kv_len: int32 [S]. offsets: int32 [B], the row of a request's step 0;
    each request replays from there on its own.
    """

    true: Int32
    predicted: Int32
    shift: int
    kv_len: Int32
    offsets: Int32

    def __post_init__(self) -> None:
        if self.true.shape != self.predicted.shape or len(self.kv_len) != len(self.true):
            raise InputError(f"trace: rankings {self.true.shape}, {self.predicted.shape}, kv_len {self.kv_len.shape}")
        if not (np.diff(self.kv_len) == 1).all():
            raise InputError("trace: the KV length must grow by one per row")

    def require_steps(self, num_steps: int) -> None:
        """`InputError` unless every request has `num_steps` rows."""
        last = int(self.offsets.max()) + num_steps
        if last > len(self.true):
            raise InputError(f"trace: {len(self.true)} rows, need {last} for {num_steps} steps from the last offset")

    def admitted(self, request: int, num_kept: int, block_size_tokens: int) -> Int32:
        """Ids resident from step 0, int32 [L, H, K], −1 padded."""
        row = int(self.offsets[request])
        selectable = -(-int(self.kv_len[row]) // block_size_tokens) - 1
        ranked = self.true[row]
        order = np.argsort(~((ranked >= 0) & (ranked < selectable)), axis=-1, kind="stable")
        ids = np.take_along_axis(ranked, order, axis=-1)[..., :num_kept].copy()
        ids[(ids < 0) | (ids >= selectable)] = -1
        out = np.full((*ids.shape[:2], num_kept), -1, dtype=np.int32)
        out[..., : ids.shape[2]] = ids
        return out


def synthetic_step_trace(
    num_rows: int, num_layers: int, num_heads: int, num_ranked: int, context_tokens: int, block_size_tokens: int,
    offsets: Int32, *, churn: float = 0.12, miss: float = 0.05, shift: int = 0, seed: int = 0,
) -> StepTrace:  # fmt: skip
    """Rankings with a stable core: each row replaces a share `churn` of the top blocks; `predicted` gets `miss` wrong.

    An assumption about how attention moves, made for timing: sizes of transfers, not quality, come from it.
    """
    rng = np.random.default_rng(seed)
    shape = (num_layers, num_heads)
    num_blocks = -(-context_tokens // block_size_tokens) - 1
    if num_blocks < num_ranked:
        raise InputError(f"synthetic trace: {num_blocks} selectable blocks at step 0, need at least {num_ranked}")
    weight = rng.gumbel(size=(*shape, num_blocks)) * 2.0
    score = weight + rng.gumbel(size=weight.shape)
    true = np.empty((num_rows, *shape, num_ranked), dtype=np.int32)
    predicted = np.empty_like(true)

    def rank(values: NDArray[np.float64]) -> Int32:
        top = np.argpartition(-values, num_ranked - 1, axis=-1)[..., :num_ranked]
        order = np.argsort(-np.take_along_axis(values, top, axis=-1), axis=-1, kind="stable")
        return np.take_along_axis(top, order, axis=-1).astype(np.int32)

    def redraw(values: NDArray[np.float64], share: float) -> NDArray[np.float64]:
        again = rng.random(values.shape, dtype=np.float32) < share
        out = values.copy()
        out[again] = weight[again] + rng.gumbel(size=int(again.sum()))
        return out

    for row in range(num_rows):
        true[row] = rank(score)
        predicted[row] = rank(redraw(score, miss))
        score = redraw(score, churn)
    kv_len = np.arange(context_tokens, context_tokens + num_rows, dtype=np.int32)
    return StepTrace(true, true if shift else predicted, shift, kv_len, offsets.astype(np.int32))


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser. Source: Steele, Lea and Flood, OOPSLA 2014."""
    with np.errstate(over="ignore"):
        x = values + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def moved_hash(rows: NDArray[np.int32]) -> str:
    """Hash of a set of (head, block[, slot]) rows, in any order: the sum of their mixed 64-bit codes, in hex."""
    code = np.zeros(len(rows), dtype=np.uint64)
    for column in rows.T:
        code = (code << np.uint64(21)) | column.astype(np.uint64)
    with np.errstate(over="ignore"):
        return f"{int(mix(code).sum(dtype=np.uint64)):016x}"
