"""Make one zip of a trace folder: what ships and what is copied around."""

from __future__ import annotations

import zipfile
from pathlib import Path

from traces.errors import InputError, TraceError
from traces.reader import open_trace
from traces.staging import staged

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
    if not target.absolute().parent.is_dir():
        raise InputError(f"{target}: the folder {target.absolute().parent} does not exist")
    with staged(target) as unfinished:
        try:
            with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as archive:
                for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.endswith(".tmp")):
                    entry = zipfile.ZipInfo(path.relative_to(folder).as_posix(), _EPOCH)
                    entry.external_attr = 0o644 << 16
                    entry.compress_type = zipfile.ZIP_DEFLATED if path.suffix == ".json" else zipfile.ZIP_STORED
                    archive.writestr(entry, path.read_bytes())
        except OSError as error:
            raise InputError(f"{target}: cannot be written: {error.strerror}") from error
    return target
