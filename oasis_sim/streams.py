"""Standard streams as a command line meets them: closed, full, without a reader, or of a narrow encoding."""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import Any, TextIO


class _Descriptor(io.FileIO):
    """An open descriptor. A reader that went away (`| head`) is no fault: the rest is written to nowhere, so that the
    verb ends with its own exit code. Any other fault raises InputError once, on stderr never."""

    def __init__(self, number: int, what: str, forgiving: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self._what, self._forgiving = what, forgiving

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            _to_nowhere(self.fileno())
            if not (self._forgiving or isinstance(error, BrokenPipeError)):
                from traces.errors import InputError

                raise InputError(f"{self._what} cannot be written: {error.strerror}") from error
            return memoryview(data).nbytes


def prepare_streams() -> None:
    """Make the process's own stdin, stdout and stderr usable whatever they are; others' replacements are left alone."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, so that no file of ours gets it
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    if sys.stdout is sys.__stdout__:
        sys.stdout = _wrapped(sys.stdout, 1, "standard output", forgiving=False)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _wrapped(sys.stderr, 2, "standard error", forgiving=True)


def _wrapped(stream: TextIO | None, number: int, what: str, forgiving: bool) -> TextIO:
    encoding = stream.encoding if stream is not None else "utf-8"
    is_utf8 = codecs.lookup(encoding).name == "utf-8"
    return io.TextIOWrapper(
        io.BufferedWriter(_Descriptor(number, what, forgiving)),
        encoding=encoding,
        errors="surrogateescape" if is_utf8 else PLAIN,  # a file's name may hold bytes that are no UTF-8
        line_buffering=forgiving or (stream is not None and stream.isatty()),
    )


PLAIN = "oasis-sim-plain"
_PLAIN_SIGNS = str.maketrans("·–−—×★█…→━│", "---" + "-x*#.>-|")
"""Signs of our cards and tables, one character each so that columns stay in line."""


def _plain(error: UnicodeError) -> tuple[str, int]:
    """What an encoding cannot say becomes the nearest plain sign, else a question mark."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].translate(_PLAIN_SIGNS)
    return "".join(sign if sign.isascii() else "?" for sign in text), error.end


codecs.register_error(PLAIN, _plain)


def _to_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
