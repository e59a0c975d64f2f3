"""Trace groups from arrays in memory: for importers, generators and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from traces.codec import rank_levels
from traces.errors import TraceError
from traces.group import TraceGroup
from traces.hashing import ContentHasher
from traces.layout import num_blocks
from traces.mass import BlockMass, quantise_mass, quantise_rows, scale_of
from traces.reader import Trace
from traces.schema import BlockSizeAttributes, GroupAttributes, ModelGeometry, TraceAttributes

_FILE = "in memory"


class MemoryGroup(TraceGroup):
    """A group of arrays. Build it with `memory_group`."""

    def __init__(
        self,
        name: str,
        model: ModelGeometry,
        kv_len: NDArray[np.int32],
        layers: Mapping[int, tuple[int, ...]],
        ranked: Mapping[int, Mapping[str, NDArray[np.int32]]],
        masses: Mapping[int, BlockMass],
        extras: Mapping[tuple[str, int], NDArray[np.float32]],
        accepted: Sequence[NDArray[np.bool_]] = (),
        sparse_policy: Mapping[str, int | float | str] | None = None,
    ) -> None:
        self.name, self.model, self.kv_len = name, model, kv_len
        self._extras, self._accepted = dict(extras), tuple(accepted)
        self._sparse_policy = None if sparse_policy is None else dict(sparse_policy)
        self._layers, self._ranked, self._masses = dict(layers), {p: dict(r) for p, r in ranked.items()}, dict(masses)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        return tuple(sorted(self._ranked))

    def layers(self, block_size_tokens: int) -> tuple[int, ...]:
        self._require(block_size_tokens)
        return self._layers[block_size_tokens]

    def max_ranked_blocks(self, block_size_tokens: int) -> int:
        self._require(block_size_tokens)
        return int(self._ranked[block_size_tokens]["true"].shape[-1])

    def rankings(self, block_size_tokens: int) -> tuple[str, ...]:
        self._require(block_size_tokens)
        return tuple(self._ranked[block_size_tokens])

    def ranking(self, name: str, block_size_tokens: int) -> NDArray[np.int32]:
        self._require(block_size_tokens)
        name = "true" if name == "draft_truth" else name
        if name not in self._ranked[block_size_tokens]:
            known = ", ".join(self._ranked[block_size_tokens])
            raise TraceError(_FILE, f"{self.name}/p{block_size_tokens}/{name}", f"is not recorded; there are {known}")
        return self._ranked[block_size_tokens][name]

    def has_block_mass(self, block_size_tokens: int) -> bool:
        self._require(block_size_tokens)
        return block_size_tokens in self._masses and not self._masses[block_size_tokens].outside.any()

    def mass(self, block_size_tokens: int) -> BlockMass:
        self._require(block_size_tokens)
        if block_size_tokens not in self._masses:
            raise TraceError(_FILE, f"{self.name}/p{block_size_tokens}/block_mass", "is not recorded")
        return self._masses[block_size_tokens]

    @property
    def sparse_policy(self) -> Mapping[str, int | float | str] | None:
        return self._sparse_policy

    def accepted(self, distance: int) -> NDArray[np.bool_] | None:
        return self._accepted[distance - 1] if 1 <= distance <= len(self._accepted) else None

    def query_cos(self, block_size_tokens: int) -> NDArray[np.float32] | None:
        return self._extra("query_cos", block_size_tokens)

    def prefill_mass(self, block_size_tokens: int) -> NDArray[np.float32] | None:
        return self._extra("prefill_mass", block_size_tokens)

    def prompt_window_mass(self, block_size_tokens: int) -> NDArray[np.float32] | None:
        return self._extra("prompt_window_mass", block_size_tokens)

    def _extra(self, name: str, block_size_tokens: int) -> NDArray[np.float32] | None:
        self._require(block_size_tokens)
        return self._extras.get((name, block_size_tokens))

    @cached_property
    def content_hash(self) -> str:
        hasher = ContentHasher()
        hasher.update("kv_len", self.kv_len)
        for distance, right in enumerate(self._accepted, start=1):
            hasher.update(f"draft{distance}/accepted", right.astype(np.uint8))
        for (name, size), values in self._extras.items():
            hasher.update(f"p{size}/{name}", values)
        blocks = {}
        for size, ranked in self._ranked.items():
            for name, ids in ranked.items():
                hasher.update(f"p{size}/{name}/ranked", ids)
            if size in self._masses:
                mass = self._masses[size]
                hasher.update(f"p{size}/mass/levels", mass.levels)
                hasher.update(f"p{size}/mass/scale", mass.scale)
                hasher.update(f"p{size}/mass/outside", mass.outside)
            blocks[size] = BlockSizeAttributes(
                layers=self._layers[size],
                max_ranked_blocks=self.max_ranked_blocks(size),
                rankings=("true",),
                block_mass=size in self._masses,
            )
        steps = len(self.kv_len)
        attributes = GroupAttributes(
            context_tokens=int(self.kv_len[0]),
            steps_planned=steps,
            steps_written=steps,
            blocks=blocks,
            sparse_policy=self._sparse_policy,
        )
        return hasher.digest(self.model, attributes)

    def _require(self, block_size_tokens: int) -> None:
        if block_size_tokens not in self._ranked:
            known = ", ".join(map(str, self.block_sizes))
            raise TraceError(_FILE, self.name, f"block size {block_size_tokens} is not recorded; recorded are {known}")


def memory_group(
    kv_len: ArrayLike,
    rankings: Mapping[int, Mapping[str, ArrayLike]],
    masses: Mapping[int, ArrayLike] | None = None,
    *,
    query_cos: Mapping[int, ArrayLike] | None = None,
    prefill_mass: Mapping[int, ArrayLike] | None = None,
    prompt_window_mass: Mapping[int, ArrayLike] | None = None,
    accepted: Sequence[ArrayLike] = (),
    sparse_policy: Mapping[str, int | float | str] | None = None,
    name: str = "memory",
    layers: Mapping[int, Sequence[int]] | None = None,
    model: ModelGeometry | None = None,
) -> MemoryGroup:
    """A group from plain arrays.

    kv_len [S]; rankings by block size and name, integer [S, L_P, H, M] in rank order with −1 padding, `true` among
    them; masses by block size, [S, L_P, H, n_max] softmax mass of every block: it is quantised to levels as a file
    would, and gives `exact` where that is not passed. By block size, too: query_cos [S, L_P, H], prefill_mass and
    prompt_window_mass [L_P, H, n] (n blocks of kv_len[0] tokens), quantised as a file would. accepted, by distance from
    1: [S], whether the token guessed so far ahead was right. sparse_policy: rules of `draft{j}_sparse`. `layers`
    defaults to 0 … L_P−1, `model` to the geometry of the arrays with one query head per KV head.
    Raises TraceError for arrays that do not fit each other.
    """
    lengths = np.ascontiguousarray(kv_len, dtype=np.int32)
    ranked = {
        size: {key: np.ascontiguousarray(ids, dtype=np.int32) for key, ids in named.items()}
        for size, named in rankings.items()
    }
    steps = len(lengths)
    for size, named in ranked.items():
        if "true" not in named:
            raise TraceError(_FILE, f"{name}/p{size}/true", "is missing")
        for key, ids in named.items():
            if ids.ndim != 4 or ids.shape != named["true"].shape or ids.shape[0] != steps:
                raise TraceError(_FILE, f"{name}/p{size}/{key}", f"shape is {ids.shape}, expected [{steps}, L, H, M]")
    quantised = {size: _block_mass(np.asarray(mass), lengths, size) for size, mass in (masses or {}).items()}
    for size, mass in quantised.items():
        if mass.levels.shape[:3] != ranked[size]["true"].shape[:3]:
            raise TraceError(_FILE, f"{name}/p{size}/block_mass", f"shape is {mass.levels.shape}, unlike its rankings")
        if "exact" not in ranked[size]:
            excluded = np.arange(mass.levels.shape[-1]) >= ((lengths - 1) // size)[:, None, None, None]
            ranked[size]["exact"] = rank_levels(mass.levels, excluded, ranked[size]["true"].shape[-1])[0]
    recorded = {
        size: tuple(layers[size]) if layers is not None else tuple(range(named["true"].shape[1]))
        for size, named in ranked.items()
    }
    for size, named in ranked.items():
        if len(recorded[size]) != named["true"].shape[1]:
            raise TraceError(_FILE, f"{name}/p{size}", f"{named['true'].shape[1]} layers, {len(recorded[size])} named")
    heads = next(iter(ranked.values()))["true"].shape[2]
    geometry = model or ModelGeometry(
        name="memory",
        num_layers=max(max(indices) for indices in recorded.values()) + 1,
        num_query_heads=heads,
        num_kv_heads=heads,
        head_dim=64,
    )
    extras: dict[tuple[str, int], NDArray[np.float32]] = {}
    for size, cosines in (query_cos or {}).items():
        extras["query_cos", size] = np.ascontiguousarray(cosines, dtype=np.float32)
    for key, given in (("prefill_mass", prefill_mass), ("prompt_window_mass", prompt_window_mass)):
        for size, values in (given or {}).items():
            extras[key, size] = quantise_rows(np.asarray(values))[1]
    for (key, size), extra in extras.items():
        shape = ranked[size]["true"].shape[:3] if size in ranked else None
        expected = shape if key == "query_cos" or shape is None else (*shape[1:], num_blocks(int(lengths[0]), size))
        if extra.shape != expected:
            raise TraceError(_FILE, f"{name}/p{size}/{key}", f"shape is {extra.shape}, expected {expected}")
    right = [np.ascontiguousarray(rows, dtype=bool) for rows in accepted]
    for distance, rows in enumerate(right, start=1):
        if rows.shape != (steps,):
            raise TraceError(_FILE, f"{name}/draft{distance}/accepted", f"shape is {rows.shape}, expected [{steps}]")
    return MemoryGroup(name, geometry, lengths, recorded, ranked, quantised, extras, right, sparse_policy)


def memory_trace(groups: Sequence[MemoryGroup], name: str = "memory") -> Trace:
    """A trace of groups in memory, which share one model geometry."""
    return Trace(_FILE, TraceAttributes(name=name, model=groups[0].model), {group.name: group for group in groups})


def _block_mass(mass: NDArray[np.floating], kv_len: NDArray[np.int32], size: int) -> BlockMass:
    exists = np.arange(mass.shape[-1]) < num_blocks_of(kv_len, size)[:, None, None, None]
    levels = quantise_mass(np.where(exists, mass, 0.0))
    return BlockMass(levels, scale_of(levels), np.zeros(levels.shape[:-1], np.float32))


def num_blocks_of(kv_len: NDArray[np.int32], block_size_tokens: int) -> NDArray[np.int64]:
    """ceil(kv_len / P) of each position, int64 [S]."""
    return np.array([num_blocks(int(length), block_size_tokens) for length in kv_len], dtype=np.int64)
