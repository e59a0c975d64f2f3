"""Azure LLM inference traces: CSV with `TIMESTAMP` (date and time), `ContextTokens` and `GeneratedTokens`.

Source: Azure/AzurePublicDataset, the LLM inference traces of 2023 (seven decimals, no zone) and 2024 (zone +00:00).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from traces.importers.rows import ArrivalOrder, Row, csv_rows
from traces.workload import Request

_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")
_NS_PER_S = 10**9


def read_azure(path: Path) -> Iterator[Request]:
    """Requests in file order; arrival_s counts from the first one. Raises InputError naming file, line and field."""
    order = ArrivalOrder("TIMESTAMP")
    first_ns: int | None = None
    for row in csv_rows(path):
        timestamp_ns = _timestamp_ns(row)
        order.check(row, timestamp_ns)
        if first_ns is None:
            first_ns = timestamp_ns
        arrival_s = (timestamp_ns - first_ns) / _NS_PER_S
        yield Request(arrival_s, row.count("ContextTokens", 1), row.count("GeneratedTokens", 1))


def _timestamp_ns(row: Row) -> int:
    """Nanoseconds since 1970 in whole numbers, which keep decimals that a datetime would cut; no zone means UTC."""
    text = str(row.get("TIMESTAMP")).strip()
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        raise row.error("TIMESTAMP", f"expected YYYY-MM-DD hh:mm:ss[.fraction][zone], got {text!r}")
    seconds, fraction, zone = match.groups()
    try:
        moment = datetime.fromisoformat(seconds + (zone or ""))
    except ValueError as problem:
        raise row.error("TIMESTAMP", f"no such time: {text!r} ({problem})") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp()) * _NS_PER_S + int((fraction or "0").ljust(9, "0"))
