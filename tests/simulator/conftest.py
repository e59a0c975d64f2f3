from __future__ import annotations

import pytest

from tests.simulator.synthetic_trace import open_as_any, synthetic_trace


@pytest.fixture
def synthetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experiments open the synthetic trace."""
    open_as_any(monkeypatch, synthetic_trace())
