"""What happened to each request: streamed to a Parquet file, and kept as a few numbers each for quantiles."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from simulator.serving.request_state import RequestState
from simulator.serving.token_gaps import TokenGaps
from simulator.serving.work import Batch
from traces.errors import writing

ROW_GROUP_REQUESTS = 8_192
COLUMNS = {
    "request": "int64",
    "arrival_s": "double",
    "prompt_tokens": "int64",
    "output_tokens": "int64",
    "status": "string",
    "replica": "int64",
    "prefill_replica": "int64",
    "queue_s": "double",
    "ttft_s": "double",
    "tpot_s": "double",
    "e2e_s": "double",
    "second_token_s": "double",
    "handover_s": "double",
    "network_bytes": "int64",
    "reused_tokens": "int64",
    "num_preemptions": "int64",
}
"""Columns of `requests.parquet`; times are null for a request that was refused, `tpot_s` and
`second_token_s` (from arrival) for one output token; what only disaggregation has is null without it."""
TIMES = ("queue_s", "ttft_s", "tpot_s", "e2e_s", "second_token_s", "handover_s")
OK, NEVER_FITS = "ok", "never_fits"


class RequestWriter:
    """Appends rows to a Parquet file, a row group at a time; the file is whole once the writer is left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_name(f"{path.name}.part")
        self._rows: dict[str, list[Any]] = {name: [] for name in COLUMNS}

    def __enter__(self) -> Self:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in COLUMNS.items()])
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = pq.ParquetWriter(self._part, self._schema)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                self._flush()
            with suppress(OSError) if error is not None else writing(self.path):
                self._file.close()
                if error is None:
                    self._part.replace(self.path)
        finally:
            self._file.is_open = False  # else pyarrow would try again, and complain, as the object goes
            self._part.unlink(missing_ok=True)

    def write(self, row: dict[str, Any]) -> None:
        for name, values in self._rows.items():
            values.append(row[name])
        if len(self._rows["request"]) == ROW_GROUP_REQUESTS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._rows["request"]:
            with writing(self.path):
                self._file.write_table(pa.Table.from_pydict(self._rows, schema=self._schema))
            self._rows = {name: [] for name in COLUMNS}


class RequestLog:
    """Counts, times and time averages of a run, in bytes per request that do not grow with its tokens."""

    def __init__(
        self,
        slo_ttft_s: float = float("inf"),
        slo_tpot_s: float = float("inf"),
        write: Callable[[dict[str, Any]], None] | None = None,
        on_finished: Callable[[int], None] | None = None,
    ) -> None:
        self.clock: Callable[[], float] = lambda: 0.0
        """Now, in seconds; the loop sets it."""
        self._write, self._on_finished = write, on_finished
        self._times = {name: array("d") for name in TIMES}
        self.gaps = TokenGaps()
        """Between tokens of one request, of all requests."""
        self.num_arrived = self.num_finished = self.num_refused = 0
        self.num_met_slo = 0
        self.output_tokens = self.prompt_tokens = 0
        self.first_arrival_s: float | None = None
        self.last_arrival_s = 0.0
        self._finished = {name: array("d") for name in ("arrival_s", "output_tokens")}
        self.last_finish_s = 0.0
        self.first_refused: RequestState | None = None
        self.slo_ttft_s, self.slo_tpot_s = slo_ttft_s, slo_tpot_s
        self.num_iterations = self.sum_decoding = self.peak_decoding = 0
        self.request_seconds = 0.0
        """Integral of the number of requests in the system over time."""
        self._in_system, self._since_s = 0, 0.0

    def times_s(self, name: str) -> NDArray[np.float64]:
        """One of TIMES of all finished requests that have one."""
        return np.frombuffer(self._times[name], np.float64)

    def finished(self, name: str) -> NDArray[np.float64]:
        """`arrival_s` or `output_tokens` of all finished requests, in the order of `times_s("ttft_s")`."""
        return np.frombuffer(self._finished[name], np.float64)

    def arrive(self, request: RequestState) -> None:
        self.num_arrived += 1
        self.last_arrival_s = request.arrival_s
        if self.first_arrival_s is None:
            self.first_arrival_s = request.arrival_s
        self._count(+1)

    def refuse(self, request: RequestState) -> None:
        self.num_refused += 1
        self.first_refused = self.first_refused or request
        self._count(-1)
        self._record(request, NEVER_FITS, dict.fromkeys(self._times))

    def iteration(self, batch: Batch) -> None:
        self.num_iterations += 1
        self.sum_decoding += batch.num_decoding
        self.peak_decoding = max(self.peak_decoding, batch.num_decoding)

    def finish(self, request: RequestState) -> None:
        started, first, finished = request.started_s, request.first_token_s, request.finished_s
        assert started is not None
        assert first is not None
        assert finished is not None
        times: dict[str, float | None] = {
            "queue_s": started - request.arrival_s,
            "ttft_s": first - request.arrival_s,
            "tpot_s": (finished - first) / (request.output_tokens - 1) if request.output_tokens > 1 else None,
            "e2e_s": finished - request.arrival_s,
            "second_token_s": None if request.second_token_s is None else request.second_token_s - request.arrival_s,
            "handover_s": request.handover_s,
        }
        for name, value in times.items():
            if value is not None:
                self._times[name].append(value)
        self.num_finished += 1
        tpot_s = times["tpot_s"]
        self.num_met_slo += first - request.arrival_s <= self.slo_ttft_s and (tpot_s or 0.0) <= self.slo_tpot_s
        for name, values in self._finished.items():
            values.append(getattr(request, name))
        self.output_tokens += request.output_tokens
        self.prompt_tokens += request.prompt_tokens
        self.last_finish_s = finished
        self._count(-1)
        self._record(request, OK, times)
        if self._on_finished is not None:
            self._on_finished(self.num_finished + self.num_refused)

    def _count(self, change: int) -> None:
        now_s = self.clock()
        self.request_seconds += self._in_system * (now_s - self._since_s)
        self._in_system, self._since_s = self._in_system + change, now_s

    def _record(self, request: RequestState, status: str, times: dict[str, float | None]) -> None:
        if self._write is None:
            return
        self._write(
            {
                "request": request.index,
                "arrival_s": request.arrival_s,
                "prompt_tokens": request.prompt_tokens,
                "output_tokens": request.output_tokens,
                "status": status,
                "replica": request.replica,
                "prefill_replica": request.prefill_replica,
                "network_bytes": None if request.prefill_replica is None else request.network_bytes,
                "reused_tokens": request.reused_tokens,
                "num_preemptions": request.num_preemptions,
                **times,
            }
        )
