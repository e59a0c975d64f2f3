"""A recorded request in a store: arrays are read and decoded when first asked for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.arrays import read_array
from traces.codec import (
    accumulate_levels,
    best_bits,
    decode_members,
    decode_steps,
    gather,
    rank_levels,
    rank_members,
    rank_set,
)
from traces.errors import TraceError
from traces.group import TraceGroup
from traces.hashing import ContentHasher
from traces.layout import array_layouts, num_blocks, prompt_masses
from traces.mass import BlockMass, pool_levels, scale_of, unit_mass
from traces.schema import (
    STEPS_PER_CHUNK,
    GroupAttributes,
    TraceAttributes,
    masked_rows,
    mass_source,
    recorded_layers,
)
from traces.store import Store


class FileGroup(TraceGroup):
    """A group in a store. Arrays are cached, read-only, once decoded."""

    def __init__(self, store: Store, name: str, trace: TraceAttributes, attributes: GroupAttributes) -> None:
        self.name, self.model, self.attributes = name, trace.model, attributes
        self._store = store
        self._layouts = array_layouts(trace.model, attributes)
        self._cache: dict[tuple[str, int], Any] = {}
        self.kv_len = self.array("kv_len")

    @property
    def file(self) -> str:
        return self._store.file

    @cached_property
    def content_hash(self) -> str:
        return self.attributes.content_hash or self.computed_hash()

    @property
    def num_kv_heads(self) -> int:
        return self.attributes.num_kv_heads(self.model)

    @property
    def sparse_policy(self) -> Mapping[str, int | float | str] | None:
        return self.attributes.sparse_policy

    @property
    def block_sizes(self) -> tuple[int, ...]:
        return tuple(sorted(self.attributes.blocks))

    def layers(self, block_size_tokens: int) -> tuple[int, ...]:
        self._require(block_size_tokens)
        return self.attributes.blocks[block_size_tokens].layers

    def max_ranked_blocks(self, block_size_tokens: int) -> int:
        self._require(block_size_tokens)
        return self.attributes.blocks[block_size_tokens].max_ranked_blocks

    def rankings(self, block_size_tokens: int) -> tuple[str, ...]:
        self._require(block_size_tokens)
        stored = self.attributes.blocks[block_size_tokens].rankings
        return (*stored, "exact") if self.has_block_mass(block_size_tokens) else stored

    def array_names(self) -> tuple[str, ...]:
        """Every stored array."""
        return tuple(self._layouts)

    def array(self, name: str) -> NDArray[Any]:
        """A stored array as it is in the file, [steps_written, …] (what is not per step: [1, …]); not cached."""
        if name not in self._layouts:
            raise TraceError(self.file, f"{self.name}/{name}", "is not recorded")
        return read_array(self._store, f"{self.name}/{name}", self._layouts[name], self.attributes.steps_written)

    def members(self, name: str, block_size_tokens: int) -> NDArray[np.int32]:
        """Ids of a stored ranking in ascending order, int32 [S, L_P, H, M], padded with −1."""
        key = (f"{name}/members", block_size_tokens)
        if key not in self._cache:
            bits = self._bitmaps(name, block_size_tokens)
            try:
                self._cache[key] = decode_members(bits, self.max_ranked_blocks(block_size_tokens))
            except OverflowError as error:
                where = f"{self.name}/p{block_size_tokens}/{name}/members"
                raise TraceError(self.file, where, "more members than max_ranked_blocks", error.args[0]) from error
        members: NDArray[np.int32] = self._cache[key]
        return members

    def levels(self, name: str, block_size_tokens: int) -> NDArray[np.uint8]:
        """Levels of `members`, uint8 [S, L_P, H, M]; 0 beside padding. Raises TraceError for drafts kept as sets."""
        ids = self.members(name, block_size_tokens)
        if name == "true":
            return gather(self._true_levels(block_size_tokens), ids)
        coded = self.array(f"p{block_size_tokens}/{name}/levels")
        levels = coded + gather(self._true_levels(block_size_tokens), ids)
        levels[ids < 0] = 0
        return levels

    def best(self, name: str, block_size_tokens: int, count: int) -> NDArray[np.uint8]:
        """Which of `members` are among the best `count` of a draft kept as nested sets: bits, [S, L_P, H, ⌈M/8⌉]."""
        coded = self.array(f"p{block_size_tokens}/{name}/best{count}")
        true = self.ranking("true", block_size_tokens)[..., :count]
        return coded ^ best_bits(self.members(name, block_size_tokens), true)

    def block_mass(self, block_size_tokens: int) -> NDArray[np.uint8]:
        """Mass levels of every block, uint8 [S, L_P, H, capacity], where they are stored at this block size."""
        coded = self.array(f"p{block_size_tokens}/block_mass")
        return np.concatenate([np.add.accumulate(chunk, axis=0, dtype=np.uint8) for chunk in _chunks(coded)])

    def ranking(self, name: str, block_size_tokens: int) -> NDArray[np.int32]:
        self._require(block_size_tokens)
        if name == "draft_truth":
            return self.ranking("true", block_size_tokens)
        if name not in self.rankings(block_size_tokens):
            known = ", ".join(self.rankings(block_size_tokens))
            raise TraceError(
                self.file, f"{self.name}/p{block_size_tokens}/{name}", f"is not recorded; there are {known}"
            )
        if (name, block_size_tokens) not in self._cache:
            ids = self._rank(name, block_size_tokens)
            ids.flags.writeable = False
            self._cache[name, block_size_tokens] = ids
        ranked: NDArray[np.int32] = self._cache[name, block_size_tokens]
        return ranked

    def has_block_mass(self, block_size_tokens: int) -> bool:
        self._require(block_size_tokens)
        return mass_source(self.attributes.blocks, block_size_tokens) is not None

    def mass(self, block_size_tokens: int) -> BlockMass:
        self._require(block_size_tokens)
        if ("mass", block_size_tokens) not in self._cache:
            self._cache["mass", block_size_tokens] = self._mass(block_size_tokens)
        mass: BlockMass = self._cache["mass", block_size_tokens]
        return mass

    def accepted(self, distance: int) -> NDArray[np.bool_] | None:
        drafter = self.attributes.drafter
        if drafter is None or not 1 <= distance <= drafter.distances:
            return None
        no_guess = drafter.acceptance is None and bool((self.array(f"draft{distance}/token") < 0).all())
        return None if no_guess else self.array(f"draft{distance}/accepted").astype(bool)

    def query_cos(self, block_size_tokens: int) -> NDArray[np.float32] | None:
        layers = self.layers(block_size_tokens)
        if not self.attributes.query_cos:
            return None
        known = recorded_layers(self.attributes.blocks)
        return self.array("query_cos")[:, [known.index(layer) for layer in layers]]

    def prefill_mass(self, block_size_tokens: int) -> NDArray[np.float32] | None:
        return self._prompt_mass("prefill_mass", block_size_tokens)

    def prompt_window_mass(self, block_size_tokens: int) -> NDArray[np.float32] | None:
        return self._prompt_mass("prompt_window_mass", block_size_tokens)

    def _prompt_mass(self, name: str, size: int) -> NDArray[np.float32] | None:
        layers = self.layers(size)
        source = mass_source(self.attributes.blocks, size)
        if source is None or name not in prompt_masses(self.attributes):
            return None
        rows = [self.layers(source).index(layer) for layer in layers]
        levels = pool_levels(self.array(f"p{source}/{name}")[0, rows], size // source)
        mass: NDArray[np.float32] = unit_mass()[levels] * scale_of(levels)[..., None]
        return mass

    def rest(self, block_size_tokens: int) -> NDArray[np.float32]:
        """Mass outside `true` as recorded (not derived from levels), float32 [S, L_P, H]."""
        return self.array(f"p{block_size_tokens}/true/rest")

    def computed_hash(self) -> str:
        """Content hash of what the arrays hold, whatever the attributes say."""
        hasher = ContentHasher()
        for key in self._layouts:
            if key.endswith("/members"):
                size, name, _ = key.split("/")
                hasher.update(f"{size}/{name}/ids", self.members(name, int(size[1:])))
            elif key.endswith("/levels"):
                size, name, _ = key.split("/")
                hasher.update(key, self.levels(name, int(size[1:])))
            elif key.split("/")[-1].startswith("best"):
                size, name, best = key.split("/")
                hasher.update(key, self.best(name, int(size[1:]), int(best.removeprefix("best"))))
            elif key.endswith("/block_mass"):
                size_tokens = int(key.split("/")[0][1:])
                for row, kv_len in zip(self.block_mass(size_tokens), self.kv_len, strict=True):
                    hasher.update(key, row[..., : num_blocks(int(kv_len), size_tokens)])
            else:
                hasher.update(key, self.array(key))
        return hasher.digest(self.model, self.attributes)

    def _rank(self, name: str, size: int) -> NDArray[np.int32]:
        if name == "exact" and mass_source(self.attributes.blocks, size) is not None:
            levels = self.mass(size).levels
            open_block = (self.kv_len - 1) // size
            excluded = np.arange(levels.shape[-1]) >= open_block[:, None, None, None]
            return rank_levels(levels, excluded, self.max_ranked_blocks(size))[0]
        if name == "exact":
            return rank_members(self.members(name, size), self.array(f"p{size}/exact/mass"))
        if f"p{size}/{name}/levels" not in self._layouts:
            return self._rank_set(name, size)
        return rank_members(self.members(name, size), self.levels(name, size))

    def _rank_set(self, name: str, size: int) -> NDArray[np.int32]:
        """Members of a draft kept as nested sets, ordered as `BlockSizeAttributes.draft_sets` says."""
        true, shift = self.ranking("true", size), masked_rows(name)
        issued = np.full_like(true, -1)
        issued[shift:] = true[: len(true) - shift]
        right = self.array(f"draft{shift}/accepted").astype(bool)
        members = self.members(name, size)
        tiers = np.zeros(members.shape, np.int64)
        for count in self.attributes.blocks[size].draft_sets or ():
            best = self.best(name, size, count)
            tiers += 1 - np.unpackbits(best, axis=-1, count=members.shape[-1], bitorder="little").astype(np.int64)
        return rank_set(members, np.where(right[:, None, None, None], true, issued), tiers)

    def _bitmaps(self, name: str, size: int) -> NDArray[np.uint8]:
        coded = self.array(f"p{size}/{name}/members")
        if name != "true":
            return coded ^ self._bitmaps("true", size)
        if ("bitmaps", size) not in self._cache:
            self._cache["bitmaps", size] = np.concatenate([decode_steps(chunk) for chunk in _chunks(coded)])
        bitmaps: NDArray[np.uint8] = self._cache["bitmaps", size]
        return bitmaps

    def _true_levels(self, size: int) -> NDArray[np.uint8]:
        """Levels of `true` by block, uint8 [S, L_P, H, n]."""
        if ("levels", size) not in self._cache:
            coded, ids, bits = (
                self.array(f"p{size}/true/levels"),
                self.members("true", size),
                self._bitmaps("true", size),
            )
            parts = zip(_chunks(coded), _chunks(ids), _chunks(bits), strict=True)
            self._cache["levels", size] = np.concatenate([accumulate_levels(*part) for part in parts])
        levels: NDArray[np.uint8] = self._cache["levels", size]
        return levels

    def _mass(self, size: int) -> BlockMass:
        count = num_blocks(int(self.kv_len[-1]), size)
        source = mass_source(self.attributes.blocks, size)
        if source is not None:
            rows = [self.layers(source).index(layer) for layer in self.layers(size)]
            stored = self.block_mass(source)
            stored = stored if len(rows) == stored.shape[1] else stored[:, rows]
            levels = pool_levels(stored, size // source)[..., :count]
            return BlockMass(levels, scale_of(levels), np.zeros(levels.shape[:-1], np.float32))
        shape = (self.num_positions, len(self.layers(size)), self.num_kv_heads, count)
        levels = np.zeros(shape, np.uint8)
        for name in ("true", "exact"):
            if name in self.attributes.blocks[size].rankings:
                ids = self.members(name, size)
                at = np.nonzero(ids >= 0)
                levels[at[0], at[1], at[2], ids[at]] = self.array(f"p{size}/{name}/mass")[at]
                if name == "true":
                    scale = scale_of(levels, 1.0 - self.rest(size).astype(np.float64))
        covered = BlockMass(levels, scale, scale).dense().sum(axis=-1)
        return BlockMass(levels, scale, np.clip(1 - covered, 0, 1).astype(np.float32))

    def _require(self, block_size_tokens: int) -> None:
        if block_size_tokens not in self.attributes.blocks:
            known = ", ".join(map(str, self.block_sizes))
            raise TraceError(
                self.file, self.name, f"block size {block_size_tokens} is not recorded; recorded are {known}"
            )


def _chunks(rows: NDArray[Any]) -> list[NDArray[Any]]:
    return [rows[start : start + STEPS_PER_CHUNK] for start in range(0, len(rows), STEPS_PER_CHUNK)]
