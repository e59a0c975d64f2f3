"""BurstGPT traces: CSV with `Timestamp` (s), `Request tokens` and `Response tokens` among other columns.

Source: HPMLL/BurstGPT README (schema; a row whose response has 0 tokens is a failed call). Later releases add
`Session ID` and `Elapsed time`; columns are found by name, so both layouts are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from traces.importers.rows import ArrivalOrder, csv_rows
from traces.workload import Request


def read_burstgpt(path: Path) -> Iterator[Request]:
    """Every row in file order, failed calls (0 output tokens) included; arrival_s counts from the first row.

    Raises InputError naming file, line and field.
    """
    order = ArrivalOrder("Timestamp")
    first_s: float | None = None
    for row in csv_rows(path):
        timestamp_s = row.time("Timestamp")
        order.check(row, timestamp_s)
        if first_s is None:
            first_s = timestamp_s
        yield Request(timestamp_s - first_s, row.count("Request tokens", 0), row.count("Response tokens", 0))
