"""The errors a user of oasis-sim can meet; each message is one line that says where and what."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class OasisError(Exception):
    """Base of every expected error. `exit_code` is what the command line exits with."""

    exit_code = 2


class InputError(OasisError):
    """A flag, file, key or value that cannot be used; names the place and the nearest valid choice."""


class WriteError(InputError):
    """A file that cannot be written: a full disk, a folder without permission."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A fault of the file system inside, on the way to `path`, becomes a WriteError that names it."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise WriteError(f"{path}: cannot be written ({reason})") from error


def refuse_file(path: Path, flag: str = "") -> None:
    """Raises InputError for a file where a folder of results is to be; `flag` as it was given."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{f'{flag} ' if flag else ''}{path}: is a file; results go into a folder")


class EnvironmentMissing(OasisError):
    """Something this machine lacks (a GPU, an optional dependency)."""


class TraceError(OasisError):
    """A trace that cannot be trusted: file, array and (where there is one) index of the fault."""

    def __init__(self, file: str, array: str, problem: str, index: tuple[int, ...] | None = None) -> None:
        super().__init__(file, array, problem, index)
        self.file, self.array, self.problem, self.index = file, array, problem, index

    def __str__(self) -> str:
        at = "" if self.index is None else "[" + ", ".join(map(str, self.index)) + "]"
        where = f"{self.array}{at}: " if self.array else ""
        return f"{self.file}: {where}{self.problem}"


class CapacityError(OasisError):
    """A batch that a memory pool cannot hold: pool, bytes needed, bytes there are, largest batch that fits."""

    def __init__(self, pool: str, need_bytes: int, have_bytes: int, largest_batch_size: int) -> None:
        super().__init__(pool, need_bytes, have_bytes, largest_batch_size)
        self.pool, self.need_bytes, self.have_bytes = pool, need_bytes, have_bytes
        self.largest_batch_size = largest_batch_size

    def __str__(self) -> str:
        need, have = (f"{num_bytes / 2**30:.2f} GiB" for num_bytes in (self.need_bytes, self.have_bytes))
        if need == have:
            need, have = f"{self.need_bytes:,} bytes", f"{self.have_bytes:,} bytes"
        return (
            f"{self.pool} cannot hold the batch: need {need}, have {have}; "
            f"the largest batch that fits is {self.largest_batch_size}"
        )


class CheckFailed(OasisError):
    """A check that ran and did not hold (`validate --check`, `trace check --strict`)."""

    exit_code = 1
