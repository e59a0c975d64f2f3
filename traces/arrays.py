"""Read the subset of Zarr v3 that traces use: regular chunks, little-endian bytes, zstd.

The Zarr library would look codecs up by the names in the file and inflate whatever they return. Here a file whose
metadata is not exactly the expected array is refused, and a chunk is inflated into a buffer of the expected size.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from traces.errors import TraceError
from traces.layout import MAX_CHUNK_BYTES, ArrayLayout
from traces.store import Store

_MAX_JSON_BYTES = 16 << 20


def read_json(store: Store, key: str) -> dict[str, Any]:
    """Object in a `zarr.json`. Raises TraceError."""
    data = store.read(key, _MAX_JSON_BYTES)
    if data is None:
        raise TraceError(store.file, key, "is missing")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TraceError(store.file, key, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TraceError(store.file, key, "is not a JSON object")
    return value


def read_array(store: Store, name: str, layout: ArrayLayout, num_steps: int) -> NDArray[Any]:
    """First `num_steps` rows (1 of what is not per step) of array `name`, [rows, *layout.row]. Raises TraceError."""
    num_steps = num_steps if layout.per_step else 1
    _check_metadata(store, name, layout, num_steps)
    dtype = np.dtype(layout.dtype).newbyteorder("<")
    chunk_shape = layout.chunk_shape
    num_bytes = math.prod(chunk_shape) * dtype.itemsize
    if num_bytes > MAX_CHUNK_BYTES:
        raise TraceError(store.file, name, f"a chunk of {num_bytes} bytes exceeds {MAX_CHUNK_BYTES}")
    grid = [range(-(-extent // c)) for extent, c in zip((num_steps, *layout.row), chunk_shape, strict=True)]
    blocks = {at: _read_chunk(store, name, at, num_bytes, dtype, chunk_shape) for at in itertools.product(*grid)}
    if not blocks:
        return np.empty((0, *layout.row), dtype)
    if all(len(axis) == 1 for axis in grid[1:]):
        return np.concatenate([blocks[at] for at in sorted(blocks)], axis=0)[:num_steps]
    out = np.empty((num_steps, *layout.row), dtype)
    for at, block in blocks.items():
        target = tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, chunk_shape, strict=True))
        view = out[target]
        view[...] = block[tuple(slice(extent) for extent in view.shape)]
    return out


def _read_chunk(
    store: Store, name: str, at: tuple[int, ...], num_bytes: int, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> NDArray[Any]:
    key = f"{name}/c/{'/'.join(map(str, at))}"
    data = store.read(key, num_bytes + num_bytes // 64 + 1024)  # zstd expands what it cannot compress by less
    first = (at[0] * shape[0],)
    if data is None:
        raise TraceError(store.file, name, f"chunk {key} is missing", first)
    try:
        raw = pa.decompress(data, decompressed_size=num_bytes, codec="zstd", asbytes=True)
    except (pa.ArrowException, OSError) as error:
        raise TraceError(store.file, name, f"chunk {key} is damaged: {str(error).splitlines()[0]}", first) from error
    if len(raw) != num_bytes:
        raise TraceError(store.file, name, f"chunk {key} holds {len(raw)} bytes, not {num_bytes}", first)
    return np.frombuffer(raw, dtype).reshape(shape)


def _check_metadata(store: Store, name: str, layout: ArrayLayout, num_steps: int) -> None:
    meta = read_json(store, f"{name}/zarr.json")
    shape = meta.get("shape")
    if not isinstance(shape, list) or shape[1:] != list(layout.row) or not isinstance(shape[0], int):
        raise TraceError(store.file, name, f"shape is {shape}, expected [steps, {', '.join(map(str, layout.row))}]")
    if shape[0] < num_steps:
        raise TraceError(store.file, name, f"has {shape[0]} rows, steps_written is {num_steps}")
    expected: dict[str, Any] = {
        "zarr_format": 3,
        "node_type": "array",
        "data_type": layout.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(layout.chunk_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    }
    for key, value in expected.items():
        if meta.get(key) != value:
            raise TraceError(store.file, name, f"{key} is {meta.get(key)!r}, expected {value!r}")
    codecs = meta.get("codecs")
    names = [codec.get("name") if isinstance(codec, dict) else None for codec in codecs] if codecs else []
    if names != ["bytes", "zstd"] or meta.get("storage_transformers"):
        raise TraceError(store.file, name, f"codecs are {names}, expected ['bytes', 'zstd']")
    endian = codecs[0].get("configuration", {}).get("endian", "little") if codecs else None
    if endian != "little":
        raise TraceError(store.file, name, f"byte order is {endian!r}, expected 'little'")
