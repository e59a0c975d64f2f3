"""Which request-file formats there are, and reading one of them whole or as a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from traces.errors import InputError
from traces.importers import azure, burstgpt, mooncake, plain
from traces.importers.rows import csv_rows, jsonl_rows
from traces.workload import Request, Workload


@dataclass(frozen=True, slots=True)
class Format:
    read: Callable[[Path], Iterator[Request]]
    fields: tuple[str, ...]
    """Fields that every row has; a file whose first row has them all is of this format."""
    jsonl: bool
    hash_block_tokens: int | None = None
    drop_empty: bool = False
    """Whether rows without a prompt or an output are failed calls to leave out, or faults."""


FORMATS = {
    "mooncake": Format(
        mooncake.read_mooncake, ("timestamp", "input_length", "output_length"), True, mooncake.BLOCK_TOKENS
    ),
    "azure": Format(azure.read_azure, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), False),
    "burstgpt": Format(
        burstgpt.read_burstgpt, ("Timestamp", "Request tokens", "Response tokens"), False, drop_empty=True
    ),
    "csv": Format(plain.read_plain_csv, ("arrival_s", "prompt_tokens", "output_tokens"), False),
    "jsonl": Format(plain.read_plain_jsonl, ("arrival_s", "prompt_tokens", "output_tokens"), True, plain.BLOCK_TOKENS),
}


def detect_format(path: Path) -> str:
    """The format whose fields the first row has. Raises InputError when none fits."""
    jsonl = path.suffix.lower() in (".jsonl", ".json", ".ndjson")
    first = next(jsonl_rows(path) if jsonl else csv_rows(path), None)
    if first is None:
        raise InputError(f"{path}: no requests")
    for name, form in FORMATS.items():
        if form.jsonl == jsonl and all(field in first.fields for field in form.fields):
            return name
    known = "; ".join(f"{name}: {', '.join(form.fields)}" for name, form in FORMATS.items() if form.jsonl == jsonl)
    raise InputError(f"{path}: unknown request format with fields {', '.join(first.fields)}; known are {known}")


def stream_requests(path: str | Path, format: str = "auto") -> Iterator[Request]:
    """Requests of a file one by one, in constant memory.

    Raises InputError for an unknown format now, and for a faulty line (file, line, field) when it is reached.
    """
    return FORMATS[_resolve(Path(path), format)].read(Path(path))


def load_workload(path: str | Path, format: str = "auto", max_requests: int | None = None) -> Workload:
    """A file as arrays: its first `max_requests` rows, or all. Raises InputError (file, line, field)."""
    if max_requests is not None and max_requests < 1:
        raise InputError(f"max_requests must be >= 1, got {max_requests}")
    path = Path(path)
    form = FORMATS[_resolve(path, format)]
    return Workload.from_requests(
        path.name,
        islice(form.read(path), max_requests),
        hash_block_tokens=form.hash_block_tokens,
        drop_empty=form.drop_empty,
    )


def _resolve(path: Path, format: str) -> str:
    if format == "auto":
        return detect_format(path)
    if format not in FORMATS:
        raise InputError(f"unknown request format {format!r}; choose from auto, {', '.join(FORMATS)}")
    return format
