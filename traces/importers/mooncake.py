"""Mooncake request traces: JSONL with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`.

Source: kvcache-ai/Mooncake, FAST25-release (conversation, tool-and-agent and synthetic traces). An id stands for a
512-token block together with everything before it, and the last block of a prompt may be partial: len(hash_ids) =
ceil(input_length / 512) on every row. The conversation trace is stamped in batches about 3 s apart: see
`traces.arrivals.spread_batches` before drawing any conclusion about queueing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from traces.importers.rows import ArrivalOrder, jsonl_rows
from traces.workload import Request

BLOCK_TOKENS = 512
_MS_PER_S = 1000


def read_mooncake(path: Path) -> Iterator[Request]:
    """Requests in file order; arrival_s keeps the file's own zero. Raises InputError naming file, line and field."""
    order = ArrivalOrder("timestamp")
    for row in jsonl_rows(path):
        timestamp_ms = row.time("timestamp")
        order.check(row, timestamp_ms)
        prompt_tokens = row.count("input_length", 1)
        hash_ids = row.prefix_ids("hash_ids", prompt_tokens, BLOCK_TOKENS)
        yield Request(timestamp_ms / _MS_PER_S, prompt_tokens, row.count("output_length", 1), hash_ids)
