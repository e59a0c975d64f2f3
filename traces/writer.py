"""Write a trace as a Zarr v3 folder, 64 steps at a time.

A chunk's arrays are written first and `steps_written` after them, by an atomic rename: a recording that is killed is
a valid trace up to its last whole chunk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from traces.codec import best_bits, bitmap, encode_steps, gather, members_in_id_order, rank_levels, spread
from traces.errors import InputError, TraceError
from traces.hashing import ContentHasher
from traces.layout import ArrayLayout, array_layouts, num_blocks, prompt_masses
from traces.schema import STEPS_PER_CHUNK, GroupAttributes, TraceAttributes, masked_rows, mass_source

_ZSTD_LEVEL = 19


@dataclass(slots=True)
class StepRecord:
    """What one decode step left. Arrays cover the layers recorded at their block size.

    rankings: by (block size, name): ids int32 and levels uint8, each [L_P, H, M] in rank order, of every stored
    ranking but `exact` (none where the row is masked). mass: by block size, levels uint8 [L_P, H, n] of every block;
    needed where no finer block size has it. rest: by block size, float32 [L_P, H], mass outside `true`.
    draft_tokens: the token guessed for this position j steps before, for j = 1, 2, …; None where there was no guess.
    query_cos: float32 [L, H] of all recorded layers, where the group records it.
    """

    kv_len: int
    token: int
    rankings: Mapping[tuple[int, str], tuple[NDArray[np.int32], NDArray[np.uint8]]]
    mass: Mapping[int, NDArray[np.uint8]]
    rest: Mapping[int, NDArray[np.float32]]
    draft_tokens: tuple[int | None, ...] = field(default=())
    query_cos: NDArray[np.float32] | None = None


class GroupWriter:
    """Streams one request's steps. Get it from `TraceWriter.group`."""

    def __init__(
        self,
        root: Path,
        name: str,
        trace: TraceAttributes,
        attributes: GroupAttributes,
        zstd_level: int,
        target: Path | None = None,
    ) -> None:
        self.name, self.attributes = name, attributes
        self._folder, self._trace = root / name, trace
        self._target = target
        self._shown = (target or root) / name
        self._layouts = array_layouts(trace.model, attributes)
        self._hasher = ContentHasher()
        self._steps: list[StepRecord] = []
        self._prompt_written = not prompt_masses(attributes)
        try:
            self._folder.mkdir(parents=True)
            self._save()
            for parent in {p for key in self._layouts for p in Path(key).parents if p != Path(".")}:
                (self._folder / parent).mkdir(parents=True, exist_ok=True)
                _write_group_json(self._folder / parent, {})
            self._arrays = {
                key: _create(self._folder / key, layout, attributes, zstd_level)
                for key, layout in self._layouts.items()
            }
        except OSError as error:
            raise InputError(f"{self._shown}: cannot be created: {error.strerror}") from error

    def write_prompt(self, masses: Mapping[tuple[int, str], NDArray[np.uint8]]) -> None:
        """Write what is known before the first step: by (block size, `prefill_mass` or `prompt_window_mass`), levels
        uint8 [L_P, H, n] of the blocks of the context. Raises InputError for one that is missing."""
        for size, block in self.attributes.blocks.items():
            for name in prompt_masses(self.attributes) if block.block_mass else ():
                key = f"p{size}/{name}"
                if (size, name) not in masses:
                    raise InputError(f"{self._folder}: lacks {key}")
                self._write(key, 0, masses[size, name][None])
                self._hasher.update(key, masses[size, name][None])
        self._prompt_written = True

    def append(self, step: StepRecord) -> None:
        """Add the next position; every 64 of them reach the disk together."""
        if not self._prompt_written:
            raise InputError(f"{self._folder}: the masses of the prompt must be written before the first step")
        done = self.attributes.steps_written + len(self._steps)
        expected = self.attributes.context_tokens + done
        if step.kv_len != expected:
            raise TraceError(str(self._folder), "kv_len", f"is {step.kv_len}, expected {expected}", (done,))
        if done >= self.attributes.steps_planned:
            raise TraceError(str(self._folder), "", f"all {self.attributes.steps_planned} planned steps are written")
        self._steps.append(step)
        if len(self._steps) == STEPS_PER_CHUNK:
            self.flush()

    def flush(self, **updates: Any) -> None:
        """Write the buffered steps as a chunk (only the last one may be short) and the attributes `updates`.

        Raises InputError where the disk refuses; what was written before stays a valid trace.
        """
        steps = self._steps
        start = self.attributes.steps_written
        if steps and start % STEPS_PER_CHUNK:
            raise TraceError(str(self._folder), "", f"cannot append after a short chunk at step {start}", (start,))
        for key, rows in self._encode().items():
            self._write(key, start, rows)
        attributes = self.attributes.model_copy(
            update={"steps_written": start + len(steps), "content_hash": None, **updates}
        )
        attributes = GroupAttributes.model_validate(attributes.model_dump())
        digest = self._hasher.digest(self._trace.model, attributes) if attributes.steps_written else None
        self.attributes = attributes.model_copy(update={"content_hash": digest})
        self._steps = []
        self._save()

    def _write(self, key: str, start: int, rows: NDArray[Any]) -> None:
        try:
            self._arrays[key][start : start + len(rows)] = rows
        except OSError as error:
            kept = f"{self.attributes.steps_written} steps are safe" if self._target is None else "nothing is kept"
            raise InputError(f"{self._shown}/{key}: cannot be written: {error.strerror}; {kept}") from error

    def _encode(self) -> dict[str, NDArray[Any]]:
        steps = self._steps
        out: dict[str, NDArray[Any]] = {}
        if not steps:
            return out
        out["kv_len"] = np.array([s.kv_len for s in steps], np.int32)
        out["tokens"] = np.array([s.token for s in steps], np.int32)
        for j in range(1, (self.attributes.drafter.distances if self.attributes.drafter else 0) + 1):
            guesses = [s.draft_tokens[j - 1] if len(s.draft_tokens) >= j else None for s in steps]
            out[f"draft{j}/token"] = np.array([-1 if g is None else g for g in guesses], np.int32)
            out[f"draft{j}/accepted"] = out[f"draft{j}/token"] == out["tokens"]
            out[f"draft{j}/accepted"] = out[f"draft{j}/accepted"].astype(np.uint8)
        if self.attributes.query_cos:
            out["query_cos"] = self._query_cos()
        for key, rows in out.items():
            self._hasher.update(key, rows)
        for size in self.attributes.blocks:
            out |= self._encode_block_size(size)
        return out

    def _query_cos(self) -> NDArray[np.float32]:
        rows = [step.query_cos for step in self._steps if step.query_cos is not None]
        if len(rows) < len(self._steps):
            raise InputError(f"{self._folder}: a step lacks query_cos")
        return np.stack(rows).astype(np.float32)

    def _encode_block_size(self, size: int) -> dict[str, NDArray[Any]]:
        steps, block = self._steps, self.attributes.blocks[size]
        out: dict[str, NDArray[Any]] = {}
        source = mass_source(self.attributes.blocks, size)
        capacity = num_blocks(self.attributes.capacity_tokens, size)
        shape = (
            len(steps),
            len(block.layers),
            self.attributes.num_kv_heads(self._trace.model),
            block.max_ranked_blocks,
        )
        decoded: dict[str, NDArray[Any]] = {}
        true_bits = true_levels = np.empty(0, np.uint8)
        true_ranked: NDArray[np.int32] = np.empty(0, np.int32)
        for name in sorted(block.rankings, key=lambda n: n != "true"):
            prefix = f"p{size}/{name}"
            ids, levels = np.full(shape, -1, np.int32), np.zeros(shape, np.uint8)
            for t, step in enumerate(steps):
                if name == "exact":
                    ids[t], levels[t] = rank_levels(step.mass[size][..., :-1], None, block.max_ranked_blocks)
                elif (size, name) in step.rankings:
                    ids[t], levels[t] = step.rankings[size, name]
                elif self.attributes.steps_written + t >= masked_rows(name):
                    raise InputError(f"step {self.attributes.steps_written + t} lacks ranking {prefix}")
            ranked = ids
            ids, levels = members_in_id_order(ids, levels)
            bits = bitmap(ids, capacity)
            if name == "true":
                true_ranked = ranked
                true_bits, true_levels = bits, spread(ids, levels, capacity)
                out[f"{prefix}/members"] = encode_steps(bits)
                reference = np.concatenate([np.zeros_like(true_levels[:1]), true_levels[:-1]])
            else:
                out[f"{prefix}/members"] = bits ^ true_bits
                reference = true_levels
            if name == "exact":
                out[f"{prefix}/mass"] = decoded[f"{prefix}/mass"] = levels
            elif f"{prefix}/levels" in self._layouts:
                out[f"{prefix}/levels"] = levels - gather(reference, ids)
                decoded[f"{prefix}/levels"] = levels
            if name == "true" and source is None:
                mass = np.stack([gather(step.mass[size], row) for step, row in zip(steps, ids, strict=True)])
                out[f"{prefix}/mass"] = decoded[f"{prefix}/mass"] = mass
            for k in block.draft_sets or () if masked_rows(name) else ():
                best = decoded[f"{prefix}/best{k}"] = best_bits(ids, ranked[..., :k])
                out[f"{prefix}/best{k}"] = best ^ best_bits(ids, true_ranked[..., :k])
            decoded[f"{prefix}/ids"] = ids
        rest = np.stack([step.rest[size] for step in steps]).astype(np.float32)
        out[f"p{size}/true/rest"] = decoded[f"p{size}/true/rest"] = rest
        if block.block_mass:
            levels = np.zeros((*shape[:3], capacity), np.uint8)
            for t, step in enumerate(steps):
                levels[t, ..., : step.mass[size].shape[-1]] = step.mass[size]
            out[f"p{size}/block_mass"] = np.diff(levels, axis=0, prepend=np.uint8(0))
        for key, rows in decoded.items():
            self._hasher.update(key, rows)
        if block.block_mass:
            for step in steps:
                self._hasher.update(f"p{size}/block_mass", step.mass[size])
        return out

    def _save(self) -> None:
        try:
            _write_group_json(self._folder, {"group": self.attributes.model_dump(mode="json", exclude_none=True)})
        except OSError as error:
            raise InputError(f"{self._shown}/zarr.json: cannot be written: {error.strerror}") from error


