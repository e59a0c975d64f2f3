"""Open traces whose arrays have the content hash that they state: results are cached under that hash.

A trace is read in full once; the cache folder remembers that, for as long as no file of the trace changes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from simulator.cache import load_json, store_json
from traces.file_group import FileGroup
from traces.reader import Trace, open_trace
from traces.verification import require_content

VERIFICATION_VERSION = 1
"""Raised when what a content hash covers changes."""


def open_verified(location: str) -> Trace:
    """The trace at `location` (folder, zip or URL). Raises TraceError where it cannot be read or has other content.

    What lies behind a URL is verified each time: nothing says whether it changed.
    """
    trace = open_trace(location)
    state = file_state(location)
    groups = {name: trace.group(name) for name in trace.group_names}
    parts = {
        "kind": "verified trace",
        "version": VERIFICATION_VERSION,
        "file": os.path.realpath(location),
        "state": state,
        "stated": {name: g.attributes.content_hash for name, g in groups.items() if isinstance(g, FileGroup)},
    }
    if state is not None and load_json(parts) is True:
        return trace
    require_content(location)
    if state is not None and state == file_state(location):
        store_json(parts, True)
    return trace


def file_state(location: str) -> str | None:
    """Hash of path, size and times of each file of a local trace; it changes whenever a file is written. None: a URL.

    The time of the inode's last change (ctime) is among them, since a program can set that of the data (mtime).
    """
    if "://" in location:
        return None
    digest = hashlib.sha256()
    for name, stat in sorted(_files(Path(location))):
        digest.update(json.dumps([name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]).encode())
    return digest.hexdigest()


def _files(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    if not path.is_dir():
        yield "", path.stat()
        return
    for folder, _, names in os.walk(path, followlinks=True):
        for name in names:
            file = Path(folder) / name
            if file.exists():
                yield file.relative_to(path).as_posix(), file.stat()
