"""Step-constant link shares against shares that change with every transfer."""

from __future__ import annotations

import pytest

from simulator import experiment as experiments
from simulator.experiment import expand
from simulator.shared_link_error import shared_link_error
from tests.simulator.synthetic_trace import synthetic_trace


@pytest.fixture(autouse=True)
def _synthetic(monkeypatch):
    trace = synthetic_trace()
    monkeypatch.setattr(experiments, "_open", lambda location: trace)
    monkeypatch.setattr(experiments, "resolve_trace", lambda name: name)


@pytest.mark.parametrize(
    ("numa", "num_gpus", "batch"), [("local", 2, 16), ("far", 4, 32), ("far", 8, 16), ("far", 8, 64)]
)
def test_difference_is_small(numa, num_gpus, batch):
    (experiment,) = expand(
        {
            "trace": "synthetic",
            "trace_group": "long",
            "placement.host_numa": numa,
            "placement.num_gpus": num_gpus,
            "workload.batch_size": batch,
            "workload.output_tokens": 16,
            "policy.fetch_cap": 0.1,
        },
        {},
    )
    measured = shared_link_error(experiment)
    assert abs(measured.error) <= 0.02
    assert (measured.link_share < 1) == (numa == "far" and num_gpus == 8)
