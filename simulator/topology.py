"""Who shares which link on one host: GPUs and NICs -> PCIe switches -> sockets (DRAM, NVMe) -> inter-socket link.

A transfer is a flow over a path of links. Shares are max-min fair and constant during a step; the timeline recomputes
them when a step starts or ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from simulator.specs.experiment import PlacementSpec
from simulator.specs.hardware import HardwareSpec
from traces.errors import InputError

Path = dict[str, float]
"""Link -> bytes that cross it per byte of the flow."""


class Solo(NamedTuple):
    """Bytes/s that one GPU's transfers draw while they run alone."""

    link: float
    """Over its host link."""
    remote: float = 1.0
    """From beyond the host."""


class Share(NamedTuple):
    """Shares in (0, 1] of the solo rates."""

    link: float = 1.0
    remote: float = 1.0


ALONE = Share()


def max_min_fair(
    demands: Sequence[float], use: Mapping[str, Mapping[int, float]], capacity: Mapping[str, float]
) -> list[float]:
    """Rates of flows by progressive filling: all grow alike until a link is full or the flow has its demand.

    `use[link][flow]`: bytes on the link per byte of the flow. Units are free, the same for demands and capacities.
    Source: Bertsekas and Gallager, Data Networks, 6.5.2.
    """
    rate = [0.0] * len(demands)
    growing = {f for f, demand in enumerate(demands) if demand > 0}
    while growing:
        step = min(demands[f] - rate[f] for f in growing)
        for name, weights in use.items():
            crossing = sum(weight for f, weight in weights.items() if f in growing)
            if crossing > 0:
                step = min(step, (capacity[name] - _load(rate, weights)) / crossing)
        step = max(step, 0.0)
        for f in growing:
            rate[f] += step
        full = {
            f
            for name, weights in use.items()
            if capacity[name] - _load(rate, weights) <= 1e-9 * capacity[name]
            for f, weight in weights.items()
            if weight > 0
        }
        growing = {f for f in growing if f not in full and demands[f] - rate[f] > 1e-9 * demands[f]}
    return rate


def _load(rate: Sequence[float], weights: Mapping[int, float]) -> float:
    return sum(rate[f] * weight for f, weight in weights.items())


class HostTopology:
    """Shared links of one host and, for any set of GPUs that transfer at once, the shares of each.

    GPUs fill the sockets in turn, as an operator spreading replicas would. A socket's NICs serve its GPUs in turn (on
    another socket, the GPUs of that one), and hang below the switch of the GPU that they serve.
    """

    def __init__(self, hardware: HardwareSpec, num_gpus: int, placement: PlacementSpec) -> None:
        host = hardware.host
        self.num_gpus, self._hardware, self._placement = num_gpus, hardware, placement
        self._sockets = int(host.num_sockets.value)
        per_socket = int(host.gpus_per_socket.value)
        if num_gpus > self._sockets * per_socket:
            raise InputError(
                f"placement.num_gpus {num_gpus} exceeds the {self._sockets * per_socket} GPUs of a {hardware.name} "
                f"host ({self._sockets} sockets x {per_socket})"
            )
        if placement.host_numa != "local" and self._sockets < 2:
            raise InputError(
                f"placement.host_numa {placement.host_numa} needs two sockets; {hardware.name} has {self._sockets}"
            )
        self._capacity: dict[str, float] = {}
        self._link_path = [self._host_to_gpu(gpu) for gpu in range(num_gpus)]
        self._remote_path = [self._remote_to_gpu(gpu) for gpu in range(num_gpus)]

    def shares(self, on_link: Sequence[int], on_remote: Sequence[int], solo: Solo) -> dict[int, Share]:
        """Shares of every GPU that transfers, when those of `on_link` use their host link and those of `on_remote`
        fetch from beyond the host, all at once."""
        flows = [(gpu, self._link_path[gpu], solo.link) for gpu in on_link]
        flows += [(gpu, self._remote_path[gpu], solo.remote) for gpu in on_remote]
        use: dict[str, dict[int, float]] = {}
        for flow, (_, path, _) in enumerate(flows):
            for link, weight in path.items():
                use.setdefault(link, {})[flow] = weight
        # A NIC or a socket's drives do what one GPU's stream gets from them alone: messages, not bytes, may bind.
        capacity = {link: self._capacity.get(link, solo.remote) for link in use}
        rates = max_min_fair([demand for *_, demand in flows], use, capacity)
        shares = [float(np.clip(rate / flow[2], 1e-9, 1.0)) for rate, flow in zip(rates, flows, strict=True)]
        linked = dict(zip(on_link, shares, strict=False))
        remote = dict(zip(on_remote, shares[len(on_link) :], strict=True))
        return {gpu: Share(linked.get(gpu, 1.0), remote.get(gpu, 1.0)) for gpu in (*on_link, *on_remote)}

    def _socket(self, gpu: int) -> int:
        return gpu % self._sockets

    def _other(self, socket: int) -> int:
        return (socket + 1) % self._sockets

    def _page_sockets(self, gpu: int) -> dict[int, float]:
        """Where the GPU's part of host memory lies: socket -> share of its pages."""
        here = self._socket(gpu)
        far = {"local": 0.0, "far": 1.0, "interleave": 0.5}[self._placement.host_numa]
        return {socket: share for socket, share in ((self._other(here), far), (here, 1.0 - far)) if share}

    def _link(self, path: Path, name: str, capacity: float, weight: float) -> None:
        self._capacity[name] = capacity
        path[name] = path.get(name, 0.0) + weight

    def _switch(self, path: Path, gpu: int) -> None:
        host = self._hardware.host
        index = gpu // self._sockets // int(host.gpus_per_switch.value)
        self._link(path, f"switch {self._socket(gpu)}.{index}", host.switch_bytes_per_s.value, 1.0)

    def _dram(self, path: Path, socket: int, weight: float) -> None:
        self._link(path, f"dram {socket}", self._hardware.host.dram_bytes_per_s.value, weight)

    def _cross(self, path: Path, start: int, end: int, weight: float) -> None:
        if start != end:
            rate = self._hardware.host.inter_socket_bytes_per_s.value
            self._link(path, f"inter-socket {start}->{end}", rate, weight)

    def _host_to_gpu(self, gpu: int) -> Path:
        path: Path = {}
        self._switch(path, gpu)
        for socket, share in self._page_sockets(gpu).items():
            self._dram(path, socket, share)
            self._cross(path, socket, self._socket(gpu), share)
        return path

    def _remote_to_gpu(self, gpu: int) -> Path:
        """NIC or drives to host memory (staged) or, from below the GPU's own switch or across sockets, to the GPU.

        The other way over a switch's uplink, from a NIC to host memory, is not what host-to-GPU transfers use.
        """
        path: Path = {}
        tier, here = self._placement.kv_tier, self._socket(gpu)
        direct = self._placement.remote_path == "direct"
        pages = {here: 1.0} if direct else self._page_sockets(gpu)
        if tier == "host":
            return path
        if not direct:
            for socket, share in pages.items():
                self._dram(path, socket, share)
        if tier == "nvme":
            for socket, share in pages.items():
                path[f"nvme {socket}"] = share
            if direct:
                self._switch(path, gpu)
            return path
        nic_socket = here if self._placement.nic_numa == "local" else self._other(here)
        index = gpu // self._sockets % max(1, int(self._hardware.nic.per_socket.value))
        path[f"nic {nic_socket}.{index}"] = 1.0
        for socket, share in pages.items():
            self._cross(path, nic_socket, socket, share)
        if direct and nic_socket != here:
            self._switch(path, gpu)
        return path
