"""Where a run is cut, and in which order its pieces, events and the CPU's acts follow each other; CUDA is faked."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import pytest

from realhw import pieces
from realhw.pieces import PieceSchedule


@dataclass
class Recorder:
    """What happened, in order; launches made while a graph is captured belong to that graph."""

    log: list[str] = field(default_factory=list)
    captured: list[str] | None = None

    def launch(self, name: str) -> None:
        assert self.captured is not None, "a launch outside every piece"
        self.captured.append(name)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()

    class Graph:
        def __init__(self, keep_graph: bool) -> None:
            assert keep_graph

        def capture_begin(self, pool: object) -> None:
            assert recorder.captured is None, "two captures at once"
            recorder.captured = self.nodes = []

        def capture_end(self) -> None:
            recorder.captured = None

        def instantiate(self) -> None:
            assert self.nodes

        def replay(self) -> None:
            recorder.log.append("+".join(self.nodes))

    class Event:
        def record(self, stream: str) -> None:
            recorder.log.append(f"{stream} records {id(self)}")

    monkeypatch.setattr(pieces.torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(pieces.torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(pieces.torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(pieces.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(pieces, "num_nodes", lambda graph: len(graph.nodes))
    monkeypatch.setattr(pieces, "new_event", Event)
    return recorder


class Stream(str):
    log: list[str]

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self} waits {id(event)}")


def make_schedule(recorder: Recorder) -> PieceSchedule:
    schedule = PieceSchedule("cpu")
    for engine in ("C", "B", "H", "D"):
        stream = Stream(engine)
        stream.log = recorder.log
        schedule._streams[engine] = stream  # type: ignore[index, assignment]
    return schedule


def named(log: list[str]) -> list[str]:
    """Events by the order in which they are first recorded."""
    ids: dict[str, str] = {}
    for entry in log:
        if " records " in entry:
            ids.setdefault(entry.split()[-1], f"event {len(ids)}")
    return [
        " ".join([*entry.split()[:-1], ids[entry.split()[-1]]]) if entry.split()[-1] in ids else entry for entry in log
    ]


def test_the_cpu_acts_after_what_it_needs_is_launched_and_before_what_waits_for_it(recorder):
    schedule = make_schedule(recorder)

    def body() -> None:
        with schedule.on("C"):
            recorder.launch("qkv")
            recorder.launch("append")
            schedule.signal("C", "ready")
            with schedule.on("B"):
                schedule.wait("B", "ready")
                recorder.launch("plan")
                schedule.signal("B", "planned")
            schedule.host("H", lambda stream: recorder.log.append(f"copies on {stream}"))
            schedule.signal("H", "arrived")
            schedule.wait("C", "never given")
            schedule.wait("C", "arrived")
            recorder.launch("attention")
            recorder.launch("ffn")

    replay = schedule.capture(body)
    assert not [entry for entry in recorder.log if "records" not in entry and "waits" not in entry]
    for _ in range(2):
        recorder.log.clear()
        replay()
        assert named(recorder.log) == [
            "qkv+append", "C records event 0", "B waits event 0", "plan", "B records event 1", "copies on H",
            "H records event 2", "C waits event 2", "attention+ffn",
        ]  # fmt: skip


def test_a_fault_leaves_no_capture_open(recorder):
    schedule = make_schedule(recorder)

    def fault() -> None:
        with schedule.on("C"):
            recorder.launch("qkv")
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        schedule.capture(fault)
    assert recorder.captured is None
    schedule.capture(lambda: None)()
    assert recorder.log == []
