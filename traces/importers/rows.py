"""Reading text files row by row so that a fault names its file, line and field."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from traces.errors import InputError

LARGEST_COUNT = 2**62
"""Counts and ids beyond this cannot be held in int64 arrays with room to add them up."""

PACKED = {
    b"\x1f\x8b": "compressed by gzip",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "Parquet",
}
"""First bytes of what request files come packed in."""


@dataclass(frozen=True, slots=True)
class Row:
    """Fields of one line: text from CSV, JSON values from JSONL."""

    file: str
    line: int
    fields: Mapping[str, object]

    def error(self, field: str, problem: str) -> InputError:
        return InputError(f"{self.file}, line {self.line}, field {field}: {problem}")

    def get(self, field: str) -> object:
        if field not in self.fields:
            raise self.error(field, f"missing; the line has {', '.join(self.fields) or 'no fields'}")
        return self.fields[field]

    def count(self, field: str, minimum: int) -> int:
        """A whole number >= `minimum`; 12.0, true and '1_000' are not whole numbers."""
        value = self.get(field)
        if isinstance(value, str):
            text = value.strip()
            digits = text.removeprefix("-")
            if digits.isascii() and digits.isdigit() and len(digits) < 20:
                value = int(text)
        return self._whole(field, value, minimum)

    def prefix_ids(self, field: str, prompt_tokens: int, block_tokens: int) -> tuple[int, ...]:
        """A JSON list of block ids >= 0, one for each block of the prompt, the last of which may be partial."""
        values = self.get(field)
        if not isinstance(values, list):
            raise self.error(field, f"expected a list of block ids, got {_shown(values)}")
        num_blocks = -(-prompt_tokens // block_tokens)
        if len(values) != num_blocks:
            raise self.error(
                field,
                f"expected {num_blocks} ids for {prompt_tokens} tokens in blocks of {block_tokens}, got {len(values)}",
            )
        return tuple(self._whole(f"{field}[{index}]", value, 0) for index, value in enumerate(values))

    def time(self, field: str) -> float:
        """A finite number >= 0, in the file's unit."""
        value = self.get(field)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise self.error(field, f"expected a time, got {_shown(value)}") from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(field, f"expected a time, got {_shown(value)}")
        if not abs(value) <= LARGEST_COUNT or not math.isfinite(value):
            raise self.error(field, f"expected a finite time, got {_shown(value)}")
        if value < 0:
            raise self.error(field, f"time must be >= 0, got {value}")
        return float(value)

    def _whole(self, field: str, value: object, minimum: int) -> int:
        if type(value) is not int or not minimum <= value <= LARGEST_COUNT:
            too_large = str(value).isdecimal() and int(str(value)[:30]) > LARGEST_COUNT
            wanted = f"at most {LARGEST_COUNT:,}" if too_large else f">= {minimum}"
            raise self.error(field, f"expected a whole number {wanted}, got {_shown(value)}")
        return value


class ArrivalOrder:
    """Refuses a time that is earlier than the one of the row before."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._latest = -math.inf
        self._latest_line = 0

    def check(self, row: Row, time: float) -> None:
        """`time` in any unit, the same for all rows."""
        if time < self._latest:
            shown = row.get(self._field)
            raise row.error(
                self._field, f"times must not decrease: {shown} is earlier than the time of line {self._latest_line}"
            )
        self._latest, self._latest_line = time, row.line


def csv_rows(path: Path) -> Iterator[Row]:
    """Rows of a comma-separated file whose first line names the columns; empty lines are passed over."""
    with _text(path, newline="") as handle:
        reader = csv.reader(handle, strict=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            if header and header[0].startswith("{"):
                raise InputError(f"{path}: JSON lines are read from a file that ends in .jsonl, .ndjson or .json")
            if len(set(header)) != len(header):
                raise InputError(f"{path}, line 1: a column is named twice in {', '.join(header)}")
            for values in reader:
                if not values:
                    continue
                row = Row(str(path), reader.line_num, dict(zip(header, values, strict=False)))
                if len(values) != len(header):
                    field = header[len(values)] if len(values) < len(header) else f"{len(header) + 1}"
                    raise row.error(field, f"expected {len(header)} columns, got {len(values)}")
                yield row
        except csv.Error as problem:
            raise InputError(f"{path}, line {reader.line_num}: not comma-separated text: {problem}") from None
        except UnicodeDecodeError:
            raise _not_text(path, reader.line_num) from None


def jsonl_rows(path: Path) -> Iterator[Row]:
    """One JSON object a line; empty lines are passed over."""
    with _text(path) as handle:
        yield from json_lines(handle, path)


def json_lines(lines: Iterable[str], source: Path) -> Iterator[Row]:
    """The same of lines that are open already; `source` is named in errors."""
    line = 0
    try:
        for line, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            try:
                fields = json.loads(text)
            except (ValueError, RecursionError) as problem:
                raise InputError(f"{source}, line {line}: not JSON: {problem}") from None
            if not isinstance(fields, dict):
                raise InputError(f"{source}, line {line}: expected a JSON object, got {_shown(fields)}")
            yield Row(str(source), line, fields)
    except UnicodeDecodeError:
        raise _not_text(source, line) from None


@contextmanager
def _text(path: Path, newline: str | None = None) -> Iterator[IO[str]]:
    try:
        handle = path.open(encoding="utf-8-sig", newline=newline)
    except OSError as problem:
        raise InputError(f"{path}: cannot be read: {problem.strerror}") from None
    with handle:
        yield handle


def _not_text(path: Path, line: int) -> InputError:
    """What a file that is no text is, by its first bytes; else after which line the text ends."""
    with path.open("rb") as handle:
        first = handle.read(max(map(len, PACKED)))
    for magic, kind in PACKED.items():
        if first.startswith(magic):
            return InputError(f"{path}: {kind}, which is not read; unpack it to CSV or JSONL text first")
    return InputError(f"{path}{f', after line {line}' if line else ''}: not UTF-8 text")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
