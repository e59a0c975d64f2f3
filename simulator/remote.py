"""Blocks from beyond the host: seconds of messages over a NIC, of reads and writes of drives. Pure functions.

A message is one block: adjacent blocks are not merged. Messages of one GPU follow each other on its NIC or drives, as
fast as many in flight go.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.links import by_placement, copy_engine_bytes_per_s
from simulator.specs.experiment import PlacementSpec
from simulator.specs.hardware import HardwareSpec, NicFigures
from simulator.specs.policy import PolicySpec
from traces.errors import InputError


def reads_beyond_host(policy: PolicySpec, placement: PlacementSpec) -> bool:
    """Whether a decode step fetches from beyond the host: a full copy in host memory leaves nothing to fetch."""
    return policy.offloads and placement.kv_tier != "host" and policy.host_residency != "full"


def over_network(placement: PlacementSpec) -> bool:
    return placement.kv_tier in ("remote", "nvme-of")


def on_drives(placement: PlacementSpec) -> bool:
    return placement.kv_tier in ("nvme", "nvme-of")


def nic_message_s(nic: NicFigures, message_bytes: float) -> float:
    """Seconds of one message among many: linear between the measured sizes, and along the nearest two beyond them,
    never faster than large messages."""
    sizes = [float(row.message_bytes) for row in nic.messages]
    seconds = [size / row.bytes_per_s.value for size, row in zip(sizes, nic.messages, strict=True)]
    streamed_s = message_bytes / nic.bytes_per_s.value
    if message_bytes > sizes[-1]:
        return max(streamed_s, seconds[-1] + (message_bytes - sizes[-1]) / nic.bytes_per_s.value)
    if message_bytes < sizes[0] and len(sizes) > 1:
        slope = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
        return max(streamed_s, seconds[0] - slope * (sizes[0] - message_bytes))
    return max(streamed_s, float(np.interp(message_bytes, sizes, seconds)))


def nic_rate_share(hardware: HardwareSpec, placement: PlacementSpec) -> float:
    """What is left of a NIC's rate when it and the memory it reaches are on different sockets.

    As a GPU's copy engine loses there: an assumption, no NIC was measured.
    """
    local = copy_engine_bytes_per_s(hardware, "local")
    far_share = copy_engine_bytes_per_s(hardware, "far") / local
    crossed = pages_across(placement)
    return by_placement(1.0, far_share, "local" if crossed == 0 else "far" if crossed == 1 else "interleave")


def pages_across(placement: PlacementSpec) -> float:
    """Share of the bytes of a NIC that cross sockets to reach the GPU (direct) or the host's pages (staged)."""
    nic_is_far = placement.nic_numa == "far"
    if placement.remote_path == "direct":
        return float(nic_is_far)
    if placement.host_numa == "interleave":
        return 0.5
    return float(nic_is_far != (placement.host_numa == "far"))


@dataclass(frozen=True, slots=True)
class RemoteCost:
    """Seconds on one GPU's way beyond the host, alone."""

    hop_s: float
    """From a posted request to its first byte; requests overlap, so once per plan."""
    read_s: float
    """One block."""
    write_s: float
    """One piece of new KV."""


def remote_cost(
    hardware: HardwareSpec, placement: PlacementSpec, block_bytes: float, piece_bytes: float, messages_per_piece: int
) -> RemoteCost:
    """NIC and drives work on different blocks at a time, so behind the network the slower of the two counts."""
    hop_s = read_s = write_s = 0.0
    message_bytes = piece_bytes / messages_per_piece
    if over_network(placement):
        share = nic_rate_share(hardware, placement)
        hop_s += hardware.nic.t0_s.value
        read_s = nic_message_s(hardware.nic, block_bytes) / share
        write_s = nic_message_s(hardware.nic, message_bytes) / share
    if on_drives(placement):
        drives = hardware.nvme
        hop_s += drives.t0_s.value
        read_s = max(read_s, 1.0 / drives.read_iops.value, block_bytes / drives.read_bytes_per_s.value)
        write_s = max(write_s, 1.0 / drives.write_iops.value, message_bytes / drives.write_bytes_per_s.value)
    return RemoteCost(hop_s, read_s, messages_per_piece * write_s)


def stream_write_bytes_per_s(hardware: HardwareSpec, placement: PlacementSpec) -> float:
    """Writing a prompt's KV to its home beyond the host, in large pieces."""
    rates = []
    if over_network(placement):
        rates.append(hardware.nic.bytes_per_s.value * nic_rate_share(hardware, placement))
    if on_drives(placement):
        rates.append(hardware.nvme.write_bytes_per_s.value)
    return min(rates)


def remote_pool_bytes(hardware: HardwareSpec, placement: PlacementSpec) -> float:
    """What a host may keep beyond itself. Drives behind the network: one target like the drives of a socket."""
    if placement.kv_tier == "remote":
        return hardware.nic.pool_bytes.value
    sockets = hardware.host.num_sockets.value if placement.kv_tier == "nvme" else 1
    return hardware.nvme.bytes.value * sockets


def require_tier(hardware: HardwareSpec, placement: PlacementSpec) -> None:
    """Raises InputError for a tier or path that the host does not have."""
    if over_network(placement) and hardware.nic.per_socket.value < 1:
        raise InputError(f"placement.kv_tier {placement.kv_tier} needs a NIC; a {hardware.name} host has none")
    if on_drives(placement) and hardware.nvme.bytes.value == 0:
        raise InputError(f"placement.kv_tier {placement.kv_tier} needs drives; a {hardware.name} host has none")
    if placement.nic_numa == "far" and hardware.host.num_sockets.value < 2:
        raise InputError(f"placement.nic_numa far needs two sockets; {hardware.name} has 1")
