"""The network between prefill and decode hosts: order, message sizes, layers as they come, bursts."""

from __future__ import annotations

import numpy as np
import pytest
import simpy

from simulator import catalog
from simulator.serving.network import (
    ADMISSION,
    BACKGROUND,
    PIECE_BYTES,
    PULLED,
    WINDOW_S,
    Bursts,
    Network,
    Part,
    Traffic,
    Wire,
)

H100 = catalog.load_hardware("h100-sxm")
LARGE = 1e9
"""A message that runs at the adapter's full rate."""


def play(*transfers, t0_s=0.0, num_gpus=1):
    """When each transfer (at_s, bytes, priority, pieces, gap_s) arrives."""
    env = simpy.Environment()
    network = Network(env, Wire(H100, num_gpus), t0_s, Traffic())
    arrived = {}

    def send(number, at_s, num_bytes, priority, pieces=1, gap_s=0.0):
        yield env.timeout(at_s)
        parts = [Part(num_bytes, LARGE)]
        yield network.send(parts, priority, pieces, at_s + gap_s if gap_s else None, gap_s)
        arrived[number] = env.now

    for number, transfer in enumerate(transfers):
        env.process(send(number, *transfer))
    env.run()
    return network, arrived


def test_admissions_overtake_the_background():
    background = [(0.0, PIECE_BYTES, BACKGROUND)] * 10
    network, arrived = play(*background, (0.001, PIECE_BYTES, ADMISSION))
    piece_s = PIECE_BYTES / network.wire.bytes_per_s
    assert arrived[10] == pytest.approx(2 * piece_s)
    assert arrived[9] == pytest.approx(11 * piece_s)
    assert network.traffic.total_bytes == 11 * PIECE_BYTES
    assert network.traffic.busy_s == pytest.approx(11 * piece_s)
    assert network.traffic.backlog_bytes == 0
    assert network.traffic.backlog_peak_bytes == 11 * PIECE_BYTES


@pytest.mark.parametrize("layer_s", [0.02, 0.005, 0.0005])
def test_layers_that_come_one_by_one_are_sent_as_they_come(layer_s):
    """From the first layer on, the last byte comes after the slower of computing and sending."""
    layers, layer_bytes, t0_s = 36, 120_500_000, 5e-6
    network, arrived = play((0.0, layers * layer_bytes, ADMISSION, layers, layer_s), t0_s=t0_s)
    sent_s = layer_bytes / network.wire.bytes_per_s
    assert sent_s == pytest.approx(0.01)
    slower_s = max(layer_s, sent_s)
    assert arrived[0] == pytest.approx(layer_s + (layers - 1) * slower_s + sent_s + t0_s)
    assert network.traffic.total_bytes == layers * layer_bytes


def test_pieces_of_two_streams_take_turns_and_none_is_lost():
    network, arrived = play((0.0, 999_999_999, ADMISSION, 7, 0.01), (0.0, 333_333_333, ADMISSION, 13, 0.01))
    assert network.traffic.total_bytes == 1_333_333_332
    assert arrived[0] < arrived[1] + 0.1
    assert network.traffic.busy_s == pytest.approx(network.traffic.total_bytes / network.wire.bytes_per_s)


def plain(transfers, bytes_per_s, t0_s):
    """The same link without events or heaps: what is ready of the most urgent, then of the first ready, goes next."""
    left, now, arrived = {}, 0.0, {}
    for number, (at_s, num_bytes, priority, pieces, gap_s) in enumerate(transfers):
        ready = [at_s + (piece + 1 if gap_s else 0) * gap_s for piece in range(pieces)]
        left[number] = (priority, ready, num_bytes / pieces / bytes_per_s)
    while left:
        waiting = [(priority, ready[0], number) for number, (priority, ready, _) in left.items() if ready[0] <= now]
        if not waiting:
            now = min(ready[0] for _, ready, _ in left.values())
            continue
        number = min(waiting)[-1]
        _, ready, piece_s = left[number]
        count = sum(at_s <= now for at_s in ready)
        del ready[:count]
        now += count * piece_s + (0.0 if ready else t0_s)
        if not ready:
            arrived[number] = now
            del left[number]
    return arrived


@pytest.mark.parametrize("seed", range(20))
def test_the_link_is_a_plain_server(seed):
    rng = np.random.default_rng(seed)
    transfers = []
    for _ in range(rng.integers(1, 25)):
        priority = int(rng.choice([PULLED, ADMISSION, BACKGROUND]))
        gap_s = float(rng.choice([0.0, 0.0003, 0.004]))
        num_bytes, pieces = int(rng.integers(1, 400_000_000)), int(rng.integers(1, 40))
        transfers.append((float(rng.uniform(0, 1)), num_bytes, priority, pieces, gap_s))
    network, arrived = play(*transfers, t0_s=5e-6)
    assert arrived == pytest.approx(plain(transfers, network.wire.bytes_per_s, 5e-6))
    assert network.traffic.total_bytes == sum(transfer[1] for transfer in transfers)
    assert network.traffic.backlog_bytes == 0


def test_each_replica_has_its_own_adapters_as_far_as_there_are_any():
    assert [Wire(H100, 8, replicas).num_links for replicas in (1, 2, 8)] == [1, 2, 8]
    assert [Wire(H100, 8, replicas).num_adapters for replicas in (1, 2, 8)] == [8, 4, 1]
    assert (Wire(H100, 1, 1).num_adapters, Wire(H100, 4, 4).num_adapters) == (1, 1)
    few = catalog.load_hardware("l40s")
    assert few.nic.per_socket.value * few.host.num_sockets.value == 2
    assert (Wire(few, 8, 8).num_links, Wire(few, 8, 8).num_adapters) == (2, 1)


def test_small_messages_take_as_long_as_they_were_measured_to():
    wire = Wire(H100, 1)
    for message in H100.nic.messages:
        rate = 1e9 / wire.seconds([Part(1_000_000_000, float(message.message_bytes))])
        assert rate == pytest.approx(min(message.bytes_per_s.value, H100.nic.bytes_per_s.value))
    assert wire.seconds([Part(0, 1.0)]) == 0.0
    assert Wire(H100, 8).seconds([Part(10**9, 8192.0)]) == pytest.approx(wire.seconds([Part(10**9, 8192.0)]) / 8)


def test_a_burst_is_measured_over_a_window_and_spread_over_a_transfer():
    bursts = Bursts()
    bursts.add(0.05, 0.1, 1_000)
    assert (bursts.num_windows, bursts.peak_bytes) == (2, pytest.approx(500))
    bursts.add(0.15, 0.025, 300)
    assert (bursts.num_windows, bursts.peak_bytes) == (2, pytest.approx(800))
    bursts.add(7.0, 1.0, 100_000)
    assert bursts.num_windows == 12
    assert bursts.peak_bytes == pytest.approx(100_000 * WINDOW_S)
