from __future__ import annotations

from collections.abc import Callable

import pytest

from simulator import experiment as experiments
from tests.simulator.serving.profiles import changed


@pytest.fixture(autouse=True)
def _synthetic(synthetic: None) -> None:
    """Every test here is about the synthetic trace."""


@pytest.fixture
def with_hardware(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Scales figures of every profile that is loaded from then on, by the names that `changed` takes."""
    original = experiments.load_hardware

    def use(**factors: float) -> None:
        monkeypatch.setattr(experiments, "load_hardware", lambda name: changed(original(name), **factors))

    return use
