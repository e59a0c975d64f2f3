"""Read-only bytes of a trace by key: a folder, a zip, or either behind an fsspec URL.

Nothing is extracted, and nothing that a file says is executed: keys are looked up, sizes are bounded.
"""

from __future__ import annotations

import threading
import zipfile
from pathlib import Path
from typing import Any, Protocol

from traces.errors import TraceError


class Store(Protocol):
    file: str
    """Where it lies, as the user named it."""

    def read(self, key: str, limit_bytes: int) -> bytes | None:
        """Bytes of `key`; None where there is no such key. Raises TraceError where they cannot be read or are more."""

    def folders(self) -> list[str]:
        """Names of the folders at the root, sorted."""


class FolderStore:
    def __init__(self, file: str, root: Path) -> None:
        self.file, self._root = file, root

    def read(self, key: str, limit_bytes: int) -> bytes | None:
        path = self._root / key
        try:
            if path.stat().st_size > limit_bytes:
                raise TraceError(self.file, key, f"has {path.stat().st_size} bytes, expected at most {limit_bytes}")
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise TraceError(self.file, key, f"cannot be read: {error.strerror}") from error

    def folders(self) -> list[str]:
        return sorted(child.name for child in self._root.iterdir() if child.is_dir())


class ZipStore:
    """A zip archive, local (`source` is a path) or remote (`source` is a seekable binary file)."""

    def __init__(self, file: str, source: Any) -> None:
        self.file = file
        self._lock = threading.Lock()
        try:
            self._zip = zipfile.ZipFile(source)
        except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, OSError) as error:
            raise TraceError(file, "", f"is not a readable zip: {error}") from error
        self._entries: dict[str, zipfile.ZipInfo] = {}
        for entry in self._zip.infolist():
            if entry.filename in self._entries:
                raise TraceError(file, entry.filename, "occurs twice in the zip")
            self._entries[entry.filename] = entry

    def read(self, key: str, limit_bytes: int) -> bytes | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.file_size > limit_bytes:
            raise TraceError(self.file, key, f"has {entry.file_size} bytes, expected at most {limit_bytes}")
        try:
            with self._lock, self._zip.open(entry) as stream:
                data = stream.read(entry.file_size + 1)
        except Exception as error:  # zlib, bz2 and lzma raise types of their own
            raise TraceError(self.file, key, f"damaged zip entry: {error}") from error
        if len(data) != entry.file_size:
            raise TraceError(self.file, key, f"zip entry has {len(data)} bytes, its header says {entry.file_size}")
        return data

    def folders(self) -> list[str]:
        return sorted({name.split("/", 1)[0] for name in self._entries if "/" in name})


class UrlStore:
    """A folder behind an fsspec URL."""

    def __init__(self, file: str) -> None:
        import fsspec.core

        self.file = file
        try:
            self._fs, self._root = fsspec.core.url_to_fs(file)
        except (ValueError, ImportError, OSError) as error:
            raise TraceError(file, "", f"cannot be opened: {error}") from error

    def read(self, key: str, limit_bytes: int) -> bytes | None:
        try:
            data = bytes(self._fs.cat_file(f"{self._root.rstrip('/')}/{key}", end=limit_bytes + 1))
        except FileNotFoundError:
            return None
        except Exception as error:  # each filesystem has errors of its own
            raise TraceError(self.file, key, f"cannot be read: {error}") from error
        if len(data) > limit_bytes:
            raise TraceError(self.file, key, f"has more than the {limit_bytes} bytes expected at most")
        return data

    def folders(self) -> list[str]:
        entries = self._fs.ls(self._root, detail=True)
        return sorted(e["name"].rstrip("/").rsplit("/", 1)[-1] for e in entries if e["type"] == "directory")


def open_store(location: str | Path) -> Store:
    """Store of a folder, a zip file or an fsspec URL (zip if it ends with .zip). Raises TraceError."""
    file = str(location)
    if "://" in file:
        if not file.endswith(".zip"):
            return UrlStore(file)
        import fsspec

        try:
            source = fsspec.open(file, "rb").open()
        except Exception as error:  # each filesystem has errors of its own
            raise TraceError(file, "", f"cannot be opened: {error}") from error
        return ZipStore(file, source)
    path = Path(location)
    if path.is_dir():
        return FolderStore(file, path)
    if path.is_file():
        return ZipStore(file, path)
    raise TraceError(file, "", "no such file or folder")
