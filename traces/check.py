"""Whether a trace can be trusted: version, shapes, ranges, sums, rank order, ids and content hash.

Every fault is a TraceError that names file, array and index.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.errors import TraceError
from traces.group import TraceGroup
from traces.info import describe
from traces.layout import num_blocks, prompt_masses
from traces.mass import unit_mass
from traces.reader import FileGroup, open_trace
from traces.schema import MASS_LEVELS_PER_OCTAVE, masked_rows, mass_source

MASS_TOLERANCE = 0.01
"""Of mass + rest = 1, beyond what rounding to levels can do."""
COMPACT_TOLERANCE = 0.05
"""The same of compact traces, whose small masses are rounded to two octaves."""
_ROUNDING = 2 ** (1 / MASS_LEVELS_PER_OCTAVE) - 1
"""Members rounded up and all others down by half a level: a share p changes by at most p (1 − p) times this."""


def check_trace(path: str | Path) -> dict[str, Any]:
    """Check everything and return the trace's description. Raises TraceError at the first fault."""
    trace = open_trace(path)
    for name in trace.group_names:
        group = trace.group(name)
        if not isinstance(group, FileGroup):
            raise TraceError(trace.file, name, "is not read from a file")
        _check_lengths(group)
        _check_tokens(group)
        for size in group.block_sizes:
            _check_members(group, size)
            _check_sets(group, size)
            check_rankings(group, size, trace.file)
            _check_mass(group, size)
            _check_prompt(group, size)
        _check_query_cos(group)
        stored, computed = group.attributes.content_hash, group.computed_hash()
        if stored != computed:
            raise TraceError(trace.file, f"{name}/zarr.json", f"content hash is {stored}, its arrays give {computed}")
    return describe(trace)


