"""Two GPUs of one host: copies between them, and both host links at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from realhw.device import new_event, new_stream
from realhw.graph_timer import Timing, summarise
from realhw.measurement import Recorder

PEER_COPIES = {16 << 20: 64, 1 << 30: 4}
"""Bytes of a copy, and back-to-back copies per repetition: each lasts longer than the CPU takes to submit it."""
LINK_COPY_BYTES, LINK_COPIES = 16 << 20, 64
REPETITIONS = 7


def bench_gpu_pair(recorder: Recorder, pinned_bytes: int) -> None:
    """NVLink (or PCIe) peer copies from GPU 0 to GPU 1, and pinned copies of both GPUs in the same moment."""
    for size, copies in PEER_COPIES.items():
        source = torch.empty(size, dtype=torch.uint8, device="cuda:0").random_()
        target = torch.empty(size, dtype=torch.uint8, device="cuda:1")
        timing = _timed([(0, lambda t=target, s=source: t.copy_(s, non_blocking=True))], copies)  # type: ignore[misc]
        recorder.add("peer_copy", timing.median_s, timing.spread_s, timing.repetitions, size)
    lanes = max(1, min(LINK_COPIES, pinned_bytes // 4 // LINK_COPY_BYTES))
    host = [torch.empty(lanes, LINK_COPY_BYTES, dtype=torch.uint8, pin_memory=True).fill_(gpu) for gpu in range(2)]
    device = [torch.empty(LINK_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in range(2)]
    for direction in ("h2d", "d2h"):
        for gpus in ((0,), (1,), (0, 1)):
            timing = _timed([(gpu, _link_copy(host[gpu], device[gpu], direction)) for gpu in gpus], LINK_COPIES)
            recorder.add(
                "copy_two_gpus", timing.median_s, timing.spread_s, timing.repetitions, len(gpus) * LINK_COPY_BYTES,
                direction=direction, gpus=list(gpus),
            )  # fmt: skip


def _link_copy(host: torch.Tensor, device: torch.Tensor, direction: str) -> Callable[[], None]:
    turn = 0

    def copy() -> None:
        nonlocal turn
        lane = host[turn % len(host)]
        turn += 1
        source, target = (lane, device) if direction == "h2d" else (device, lane)
        target.copy_(source, non_blocking=True)

    return copy


def _timed(copies: list[tuple[int, Callable[[], object]]], calls: int) -> Timing:
    """Seconds per round of one copy on each of the GPUs, `calls` rounds back to back: that of the slower GPU."""
    samples = []
    streams = []
    for gpu, _ in copies:
        with torch.cuda.device(gpu):
            streams.append(new_stream())
    for _ in range(REPETITIONS + 1):
        marks = []
        for (gpu, _), stream in zip(copies, streams, strict=True):
            with torch.cuda.device(gpu):
                torch.cuda.synchronize()
                marks.append((new_event(timing=True), new_event(timing=True)))
                marks[-1][0].record(stream)
        for call in range(calls):
            for (gpu, copy), stream, (_, end) in zip(copies, streams, marks, strict=True):
                with torch.cuda.device(gpu), torch.cuda.stream(stream):
                    copy()
                    if call == calls - 1:
                        end.record(stream)
        for gpu, _ in copies:
            torch.cuda.synchronize(gpu)
        samples.append(max(start.elapsed_time(end) * 1e-3 for start, end in marks))
    return summarise(samples[1:], calls)
