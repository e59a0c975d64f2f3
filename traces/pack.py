"""Make one zip of a trace folder: what ships and what is copied around."""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path

from traces.errors import InputError, TraceError
from traces.reader import open_trace

_EPOCH = (1980, 1, 1, 0, 0, 0)


def pack(folder: Path, target: Path | None = None, *, overwrite: bool = False) -> Path:
    """Zip `folder` into `target` (default: the folder's name + .zip) and return it.

    Entries are in sorted order with a fixed date, chunks stored (they are compressed already) and JSON deflated, so
    that equal folders make equal zips. The zip appears by an atomic rename or not at all. Raises TraceError for a
    folder that is not a trace, InputError where `target` exists and `overwrite` is false or cannot be written.
    """
    if not folder.is_dir():
        raise TraceError(str(folder), "", "is not a folder")
    open_trace(folder)
    target = target or folder.with_name(folder.name + ".zip")
    if target.exists() and not overwrite:
        raise InputError(f"{target}: exists already")
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.endswith(".tmp")):
                entry = zipfile.ZipInfo(path.relative_to(folder).as_posix(), _EPOCH)
                entry.external_attr = 0o644 << 16
                entry.compress_type = zipfile.ZIP_DEFLATED if path.suffix == ".json" else zipfile.ZIP_STORED
                archive.writestr(entry, path.read_bytes())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target
