"""Step-constant link shares against shares that change with every transfer."""

from __future__ import annotations

import pytest

from simulator.experiment import expand, resolve
from simulator.shared_link_error import narrowed, shared_link_error, with_one_nic_per_socket

pytestmark = pytest.mark.usefixtures("synthetic")


@pytest.mark.parametrize(("inter_socket_gbps", "batch"), [(100, 16), (60, 16), (40, 16), (40, 64)])
def test_difference_is_small(inter_socket_gbps, batch):
    (experiment,) = expand(
        {
            "trace": "synthetic",
            "trace_group": "long",
            "placement.host_numa": "far",
            "placement.num_gpus": 8,
            "workload.batch_size": batch,
            "workload.output_tokens": 16,
            "policy.fetch_cap": 0.1,
        },
        {},
    )
    measured = shared_link_error(narrowed(resolve(experiment), inter_socket_gbps * 1e9))
    assert abs(measured.error) <= 0.02
    assert (measured.link_share < 1) == (inter_socket_gbps < 97)  # four gathers of 24 GB/s each way


def test_difference_is_small_beyond_the_host_too():
    (experiment,) = expand(
        {
            "trace": "synthetic",
            "trace_group": "long",
            "placement.kv_tier": "remote",
            "placement.num_gpus": 4,
            "workload.batch_size": 16,
            "workload.output_tokens": 8,
            "policy.fetch_cap": 0.05,
            "policy.host_residency": "fetched",
        },
        {},
    )
    measured = shared_link_error(with_one_nic_per_socket(resolve(experiment)))
    assert abs(measured.error) <= 0.02
