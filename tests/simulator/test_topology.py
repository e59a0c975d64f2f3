"""Shares of shared links against processor-sharing closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import catalog
from simulator.specs.experiment import PlacementSpec
from simulator.topology import HostTopology, Share, Solo, max_min_fair
from traces.errors import InputError

H100 = catalog.load_hardware("h100-sxm")


def test_equal_flows_share_a_link_equally():
    assert max_min_fair([10, 10, 10], {"link": {0: 1, 1: 1, 2: 1}}, {"link": 12}) == pytest.approx([4, 4, 4])


def test_what_a_small_flow_leaves_goes_to_the_others():
    assert max_min_fair([1, 10, 10], {"link": {0: 1, 1: 1, 2: 1}}, {"link": 12}) == pytest.approx([1, 5.5, 5.5])


def test_a_flow_stops_at_its_narrowest_link():
    rates = max_min_fair([10, 10], {"a": {0: 1, 1: 1}, "b": {0: 1}}, {"a": 12, "b": 2})
    assert rates == pytest.approx([2, 10])


def test_a_flow_that_crosses_a_link_twice_leaves_less():
    assert max_min_fair([10, 10], {"link": {0: 2, 1: 1}}, {"link": 12}) == pytest.approx([4, 4])
    assert max_min_fair([1, 20], {"link": {0: 2, 1: 1}}, {"link": 12}) == pytest.approx([1, 10])
    assert max_min_fair([10], {"link": {0: 0.5}}, {"link": 2}) == pytest.approx([4])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0.1, 100), min_size=1, max_size=6),
    st.lists(st.floats(0.5, 200), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_no_link_is_overbooked_and_no_flow_could_have_more(demands, capacities, random):
    weights = (0.5, 1.0, 2.0)
    use = {
        str(i): {f: random.choice(weights) for f in range(len(demands)) if random.random() < 0.6}
        for i in range(len(capacities))
    }
    capacity = {str(i): c for i, c in enumerate(capacities)}
    rates = max_min_fair(demands, use, capacity)
    used = {name: sum(rates[f] * w for f, w in crossing.items()) for name, crossing in use.items()}
    assert all(used[name] <= capacity[name] * (1 + 1e-6) for name in used)
    for f, demand in enumerate(demands):
        full = [name for name, crossing in use.items() if f in crossing and used[name] >= capacity[name] * (1 - 1e-6)]
        satisfied = rates[f] >= demand * (1 - 1e-6)
        assert satisfied or any(rates[f] >= max(rates[g] for g in use[name]) * (1 - 1e-6) for name in full)


def link_shares(gpus: list[int], num_gpus: int, bytes_per_s: float, **placement: str) -> dict[int, float]:
    topology = HostTopology(H100, num_gpus, PlacementSpec(**placement))
    return {gpu: share.link for gpu, share in topology.shares(gpus, [], Solo(bytes_per_s)).items()}


def test_one_gpu_has_its_link_to_itself():
    assert HostTopology(H100, 1, PlacementSpec()).shares([0], [], Solo(55e9)) == {0: Share(1.0, 1.0)}


def test_far_memory_of_eight_gpus_is_limited_by_the_inter_socket_link():
    local = link_shares(list(range(8)), 8, 36e9)
    far = link_shares(list(range(8)), 8, 36e9, host_numa="far")
    expected = H100.host.inter_socket_bytes_per_s.value / 4 / 36e9  # four GPUs read each way
    assert far[0] == pytest.approx(min(1.0, expected, local[0]))
    assert far[0] < local[0]


def test_interleaved_pages_load_each_sockets_dram_and_link_by_half():
    shares = link_shares(list(range(8)), 8, 60e9, host_numa="interleave")
    dram, cross = H100.host.dram_bytes_per_s.value, H100.host.inter_socket_bytes_per_s.value
    uplink = H100.host.switch_bytes_per_s.value / 2
    # Each DRAM serves half of eight streams, each direction of the socket link half of four.
    assert shares[0] * 60e9 == pytest.approx(min(60e9, dram / 4, cross / 2, uplink))


def test_two_gpus_behind_one_switch_halve_its_uplink():
    shares = link_shares([0, 2], 8, 80e9)  # both on socket 0, first switch
    assert shares[0] == pytest.approx(min(1.0, H100.host.switch_bytes_per_s.value / 2 / 80e9))


def test_a_host_has_only_so_many_gpus_and_sockets():
    with pytest.raises(InputError, match="num_gpus 9 exceeds the 8 GPUs"):
        HostTopology(H100, 9, PlacementSpec())
