"""A small copy of a trace to ship: one block size, few layers, drafts as nested sets, small masses coarse."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError
from traces.file_group import FileGroup
from traces.layout import num_blocks, prompt_masses
from traces.mass import coarsen_levels, quantise_mass
from traces.pack import pack
from traces.reader import Trace, open_trace
from traces.schema import BlockSizeAttributes, GroupAttributes, masked_rows, recorded_layers
from traces.staging import staged
from traces.writer import StepRecord, TraceWriter

BLOCK_SIZE_TOKENS, NUM_LAYERS, MAX_RANKED_BLOCKS = 16, 8, 64
"""Of a compact trace, where nothing else is asked for."""
_REST_STEPS = 1024
"""Mass outside the ranked blocks is rounded to this share: finer than the rounded masses that it completes."""


def pack_compact(
    source: str | Path,
    target: Path,
    *,
    block_size_tokens: int = BLOCK_SIZE_TOKENS,
    layers: Sequence[int] | None = None,
    max_ranked_blocks: int = MAX_RANKED_BLOCKS,
    draft_sets: Sequence[int] | None = None,
    keep: Sequence[str] = (),
) -> Path:
    """Zip a compact copy of the trace at `source` (folder, zip or URL) into `target`.

    layers: model layers; None: eight of the recorded, evenly spread. max_ranked_blocks: M, at most the recorded.
    draft_sets: sizes below M at which the drafts' sets are exact, too; None: M/4 and M/2. keep: rankings besides `true`
    and the drafts (mean, prev_layer). Query similarity and masses of the prompt are small and always kept. Raises
    InputError for what the trace does not hold, TraceError for a trace that cannot be read.
    """
    trace = open_trace(source)
    if target.exists():
        raise InputError(f"{target}: exists already")
    if not target.absolute().parent.is_dir():
        raise InputError(f"{target}: the folder {target.absolute().parent} does not exist")
    with staged(target) as unfinished:
        note = f"compact copy of content hash {trace.content_hash}"
        notes = " ".join(part for part in (trace.attrs.provenance.notes, note) if part)
        provenance = trace.attrs.provenance.model_copy(update={"notes": notes})
        folder = unfinished.with_name("compact.zarr")
        with TraceWriter(folder, trace.attrs.model_copy(update={"provenance": provenance}), target=target) as writer:
            for group in _groups(trace):
                block = _block(group, block_size_tokens, layers, max_ranked_blocks, draft_sets, keep)
                _write(writer, group, block_size_tokens, block)
        pack(folder, unfinished)
    return target


def _groups(trace: Trace) -> list[FileGroup]:
    groups = [trace.group(name) for name in trace.group_names]
    return [group for group in groups if isinstance(group, FileGroup)]


def _block(
    group: FileGroup,
    size: int,
    layers: Sequence[int] | None,
    max_ranked_blocks: int,
    draft_sets: Sequence[int] | None,
    keep: Sequence[str],
) -> BlockSizeAttributes:
    recorded = group.layers(size)
    spread = np.linspace(0, len(recorded) - 1, min(NUM_LAYERS, len(recorded))).round().astype(int)
    chosen = tuple(recorded[i] for i in spread) if layers is None else tuple(sorted(set(layers)))
    missing = sorted(set(chosen) - set(recorded))
    if missing or not chosen:
        raise InputError(f"layers: {missing[:1]} is not recorded at {size} tokens; recorded: {recorded}")
    if not 0 < max_ranked_blocks <= group.max_ranked_blocks(size):
        raise InputError(f"max_ranked_blocks: {max_ranked_blocks}; the trace ranks {group.max_ranked_blocks(size)}")
    stored = group.attributes.blocks[size].rankings
    unknown = sorted(set(keep) - set(stored))
    if unknown:
        raise InputError(f"keep: ranking '{unknown[0]}' is not stored; there are {', '.join(stored)}")
    if not group.has_block_mass(size):
        raise InputError(f"{group.name}: the mass of every block is not recorded at {size} tokens")
    sets = (max_ranked_blocks // 4, max_ranked_blocks // 2) if draft_sets is None else tuple(sorted(set(draft_sets)))
    if any(not 0 < k < max_ranked_blocks for k in sets):
        raise InputError(f"draft_sets: {sets} must lie between 0 and max_ranked_blocks {max_ranked_blocks}")
    names = tuple(name for name in stored if name == "true" or masked_rows(name) or name in keep)
    return BlockSizeAttributes(
        layers=chosen,
        max_ranked_blocks=max_ranked_blocks,
        rankings=names,
        draft_sets=sets,
        mass_resolution="compact",
    )


def _write(writer: TraceWriter, group: FileGroup, size: int, block: BlockSizeAttributes) -> None:
    rows = [group.layers(size).index(layer) for layer in block.layers]
    known = recorded_layers(group.attributes.blocks)
    attributes = GroupAttributes.model_validate(
        group.attributes.model_dump()
        | {"blocks": {size: block}, "steps_planned": group.num_positions, "steps_written": 0, "content_hash": None}
    )
    out = writer.group(group.name, attributes)
    masses = {name: getattr(group, name)(size)[rows] for name in prompt_masses(attributes)}
    if masses:
        out.write_prompt({(size, name): quantise_mass(mass) for name, mass in masses.items()})
    ranked = {name: _ranked(group, size, name, rows, block.max_ranked_blocks) for name in block.rankings}
    levels = coarsen_levels(group.mass(size).levels[:, rows])
    rest = _rest(group, size, rows, block.max_ranked_blocks)
    tokens = group.array("tokens")
    distances = attributes.drafter.distances if attributes.drafter else 0
    guesses = [group.array(f"draft{j}/token").tolist() for j in range(1, distances + 1)]
    cosines = (
        group.array("query_cos")[:, [known.index(layer) for layer in block.layers]] if attributes.query_cos else None
    )
    for t, kv_len in enumerate(group.kv_len.tolist()):
        out.append(
            StepRecord(
                kv_len=kv_len,
                token=int(tokens[t]),
                rankings={(size, name): (ids[t], level[t]) for name, (ids, level) in ranked.items()},
                mass={size: levels[t, ..., : num_blocks(kv_len, size)]},
                rest={size: rest[t]},
                draft_tokens=tuple(None if column[t] < 0 else column[t] for column in guesses),
                query_cos=None if cosines is None else cosines[t],
            )
        )


def _ranked(
    group: FileGroup, size: int, name: str, rows: Sequence[int], count: int
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Best `count` in rank order with levels above the last of them; levels of drafts are not written."""
    ids = group.ranking(name, size)[:, rows, :, :count]
    if masked_rows(name):
        return ids, np.zeros(ids.shape, np.uint8)
    levels = -np.sort(-group.levels(name, size)[:, rows].astype(np.int16), axis=-1)[..., :count]
    anchor = np.where(ids[..., -1:] >= 0, levels[..., -1:], 0)
    return ids, np.where(ids >= 0, levels - anchor, 0).astype(np.uint8)


def _rest(group: FileGroup, size: int, rows: Sequence[int], count: int) -> NDArray[np.float32]:
    """Mass outside the best `count`."""
    left_out = group.ranking("true", size)[:, rows, :, count:]
    dense = group.mass(size).dense()[:, rows]
    mass = np.where(left_out >= 0, np.take_along_axis(dense, np.maximum(left_out, 0), axis=-1), 0)
    rest = group.rest(size)[:, rows] + mass.sum(axis=-1)
    rounded: NDArray[np.float32] = (np.rint(rest * _REST_STEPS) / _REST_STEPS).astype(np.float32)
    return rounded
