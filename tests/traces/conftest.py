"""Fixtures of the trace tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.traces.tiny import group_attributes, record_of, trace_attributes, truth_of
from traces.writer import TraceWriter


@pytest.fixture
def trace_folder(tmp_path: Path) -> Path:
    """70 steps (one full chunk and a short one) at block sizes 4, 8 (mass derived) and 5 (mass of ranked blocks)."""
    path = tmp_path / "tiny.zarr"
    with TraceWriter(path, trace_attributes()) as writer:
        group = writer.group("reasoning", group_attributes(70))
        for truth in truth_of(70):
            group.append(record_of(truth))
    return path
