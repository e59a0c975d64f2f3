"""A recorded request as the iterations that verified drafts make of it.

Iteration i starts at position p_i with the real token and k drafted ones, made at p_i. Those before the first wrong
one are accepted: a_i of them, and p_{i+1} = p_i + 1 + a_i. Its rows all read one working set, so what replay needs of a
position here is that of the union of the rows: `IterationGroup` is a trace group whose positions are iterations.
`simulator.iterations_reference` states the same in plain Python.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simulator.predictors import merge_ranks, recorded_ranking
from simulator.specs.policy import PolicySpec
from traces.errors import InputError
from traces.group import TraceGroup
from traces.mass import BlockMass, quantise_mass, scale_of, unit_mass

Int32 = NDArray[np.int32]


def steps_of(group: TraceGroup, policy: PolicySpec) -> tuple[TraceGroup, PolicySpec]:
    """The group and policy whose positions are decode steps: as they are, or by iterations where drafts are verified.

    Raises InputError where the trace does not say which drafts were right.
    """
    if not policy.verify_drafts:
        return group, policy
    view = IterationGroup(group, policy.lookahead_k)
    return view, policy.model_copy(update={"verify_drafts": False, "lookahead_k": policy.plan_distance})


def iterations(right: Sequence[NDArray[np.bool_]], num_positions: int) -> tuple[Int32, Int32]:
    """(first position, positions emitted) of each iteration, int32 [I].

    right[j − 1][t]: whether the token drafted for position t at t − j was right. An iteration whose last draft would
    lie past the trace's end is left out.
    """
    starts, emitted = [], []
    position, num_drafts = 0, len(right)
    while position + num_drafts < num_positions:
        accepted = 0
        while accepted < num_drafts and right[accepted][position + accepted + 1]:
            accepted += 1
        starts.append(position)
        emitted.append(1 + accepted)
        position += 1 + accepted
    return np.array(starts, dtype=np.int32), np.array(emitted, dtype=np.int32)


class IterationGroup(TraceGroup):
    """View of a group by iterations of `num_drafts` verified drafts.

    Block n − 1 of the iteration's first row is its open block; what later rows append or fill lies in it or behind it,
    and is in HBM. Rankings, first M distinct selectable ids of a rank-wise interleave, nearest row first:
    `true` and `exact` of the real row, then `draft{j}` at its j-th draft's position; `draft1`, the prediction for an
    iteration, of the drafts of the iteration before. Mass is the mean over the positions that the iteration emits.
    Raises InputError where a distance's acceptance or ranking is not recorded.
    """

    def __init__(self, base: TraceGroup, num_drafts: int) -> None:
        self.name, self.model, self._base, self.num_drafts = base.name, base.model, base, num_drafts
        right = [_right(base, distance, num_drafts) for distance in range(1, num_drafts + 1)]
        self.starts, self._emitted = iterations(right, base.num_positions)
        if not len(self.starts):
            raise InputError(
                f"policy.lookahead_k {num_drafts}: trace group {base.name!r} has {base.num_positions} positions, too "
                "few for one iteration"
            )
        self.kv_len = np.ascontiguousarray(base.kv_len[self.starts])

    @property
    def tokens_per_step(self) -> Int32:
        return self._emitted

    @cached_property
    def content_hash(self) -> str:
        return hashlib.sha256(f"{self._base.content_hash} by {self.num_drafts} verified drafts".encode()).hexdigest()

    @property
    def block_sizes(self) -> tuple[int, ...]:
        return self._base.block_sizes

    def layers(self, block_size_tokens: int) -> tuple[int, ...]:
        return self._base.layers(block_size_tokens)

    def max_ranked_blocks(self, block_size_tokens: int) -> int:
        return self._base.max_ranked_blocks(block_size_tokens)

    def rankings(self, block_size_tokens: int) -> tuple[str, ...]:
        return tuple(name for name in self._base.rankings(block_size_tokens) if name in ("true", "exact", "draft1"))

    def ranking(self, name: str, block_size_tokens: int) -> Int32:
        parts = [self._draft(distance, block_size_tokens) for distance in range(1, self.num_drafts + 1)]
        if name == "draft1":
            parts = [np.concatenate([np.full_like(part[:1], -1), part[:-1]]) for part in parts]
        else:
            parts.insert(0, self._base.ranking(name, block_size_tokens)[self.starts])
        selectable = (self.kv_len - 1) // block_size_tokens
        for part in parts:
            part[part >= selectable[:, None, None, None]] = -1
        return merge_ranks(parts)[..., : self.max_ranked_blocks(block_size_tokens)]

    def has_block_mass(self, block_size_tokens: int) -> bool:
        return self._base.has_block_mass(block_size_tokens)

    def mass(self, block_size_tokens: int) -> BlockMass:
        base = self._base.mass(block_size_tokens)
        shape = (len(self.starts), *base.levels.shape[1:])
        mean = np.zeros(shape, dtype=np.float64)
        outside = np.zeros(shape[:-1], dtype=np.float64)
        for i, (start, emitted) in enumerate(zip(self.starts, self._emitted, strict=True)):
            rows = slice(start, start + emitted)
            dense = unit_mass()[base.levels[rows]] * base.scale[rows][..., None]
            mean[i], outside[i] = dense.mean(axis=0, dtype=np.float64), base.outside[rows].mean(axis=0)
            open_block = (int(self.kv_len[i]) - 1) // block_size_tokens
            mean[i, ..., open_block] += mean[i, ..., open_block + 1 :].sum(axis=-1)
            mean[i, ..., open_block + 1 :] = 0.0
        levels = quantise_mass(mean)
        return BlockMass(levels, scale_of(levels, 1.0 - outside), outside.astype(np.float32))

    def _draft(self, distance: int, block_size_tokens: int) -> Int32:
        """Ranking of the query drafted for position start + distance, int32 [I, L_P, H, M]."""
        reason = f"policy.verify_drafts with lookahead_k {self.num_drafts}"
        drafted = recorded_ranking(self._base, f"draft{distance}", block_size_tokens, reason)
        return np.asarray(drafted[self.starts + distance])


def _right(group: TraceGroup, distance: int, num_drafts: int) -> NDArray[np.bool_]:
    right = group.accepted(distance)
    if right is None:
        known = [j for j in range(1, 9) if group.accepted(j) is not None]
        recorded = f"it does for distances {', '.join(map(str, known))}" if known else "it does for none"
        raise InputError(
            f"policy.verify_drafts with lookahead_k {num_drafts} needs to know which tokens drafted {distance} ahead "
            f"were right (draft{distance}/accepted); trace group {group.name!r} does not say; {recorded}"
        )
    return right
