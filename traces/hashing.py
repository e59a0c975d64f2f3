"""Content hash of a group and of a trace: over decoded arrays and semantic attributes, not over files.

Two traces with the same content hash replay alike, however they are compressed, packed or named.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.schema import GroupAttributes, ModelGeometry, TraceAttributes

_YOUNGER = {
    "kv_heads": None,
    "query_cos": False,
    "prefill_mass": False,
    "prompt_window_tokens": None,
    "sparse_policy": None,
}
_YOUNGER_OF_BLOCKS = {"draft_sets": None, "mass_resolution": "eighth-octave"}
_YOUNGER_OF_MODELS: dict[str, Any] = {"window_layers": [], "window_tokens": None}
"""Attributes that came after the first traces, with their defaults, at which they do not enter the hash."""


class ContentHasher:
    """Running sha256 of each decoded array, fed step by step."""

    def __init__(self) -> None:
        self._arrays: dict[str, Any] = {}

    def update(self, name: str, rows: NDArray[Any]) -> None:
        """Append rows (any step count) of array `name`."""
        digest = self._arrays.setdefault(name, hashlib.sha256(str(rows.dtype.newbyteorder("<")).encode()))
        digest.update(np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("<")).tobytes())

    def digest(self, model: ModelGeometry, group: GroupAttributes) -> str:
        """Hash so far. Attributes that describe the file or how the request came to be are left out."""
        attributes = group.model_dump(
            mode="json", exclude={"content_hash", "steps_planned", "prompt", "sampling", "prompt_sha256"}
        )
        _drop_defaults(attributes, _YOUNGER)
        for block in attributes["blocks"].values():
            _drop_defaults(block, _YOUNGER_OF_BLOCKS)
        arrays = {name: digest.hexdigest() for name, digest in sorted(self._arrays.items())}
        return _sha256({"model": _model(model), "group": attributes, "arrays": arrays})


def _model(model: ModelGeometry) -> dict[str, Any]:
    dumped = model.model_dump(mode="json")
    _drop_defaults(dumped, _YOUNGER_OF_MODELS)
    return dumped


def _drop_defaults(attributes: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    for name, value in defaults.items():
        if attributes[name] == value:
            del attributes[name]


def trace_hash(attributes: TraceAttributes, groups: Mapping[str, str]) -> str:
    """Hash of a trace from its semantic attributes and its groups' hashes."""
    semantic = attributes.model_dump(mode="json", exclude={"name", "provenance"}) | {"model": _model(attributes.model)}
    return _sha256({"trace": semantic, "groups": dict(groups)})


def _sha256(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
