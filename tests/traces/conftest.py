"""Fixtures of the trace tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.traces.tiny import group_attributes, record_of, trace_attributes, truth_of
from traces.writer import TraceWriter


@pytest.fixture(scope="session")
def written_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written") / "tiny.zarr"
    with TraceWriter(path, trace_attributes()) as writer:
        group = writer.group("reasoning", group_attributes(70))
        for truth in truth_of(70):
            group.append(record_of(truth))
    return path


@pytest.fixture
def trace_folder(written_trace: Path, tmp_path: Path) -> Path:
    """A fresh copy of 70 steps (one full chunk and a short one) at block sizes 4, 8 (mass derived from 4) and 5
    (mass of ranked blocks only)."""
    return Path(shutil.copytree(written_trace, tmp_path / "tiny.zarr"))
