"""Open a trace: a folder, a zip, or an fsspec URL of either. Arrays are read and decoded when first asked for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from traces.arrays import read_json
from traces.errors import InputError, TraceError
from traces.file_group import FileGroup
from traces.group import TraceGroup
from traces.hashing import trace_hash
from traces.layout import MAX_ARRAY_BYTES, array_layouts
from traces.mass import BlockMass
from traces.schema import STEPS_PER_CHUNK, GroupAttributes, TraceAttributes
from traces.store import Store, open_store

Schema = TypeVar("Schema", bound=BaseModel)
__all__ = ["BlockMass", "FileGroup", "Trace", "TraceGroup", "open_trace"]


class Trace:
    """Recorded requests of one model. `file` is where it lies, for messages."""

    def __init__(self, file: str, attrs: TraceAttributes, groups: Mapping[str, TraceGroup]) -> None:
        self.file, self.attrs, self._groups = file, attrs, dict(groups)

    @property
    def group_names(self) -> tuple[str, ...]:
        return tuple(self._groups)

    def group(self, name: str) -> TraceGroup:
        """Raises InputError for a name that the trace lacks."""
        if name not in self._groups:
            raise InputError(f"{self.file}: no group '{name}'; it has {', '.join(self._groups)}")
        return self._groups[name]

    @cached_property
    def content_hash(self) -> str:
        return trace_hash(self.attrs, {name: group.content_hash for name, group in self._groups.items()})


def open_trace(path: str | Path) -> Trace:
    """Open a trace folder, zip, or fsspec URL. Raises TraceError in one line for whatever is wrong with it."""
    store = open_store(path)
    attributes = _attributes(store, "zarr.json", "trace", TraceAttributes)
    groups: dict[str, TraceGroup] = {}
    for name in store.folders():
        group = _attributes(store, f"{name}/zarr.json", "group", GroupAttributes)
        if group.steps_written == 0:
            continue
        _check_size(store, name, attributes, group)
        groups[name] = FileGroup(store, name, attributes, group)
    if not groups:
        raise TraceError(store.file, "", "holds no recorded steps: writing it did not get so far, it may be removed")
    return Trace(store.file, attributes, groups)


def _check_size(store: Store, name: str, trace: TraceAttributes, group: GroupAttributes) -> None:
    for key, layout in array_layouts(trace.model, group).items():
        if layout.row_bytes * max(STEPS_PER_CHUNK, group.steps_written) > MAX_ARRAY_BYTES:
            raise TraceError(store.file, f"{name}/{key}", "the sizes that the attributes state are absurd")
    if any(head >= trace.model.num_kv_heads for head in group.kv_heads or ()):
        raise TraceError(store.file, name, f"lists KV heads {group.kv_heads} of {trace.model.num_kv_heads}")
    for size, block in group.blocks.items():
        beyond = [layer for layer in block.layers if layer >= trace.model.num_layers]
        if beyond:
            raise TraceError(store.file, name, f"block size {size} lists layer {beyond[0]} of {trace.model.num_layers}")


def _attributes(store: Store, key: str, kind: str, schema: type[Schema]) -> Schema:
    attributes = read_json(store, key).get("attributes")
    value = attributes.get(kind) if isinstance(attributes, dict) else None
    if not isinstance(value, dict):
        raise TraceError(store.file, key, f"has no '{kind}' attributes; is this an oasis-sim trace?")
    version = value.get("format_version", 1)
    if version != 1:
        raise TraceError(store.file, key, f"format version {version!r}; this oasis-sim reads version 1")
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise TraceError(store.file, key, f"attribute {where or kind}: {first['msg']}") from error
