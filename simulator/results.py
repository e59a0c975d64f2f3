"""The folder of one run: finished points as they come, the table at the end, and what produced them.

`points.jsonl` grows by one fsynced line per finished point, so a killed run loses nothing that it reported;
`results.parquet`, `config.yaml` and `manifest.json` appear whole or not at all.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from simulator.metrics import COLUMNS, METRICS
from simulator.point_lines import json_line, point_line, read_points
from traces.errors import InputError, refuse_file, writing

Row = dict[str, Any]

POINTS, TABLE, CONFIG, MANIFEST, LOCK = "points.jsonl", "results.parquet", "config.yaml", "manifest.json", ".lock"
REQUESTS = "requests.parquet"
"""Of a serving run: one line per request (`simulator.serving.records`)."""
USAGE = "usage.parquet"
"""Of a serving run: what ran and was held over time (`simulator.serving.usage`)."""


class RunFolder:
    """Exclusive writer of one run folder, held in `with`.

    Entering creates the folder, takes `.lock` and reads the finished points of an earlier run of the same
    experiment. Raises `InputError` when the folder cannot be written, holds another experiment or files that no
    run wrote, or is being written by someone else.
    """

    def __init__(
        self, path: Path, experiment_hash: str, config: Mapping[str, Any], manifest: Mapping[str, Any]
    ) -> None:
        self.path, self.experiment_hash, self.config, self.manifest = path, experiment_hash, config, manifest
        self.rows: dict[str, Row] = {}
        """Finished points of this folder by `point_key`."""
        self._lock: int | None = None
        self._points: FileIO | None = None
        self._created: list[Path] = []

    def __enter__(self) -> Self:
        refuse_file(self.path)
        try:
            self._created = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.path / LOCK)
            try:
                self._refuse_foreign_content()
                self.rows, whole_bytes = read_points(self.path / POINTS)
                write_atomically(self.path / CONFIG, yaml.safe_dump(dict(self.config), sort_keys=False).encode())
                self._write_manifest({"state": "unfinished"})
                self._points = open(self.path / POINTS, "ab", buffering=0)
                self._points.truncate(whole_bytes)
            except BaseException:
                self._release()
                raise
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._release()

    def append(self, rows: Iterable[Row]) -> None:
        """Add finished points and wait until they are on the disk. Raises WriteError where it is full: what was torn
        is dropped when the folder is entered again."""
        assert self._points is not None, "the run folder is not open"
        rows = list(rows)
        with writing(self.path / POINTS):
            left = memoryview(b"".join(map(point_line, rows)))
            while left:
                left = left[self._points.write(left) :]
            os.fsync(self._points.fileno())
        self.rows |= {row["point_key"]: row for row in rows}

    def finish(self, rows: Sequence[Row], summary: Mapping[str, Any]) -> None:
        """Write `results.parquet` (rows as given: grid order) and the manifest with `summary` added."""
        write_table(self.path / TABLE, rows)
        self._write_manifest({"state": "finished", **summary})

    def _write_manifest(self, summary: Mapping[str, Any]) -> None:
        document = {"experiment_hash": self.experiment_hash, **self.manifest, **summary}
        write_atomically(self.path / MANIFEST, (json.dumps(document, indent=2, allow_nan=False) + "\n").encode())

    def discard(self) -> None:
        """Take back the folders that this run created: a refused input leaves nothing behind."""
        if not self._created or self._lock is None:
            return
        for name in (POINTS, TABLE, CONFIG, MANIFEST, REQUESTS, USAGE):
            (self.path / name).unlink(missing_ok=True)
        self._release()
        for folder in self._created:
            if not any(folder.iterdir()):
                folder.rmdir()

    def _refuse_foreign_content(self) -> None:
        manifest = self.path / MANIFEST
        if manifest.exists():
            held = read_manifest(self.path).get("experiment_hash")
            if held != self.experiment_hash:
                raise InputError(
                    f"{self.path} holds another experiment ({str(held)[:8]}, this one is {self.experiment_hash[:8]}); "
                    "give another --out or remove the folder"
                )
        elif any(entry.name not in (LOCK, CONFIG) and entry.suffix != ".part" for entry in self.path.iterdir()):
            raise InputError(f"{self.path} has files but no {MANIFEST}: not a run folder; give another --out")

    def _release(self) -> None:
        if self._points is not None:
            self._points.close()
            self._points = None
        if self._lock is not None:
            (self.path / LOCK).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def _lock(path: Path) -> int:
    """Take the folder's lock; the kernel frees it when its holder dies, so a stale file does no harm.

    Raises InputError naming the process that holds it.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise InputError(f"{path.parent} is being written by {holder}; wait for it or give another --out") from None
        if path.exists() and os.path.samestat(os.fstat(handle), os.stat(path)):
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            return handle
        os.close(handle)  # the holder removed the file between open and flock: take the new one


def read_manifest(folder: Path) -> dict[str, Any]:
    """A run folder's manifest. Raises `InputError` when there is none or it is not JSON."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{folder} is not a run folder: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    if not isinstance(manifest, dict):
        raise InputError(f"{path}: not a JSON object")
    return manifest


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as Parquet: the columns of `simulator.metrics`, then any other key in alphabetical order."""
    import pyarrow as pa
    import pyarrow.json
    import pyarrow.parquet as pq

    extra = sorted({key for row in rows for key in row} - set(COLUMNS))
    names = (*COLUMNS, *extra)
    schema = pa.schema([(name, _column_type(name, {type(row.get(name)) for row in rows})) for name in names])
    # From JSON, because building arrays from Python lists makes pyarrow import pandas.
    lines = b"".join(json_line({name: row.get(name) for name in names}) for row in rows)
    table = pyarrow.json.read_json(
        pa.BufferReader(lines),
        pyarrow.json.ReadOptions(use_threads=False, block_size=len(lines) + 1),
        pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error"),
    )
    with published(path) as part:
        pq.write_table(table, part)


def _column_type(name: str, kinds: set[type]) -> Any:
    """Arrow type of a column's values, so that one that is null throughout keeps the type that it has elsewhere."""
    import pyarrow as pa

    kinds = kinds - {type(None)}
    if not kinds:
        return pa.float64() if METRICS.get(name, "") or name.endswith("_s") else pa.string()
    for accepted, arrow_type in ({bool}, pa.bool_()), ({int}, pa.int64()), ({int, float}, pa.float64()):
        if kinds <= accepted:
            return arrow_type
    return pa.string()


def write_atomically(path: Path, content: bytes) -> None:
    with published(path) as part:
        part.write_bytes(content)


@contextmanager
def published(path: Path) -> Iterator[Path]:
    """A file to write inside, renamed into place once its bytes are on the disk: readers see the old one or all of the
    new. Raises WriteError, leaving the old one, where it cannot be written."""
    part = path.with_name(f"{path.name}.part")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield part
            with open(part, "rb") as handle:
                os.fsync(handle.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
