from __future__ import annotations

import pytest

from simulator import experiment as experiments
from tests.simulator.synthetic_trace import synthetic_trace


@pytest.fixture(autouse=True)
def _synthetic(monkeypatch):
    trace = synthetic_trace()
    monkeypatch.setattr(experiments, "_open", lambda location: trace)
    monkeypatch.setattr(experiments, "resolve_trace", lambda name: name)