def check_rankings(group: TraceGroup, block_size_tokens: int, file: str = "in memory") -> None:
    """Ids of every ranking: unique in a row, padding last, of blocks that existed when the ranking was made."""
    for name in group.rankings(block_size_tokens):
        ids = group.ranking(name, block_size_tokens)
        array = f"{group.name}/p{block_size_tokens}/{name}"
        _refuse(ids[..., 1:] * (ids[..., :-1] < 0) > 0, file, array, "an id follows the padding")
        _refuse(ids < -1, file, array, "negative id")
        j = masked_rows(name)
        _refuse(ids[:j] >= 0, file, array, f"the first {j} rows have no draft and must be empty")
        kv_len = group.kv_len[: max(0, len(ids) - j)]  # none of a trace shorter than the distance
        limit = -(-kv_len.astype(np.int64) // block_size_tokens)
        _refuse(ids[j:] >= limit[:, None, None, None], file, array, "id of a block that did not exist", offset=j)
        ascending = np.sort(ids, axis=-1)
        repeated = (ascending[..., 1:] == ascending[..., :-1]) & (ascending[..., 1:] >= 0)
        _refuse(repeated, file, array, "a block is ranked twice")
        if name == "prev_layer" and group.layers(block_size_tokens)[0] == 0:
            _refuse(ids[:, :1] >= 0, file, array, "layer 0 has no layer before it and must be empty")


def _check_lengths(group: FileGroup) -> None:
    array, attributes = f"{group.name}/kv_len", group.attributes
    expected = attributes.context_tokens + np.arange(group.num_positions)
    _refuse(group.kv_len != expected, group.file, array, "does not grow by one from context_tokens")


def _check_tokens(group: FileGroup) -> None:
    tokens = group.array("tokens")
    _refuse(tokens < 0, group.file, f"{group.name}/tokens", "negative token")
    for j in range(1, (group.attributes.drafter.distances if group.attributes.drafter else 0) + 1):
        guessed, accepted = group.array(f"draft{j}/token"), group.array(f"draft{j}/accepted")
        _refuse(guessed < -1, group.file, f"{group.name}/draft{j}/token", "below -1")
        wrong = accepted != (guessed == tokens)
        _refuse(wrong, group.file, f"{group.name}/draft{j}/accepted", "does not say whether the guess was right")


def _check_members(group: FileGroup, size: int) -> None:
    """Levels beyond a row's members are 0; rank order itself is defined by the levels."""
    for name in group.attributes.blocks[size].rankings:
        kind = "mass" if name == "exact" else "levels"
        if f"p{size}/{name}/{kind}" not in group.array_names():
            continue
        padding = group.members(name, size) < 0
        levels = group.array(f"p{size}/{name}/{kind}")
        _refuse(padding & (levels > 0), group.file, f"{group.name}/p{size}/{name}/{kind}", "level without a member")


def _check_sets(group: FileGroup, size: int) -> None:
    """Each nested set of a draft has as many members as it says."""
    block = group.attributes.blocks[size]
    for name in block.rankings if block.draft_sets is not None else ():
        for count in block.draft_sets or () if masked_rows(name) else ():
            members = (group.members(name, size) >= 0).sum(axis=-1)
            found = np.bitwise_count(group.best(name, size, count)).sum(axis=-1)
            array = f"{group.name}/p{size}/{name}/best{count}"
            _refuse(found != np.minimum(members, count), group.file, array, f"does not mark {count} members")


def _check_mass(group: FileGroup, size: int) -> None:
    rest, array = group.rest(size), f"{group.name}/p{size}/true/rest"
    _refuse(~np.isfinite(rest), group.file, array, "is not finite")
    _refuse((rest < -1e-3) | (rest > 1 + 1e-3), group.file, array, "is outside 0 … 1")
    if group.attributes.blocks[size].block_mass:
        levels, where = group.block_mass(size), f"{group.name}/p{size}/block_mass"
        counts = np.array([num_blocks(int(length), size) for length in group.kv_len])
        beyond = np.arange(levels.shape[-1]) >= counts[:, None, None, None]
        _refuse(beyond & (levels > 0), group.file, where, "mass on a block that did not exist")
        _refuse(levels.max(axis=-1) != 255, group.file, where, "a row's largest level is not 255")
    mass = group.mass(size)
    dense = mass.dense()
    _refuse(~np.isfinite(dense), group.file, f"{group.name}/p{size}/mass", "is not finite")
    source = mass_source(group.attributes.blocks, size)
    if source is not None:
        inside = _ranked_mass(group, size, source)
        compact = group.attributes.blocks[source].mass_resolution == "compact"
        tolerance = COMPACT_TOLERANCE if compact else MASS_TOLERANCE
        off = np.abs(inside + rest - 1) > tolerance + _ROUNDING * inside * (1 - inside)
        _refuse(off, group.file, array, f"mass of the ranked blocks + rest differs from 1 by over {tolerance}")
    if "exact" in group.rankings(size):
        inside = _gathered(dense, group.ranking("true", size)).sum(axis=-1)
        exact = _gathered(dense, group.ranking("exact", size))
        rising = exact[..., 1:] > exact[..., :-1] * (1 + 1e-6)
        _refuse(rising, group.file, f"{group.name}/p{size}/exact", "mass rises along the ranking")
        short = exact.sum(axis=-1) < inside - 1e-3
        _refuse(short, group.file, f"{group.name}/p{size}/exact", "holds less mass than the ranking 'true'")


def _check_prompt(group: FileGroup, size: int) -> None:
    for name in prompt_masses(group.attributes) if group.attributes.blocks[size].block_mass else ():
        array = f"p{size}/{name}"
        _refuse(
            group.array(array).max(axis=-1) != 255,
            group.file,
            f"{group.name}/{array}",
            "a row's largest level is not 255",
        )


def _check_query_cos(group: FileGroup) -> None:
    if group.attributes.query_cos:
        cosines = group.array("query_cos")
        bad = ~(np.abs(cosines) <= 1 + 1e-3)
        _refuse(bad, group.file, f"{group.name}/query_cos", "is not a cosine")


def _ranked_mass(group: FileGroup, size: int, source: int) -> NDArray[np.float64]:
    """Mass of the blocks in `true`, summed at the block size that was recorded (one rounding only)."""
    levels = group.block_mass(source)
    layers = [group.layers(source).index(layer) for layer in group.layers(size)]
    fine = unit_mass()[levels[:, layers]].astype(np.float64)
    coarse = np.add.reduceat(fine, np.arange(0, fine.shape[-1], size // source), axis=-1)
    inside = _gathered(coarse, group.ranking("true", size)).sum(axis=-1)
    return np.asarray(inside / coarse.sum(axis=-1), np.float64)


def _gathered(dense: NDArray[Any], ids: NDArray[np.int32]) -> NDArray[Any]:
    values = np.take_along_axis(dense, np.maximum(ids, 0), axis=-1)
    return np.where(ids >= 0, values, values.dtype.type(0))


def _refuse(bad: NDArray[np.bool_], file: str, array: str, problem: str, offset: int = 0) -> None:
    if bad.any():
        index = np.unravel_index(int(np.argmax(bad)), bad.shape)
        first = (int(index[0]) + offset, *(int(i) for i in index[1:]))
        raise TraceError(file, array, problem, first)
