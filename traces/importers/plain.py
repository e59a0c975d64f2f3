"""The project's own request files: CSV or JSONL of `arrival_s`, `prompt_tokens`, `output_tokens`.

JSONL may add `hash_ids`, one id per 512-token block of the prompt, on all lines or on none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from traces.importers.rows import ArrivalOrder, Row, csv_rows, jsonl_rows
from traces.workload import Request

BLOCK_TOKENS = 512


def read_plain_csv(path: Path) -> Iterator[Request]:
    """Requests in file order; arrival_s keeps the file's own zero. Raises InputError naming file, line and field."""
    order = ArrivalOrder("arrival_s")
    for row in csv_rows(path):
        yield _request(row, order, hashed=False)


def read_plain_jsonl(path: Path) -> Iterator[Request]:
    """Requests in file order; arrival_s keeps the file's own zero. Raises InputError naming file, line and field."""
    order = ArrivalOrder("arrival_s")
    hashed: bool | None = None
    for row in jsonl_rows(path):
        if hashed is None:
            hashed = "hash_ids" in row.fields
        elif hashed != ("hash_ids" in row.fields):
            raise row.error("hash_ids", "must be on all lines or on none")
        yield _request(row, order, hashed)


def _request(row: Row, order: ArrivalOrder, hashed: bool) -> Request:
    arrival_s = row.time("arrival_s")
    order.check(row, arrival_s)
    prompt_tokens = row.count("prompt_tokens", 1)
    hash_ids = row.prefix_ids("hash_ids", prompt_tokens, BLOCK_TOKENS) if hashed else None
    return Request(arrival_s, prompt_tokens, row.count("output_tokens", 1), hash_ids)