class TraceWriter:
    """Creates a trace folder. Raises InputError where `path` exists and is not an empty folder.

    target: where the caller moves the trace once it is whole (`traces.staging`); faults name it. None: it stays.
    """

    def __init__(
        self, path: Path, attributes: TraceAttributes, *, zstd_level: int = _ZSTD_LEVEL, target: Path | None = None
    ) -> None:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(f"{path}: exists already; a recording does not overwrite")
        self.path, self.attributes, self._zstd_level, self._target = path, attributes, zstd_level, target
        self._groups: list[GroupWriter] = []
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{target or path}: cannot be created: {error.strerror}") from error
        _write_group_json(path, {"trace": attributes.model_dump(mode="json", exclude_none=True)})

    def group(self, name: str, attributes: GroupAttributes) -> GroupWriter:
        """Start a request's group; `name` becomes a folder."""
        if not name.replace("-", "").replace("_", "").isalnum():
            raise InputError(f"group name '{name}': letters, digits, - and _ only")
        writer = GroupWriter(self.path, name, self.attributes, attributes, self._zstd_level, self._target)
        self._groups.append(writer)
        return writer

    def close(self) -> None:
        for group in self._groups:
            group.flush()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()


def _create(path: Path, layout: ArrayLayout, group: GroupAttributes, zstd_level: int) -> Any:
    return zarr.create_array(
        store=str(path),
        shape=(group.steps_planned if layout.per_step else 1, *layout.row),
        chunks=layout.chunk_shape,
        dtype=layout.dtype,
        compressors=[zarr.codecs.ZstdCodec(level=zstd_level)],
        filters=None,
        fill_value=0,
        config={"write_empty_chunks": True},
    )


def _write_group_json(folder: Path, attributes: dict[str, Any]) -> None:
    value = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    temporary = folder / ".zarr.json.tmp"
    temporary.write_text(json.dumps(value, indent=1))
    os.replace(temporary, folder / "zarr.json")
