"""Results kept by the content of what they were computed from: the key is a hash, so nothing is ever stale.

A file that cannot be read or does not match its key is recomputed; a folder that cannot be written is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import platformdirs
from numpy.typing import NDArray

from traces.errors import InputError

ENVIRONMENT_VARIABLE = "OASIS_SIM_CACHE"
_META = "__meta__"


def cache_folder() -> Path:
    """`$OASIS_SIM_CACHE` where set and not empty, else the user's cache folder."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    return Path(named) if named else Path(platformdirs.user_cache_dir("oasis-sim", appauthor=False))


def canonical_json(value: Any) -> str:
    """One text per value: keys sorted, no spaces, shortest floats. Raises InputError for NaN and other types."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"cannot be part of a cache key: {error}") from None


def cache_key(parts: Mapping[str, Any]) -> str:
    """sha256 of the canonical JSON of everything that decides a result."""
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()


def store_arrays(parts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> bool:
    """Keep arrays and small JSON values under the key of `parts`; False where the folder cannot be written."""
    header = canonical_json({"parts": parts, "meta": meta}).encode()
    members = {**arrays, _META: np.frombuffer(header, dtype=np.uint8)}
    return _write(_path(parts, ".npz"), lambda file: np.savez(file, allow_pickle=False, **members))


def load_arrays(parts: Mapping[str, Any]) -> tuple[dict[str, NDArray[Any]], dict[str, Any]] | None:
    """(arrays, meta) as stored under these parts; None where absent, damaged or stored for others."""
    try:
        with np.load(_path(parts, ".npz"), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(arrays.pop(_META).tobytes())
        if header["parts"] != json.loads(canonical_json(parts)):
            return None
        return arrays, header["meta"]
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error):
        return None


def store_json(parts: Mapping[str, Any], value: Any) -> bool:
    """Keep a JSON value under the key of `parts`; False where the folder cannot be written."""
    body = canonical_json(value)
    digest = hashlib.sha256(body.encode()).hexdigest()
    text = canonical_json({"parts": parts, "sha256": digest, "value": value})
    return _write(_path(parts, ".json"), lambda file: file.write(text.encode()))


def load_json(parts: Mapping[str, Any]) -> Any | None:
    """The value stored under these parts; None where absent, damaged or stored for others."""
    try:
        stored = json.loads(_path(parts, ".json").read_bytes())
        digest = hashlib.sha256(canonical_json(stored["value"]).encode()).hexdigest()
        if stored["parts"] != json.loads(canonical_json(parts)) or stored["sha256"] != digest:
            return None
        return stored["value"]
    except (OSError, ValueError, KeyError, TypeError, InputError):
        return None


def _path(parts: Mapping[str, Any], suffix: str) -> Path:
    key = cache_key(parts)
    return cache_folder() / key[:2] / f"{key}{suffix}"


def _write(path: Path, fill: Callable[[BinaryIO], Any]) -> bool:
    """Write beside the target and rename: a reader sees the whole file or none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as file:
                fill(file)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError:
        return False
    return True
