"""Who shares which link on one host: GPUs -> PCIe switches -> sockets (DRAM) -> inter-socket link.

Shares are max-min fair and constant during a step; the timeline recomputes them when a step starts or ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from simulator.links import HostNuma
from simulator.specs.hardware import HardwareSpec
from traces.errors import InputError


def max_min_fair(
    demands: Sequence[float], flows_of_link: Mapping[str, Sequence[int]], capacity: Mapping[str, float]
) -> list[float]:
    """Rates of flows by progressive filling: all grow alike until a link is full or the flow has its demand.

    `flows_of_link[name]` lists the flows that cross a link (a flow listed twice uses it twice). Units are free, the
    same for demands and capacities. Source: Bertsekas and Gallager, Data Networks, 6.5.2.
    """
    rate = [0.0] * len(demands)
    growing = {f for f, demand in enumerate(demands) if demand > 0}
    while growing:
        step = min(demands[f] - rate[f] for f in growing)
        for name, flows in flows_of_link.items():
            crossing = sum(f in growing for f in flows)
            if crossing:
                step = min(step, (capacity[name] - sum(rate[f] for f in flows)) / crossing)
        step = max(step, 0.0)
        for f in growing:
            rate[f] += step
        full = {
            f
            for name, flows in flows_of_link.items()
            if capacity[name] - sum(rate[g] for g in flows) <= 1e-9 * capacity[name]
            for f in flows
        }
        growing = {f for f in growing if f not in full and demands[f] - rate[f] > 1e-9 * demands[f]}
    return rate


class HostTopology:
    """Shared links of one host and, for any set of GPUs that transfer at once, the share of each."""

    def __init__(self, hardware: HardwareSpec, num_gpus: int, host_numa: HostNuma) -> None:
        host = hardware.host
        sockets, per_socket = int(host.num_sockets.value), int(host.gpus_per_socket.value)
        if num_gpus > sockets * per_socket:
            raise InputError(
                f"placement.num_gpus {num_gpus} exceeds the {sockets * per_socket} GPUs of a {hardware.name} host "
                f"({sockets} sockets x {per_socket})"
            )
        if host_numa != "local" and sockets < 2:
            raise InputError(f"placement.host_numa {host_numa} needs two sockets; {hardware.name} has {sockets}")
        self.num_gpus = num_gpus
        self.capacity: dict[str, float] = {}
        self.weights: dict[str, dict[int, float]] = {}
        for gpu in range(num_gpus):
            # GPUs fill the sockets in turn, as an operator spreading replicas would.
            socket, index = gpu % sockets, gpu // sockets
            self._cross(
                f"switch {socket}.{index // int(host.gpus_per_switch.value)}", host.switch_bytes_per_s.value, gpu, 1.0
            )
            far_share = {"local": 0.0, "far": 1.0, "interleave": 0.5}[host_numa]
            if far_share:
                other = (socket + 1) % sockets
                self._cross(f"dram {other}", host.dram_bytes_per_s.value, gpu, far_share)
                self._cross(f"inter-socket {other}->{socket}", host.inter_socket_bytes_per_s.value, gpu, far_share)
            if far_share < 1.0:
                self._cross(f"dram {socket}", host.dram_bytes_per_s.value, gpu, 1.0 - far_share)

    def _cross(self, link: str, capacity: float, gpu: int, weight: float) -> None:
        self.capacity[link] = capacity
        self.weights.setdefault(link, {})[gpu] = weight

    def shares(self, transferring: Sequence[int], solo_bytes_per_s: float) -> dict[int, float]:
        """Share in (0, 1] of its solo rate that each transferring GPU gets when all of them transfer at once."""
        if not transferring:
            return {}
        index = {gpu: f for f, gpu in enumerate(transferring)}
        flows: dict[str, list[int]] = {}
        capacity: dict[str, float] = {}
        for link, weights in self.weights.items():
            here = {g: w for g, w in weights.items() if g in index}
            if here:
                # All flows of one link have the same weight, so dividing the capacity is exact.
                weight = next(iter(here.values()))
                flows[link], capacity[link] = [index[g] for g in here], self.capacity[link] / weight
        rates = max_min_fair([solo_bytes_per_s] * len(transferring), flows, capacity)
        return {gpu: float(np.clip(rates[f] / solo_bytes_per_s, 1e-9, 1.0)) for gpu, f in index.items()}
