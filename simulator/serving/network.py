"""The network between prefill and decode hosts: one link, two queues, bytes and bursts counted."""

from __future__ import annotations

from collections.abc import Generator

import simpy

from simulator.specs.hardware import HardwareSpec

PIECE_BYTES = 64_000_000
"""Background transfers make way between pieces of this size: 0.7 ms of eight 100 Gb/s adapters."""
ADMISSION, BACKGROUND = 0, 1
PEAK_WINDOW_S = 1.0


def network_bytes_per_s(hardware: HardwareSpec, num_gpus: int) -> float:
    """What the adapters of the decode host bring in for `num_gpus` of its GPUs: their share of them, at least one."""
    host, nic = hardware.host, hardware.nic
    gpus = host.num_sockets.value * host.gpus_per_socket.value
    adapters = host.num_sockets.value * nic.per_socket.value
    return max(1.0, adapters * min(1.0, num_gpus / gpus)) * nic.bytes_per_s.value


class Network:
    """Transfers in order of asking, those that a request waits for first. Prefill hosts are assumed to send as fast
    as the decode host receives."""

    def __init__(self, env: simpy.Environment, bytes_per_s: float, t0_s: float) -> None:
        self.env, self.bytes_per_s, self.t0_s = env, bytes_per_s, t0_s
        self._link = simpy.PriorityResource(env)
        self.total_bytes = self.backlog_bytes = self.backlog_peak_bytes = 0
        self.busy_s = self.peak_window_bytes = 0.0
        self._window, self._window_bytes = 0, 0.0

    def send(self, num_bytes: int, priority: int) -> Generator[simpy.Event, None, None]:
        """Done when the last byte has arrived."""
        self.backlog_bytes += num_bytes
        self.backlog_peak_bytes = max(self.backlog_peak_bytes, self.backlog_bytes)
        left = num_bytes
        while left > 0:
            piece = left if priority == ADMISSION else min(left, PIECE_BYTES)
            with self._link.request(priority=priority) as turn:
                yield turn
                seconds = self.t0_s + piece / self.bytes_per_s
                yield self.env.timeout(seconds)
            self._count(piece, seconds)
            left -= piece

    def _count(self, num_bytes: int, seconds: float) -> None:
        self.busy_s += seconds
        self.total_bytes += num_bytes
        self.backlog_bytes -= num_bytes
        # Bytes count in the window in which their transfer ends, at the link's rate for as long as it took.
        window = int(self.env.now / PEAK_WINDOW_S)
        if window != self._window:
            self._window, self._window_bytes = window, 0.0
        self._window_bytes += num_bytes
        self.peak_window_bytes = max(self.peak_window_bytes, min(self._window_bytes, self.bytes_per_s * PEAK_WINDOW_S))
