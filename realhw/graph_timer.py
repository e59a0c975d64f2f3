"""Timing inside captured CUDA graphs: many launches over rotating buffers, between events that the graph records."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from realhw.device import new_event, new_stream, require_gpu

Launch = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Timing:
    """Median and interquartile range over the replays of a graph, seconds per launch."""

    median_s: float
    spread_s: float
    repetitions: int


@dataclass(frozen=True, slots=True)
class Branch:
    """Launches of one stream of a graph: `calls` of them, taken in turn from `launches` (one per buffer set)."""

    launches: Sequence[Launch]
    calls: int
    priority: int = 0
    """CUDA stream priority; negative runs first."""

    def run(self) -> None:
        for launch in itertools.islice(itertools.cycle(self.launches), self.calls):
            launch()


def summarise(seconds: Sequence[float] | np.ndarray, calls: int = 1) -> Timing:
    """Timing of samples that each hold `calls` launches."""
    values = np.asarray(seconds, dtype=np.float64) / calls
    low, mid, high = np.percentile(values, [25, 50, 75])
    return Timing(float(mid), float(high - low), len(values))


def run_branches(branches: Sequence[Branch], repetitions: int) -> np.ndarray:
    """Capture the branches side by side in one graph and replay it: seconds [repetitions, branches] of each branch.

    Every launch runs once before the capture, so that compilation stays out. One replay is thrown away.
    """
    _launch_once(branches)
    main = new_stream()
    streams = [main] + [new_stream(branch.priority) for branch in branches[1:]]
    marks = [_new_marks(2) for _ in branches]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=main):
        fork = _recorded(main)
        for branch, stream, (start, end) in zip(branches, streams, marks, strict=True):
            with torch.cuda.stream(stream):
                stream.wait_event(fork)
                start.record(stream)
                branch.run()
                end.record(stream)
        _join(main, streams[1:])
    return _replayed(graph, marks, repetitions)


def run_rounds(branches: Sequence[Branch], rounds: int, repetitions: int, joins: bool = False) -> np.ndarray:
    """Capture rounds that start the branches together and end when all have: seconds from the start of a round to the
    end of each branch, [repetitions * rounds, branches]. Each round goes on where the one before left the launches.

    joins: the first branch also waits for a launch of one more stream that ended a round ago, as attention does for
    blocks that have long arrived, and is launched last; what waits for two starts microseconds after what waits for
    one.
    Every launch runs once before the capture, so that compilation stays out. One replay is thrown away.
    """
    _launch_once(branches)
    flag, third = torch.zeros(1024, device="cuda").add_(1), new_stream()
    arrived: torch.cuda.Event | None = None
    streams = [new_stream(branch.priority) for branch in branches]
    turns = [itertools.cycle(branch.launches) for branch in branches]
    marks = [_new_marks(1 + len(branches)) for _ in range(rounds)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=streams[0]):
        for begin, *ends in marks:
            begin.record(streams[0])
            fork = _recorded(streams[0])
            if joins:
                if arrived is not None:
                    streams[0].wait_event(arrived)
                with torch.cuda.stream(third):
                    third.wait_event(fork)
                    flag.add_(1)
                    arrived = _recorded(third)
            lanes = list(zip(branches, turns, streams, ends, strict=True))
            for branch, turn, stream, end in reversed(lanes) if joins else lanes:
                with torch.cuda.stream(stream):
                    stream.wait_event(fork)
                    for launch in itertools.islice(turn, branch.calls):
                        launch()
                    end.record(stream)
            _join(streams[0], streams[1:])
        if arrived is not None:
            streams[0].wait_event(arrived)
    spans = [(begin, end) for begin, *ends in marks for end in ends]
    return _replayed(graph, spans, repetitions).reshape(-1, len(branches))


def time_launches(launches: Sequence[Launch], calls: int, repetitions: int = 15) -> Timing:
    """Seconds per launch of `calls` back-to-back launches in a graph, rotating over `launches`."""
    return summarise(run_branches([Branch(launches, calls)], repetitions)[:, 0], calls)


def time_behind_plans(launches: Sequence[Launch], priority: int, repetitions: int = 5) -> Timing:
    """Seconds per launch on a stream where each waits for a launch of another stream, as a gather for its plan."""
    _launch_once([Branch(launches, len(launches))])
    plan = torch.zeros(1024, device="cuda").add_(1)
    main, plans, stream = new_stream(), new_stream(), new_stream(priority)
    start, end = _new_marks(2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=main):
        fork = _recorded(main)
        plans.wait_event(fork)
        stream.wait_event(fork)
        start.record(stream)
        for launch in launches:
            with torch.cuda.stream(plans):
                plan.add_(1)
                planned = _recorded(plans)
            with torch.cuda.stream(stream):
                stream.wait_event(planned)
                launch()
        end.record(stream)
        _join(main, (plans, stream))
    return summarise(_replayed(graph, [(start, end)], repetitions)[:, 0], len(launches))


def _new_marks(count: int) -> list[torch.cuda.Event]:
    """Events that a graph records and the host reads."""
    return [new_event(timing=True, external=True) for _ in range(count)]


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = new_event()
    event.record(stream)
    return event


def _join(main: torch.cuda.Stream, streams: Sequence[torch.cuda.Stream]) -> None:
    """`main` waits for all that the streams have been given."""
    for stream in streams:
        main.wait_event(_recorded(stream))


def _replayed(graph: torch.cuda.CUDAGraph, spans: Sequence[Sequence[torch.cuda.Event]], repetitions: int) -> np.ndarray:
    """Seconds [repetitions, spans] between start and end of each; one replay more is thrown away."""
    samples = np.empty((repetitions + 1, len(spans)))
    for i in range(repetitions + 1):
        graph.replay()
        torch.cuda.synchronize()
        samples[i] = [start.elapsed_time(end) * 1e-3 for start, end in spans]
    return samples[1:]


def _launch_once(branches: Sequence[Branch]) -> None:
    require_gpu()
    for branch in branches:
        for launch in branch.launches:
            launch()
    torch.cuda.synchronize()
