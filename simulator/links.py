"""Time of a transfer over one GPU's host link: pure functions of operations, bytes and placement.

A copy engine spends a fixed time per operation and bytes / rate; a gather kernel spends one launch and bytes / the
smaller of the link and what its thread blocks keep in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simulator.specs.hardware import HardwareSpec
from simulator.specs.policy import Transport

Float = NDArray[np.float64]
HostNuma = Literal["local", "far", "interleave"]


def interleaved_rate(local: float, far: float) -> float:
    """Half of the pages on each socket, read in turn: the harmonic mean."""
    return 2.0 / (1.0 / local + 1.0 / far)


def by_placement(local: float, far: float, host_numa: HostNuma) -> float:
    """Rate of a stream whose pages lie on the GPU's socket, on the other, or alternate."""
    if host_numa == "local":
        return local
    return far if host_numa == "far" else interleaved_rate(local, far)


def copy_engine_bytes_per_s(hardware: HardwareSpec, host_numa: HostNuma) -> float:
    """H2D rate of one large copy."""
    local = hardware.link.h2d_bytes_per_s.value
    return by_placement(local, min(local, hardware.host.far_h2d_bytes_per_s.value), host_numa)


def gather_bytes_per_s(hardware: HardwareSpec, gather_ctas: int, host_numa: HostNuma) -> float:
    """min(link, CTAs x bytes in flight / (latency + far latency)): a CTA keeps rate x latency bytes in flight.

    From the far socket the ceiling falls by the share that a copy engine loses there, an assumption.
    """
    link, host = hardware.link, hardware.host
    ceiling = link.gather_bytes_per_s.value
    local = min(ceiling, gather_ctas * link.gather_cta_bytes_per_s.value)
    in_flight_bytes = link.gather_cta_bytes_per_s.value * link.gather_latency_s.value
    far_cta = in_flight_bytes / (link.gather_latency_s.value + host.far_latency_s.value)
    far_share = min(1.0, host.far_h2d_bytes_per_s.value / link.h2d_bytes_per_s.value)
    far = min(ceiling * far_share, gather_ctas * far_cta)
    return by_placement(local, far, host_numa)


def d2h_bytes_per_s(hardware: HardwareSpec, host_numa: HostNuma) -> float:
    """D2H rate; a far write crosses the same inter-socket link, so it is limited like a far read."""
    local = hardware.link.d2h_bytes_per_s.value
    return by_placement(local, min(local, hardware.host.far_h2d_bytes_per_s.value), host_numa)


@dataclass(frozen=True, slots=True)
class LinkCost:
    """One direction of one GPU's link under a transport: seconds = t0 (if any bytes) + ops x op_s + bytes / rate."""

    t0_s: float
    op_s: float
    bytes_per_s: float
    hop_s: float
    """From the plan's end to the first byte, outside the link: the CPU must learn the plan first."""
    ops_are: Literal["none", "blocks", "runs", "layers"]
    staged: bool
    """Arrivals land in a staging buffer and are scattered into slots by a kernel."""


def fetch_cost(hardware: HardwareSpec, transport: Transport, gather_ctas: int, host_numa: HostNuma) -> LinkCost:
    """What a fetch costs under a transport.

    ce-per-block: one call per block, so an operation takes the longer of the engine's and the CPU's time.
    ce-batched: one submission of maximal contiguous runs. ce-contiguous: the CPU packs a layer's blocks while
    earlier bytes are on the link (pipelined: the slower of the two rates), one operation a layer.
    """
    link = hardware.link
    copy_rate = copy_engine_bytes_per_s(hardware, host_numa)
    hop_s = link.plan_to_host_s.value
    if transport == "gather":
        rate = gather_bytes_per_s(hardware, gather_ctas, host_numa)
        return LinkCost(link.gather_t0_s.value, 0.0, rate, 0.0, "none", staged=False)
    if transport == "ce-per-block":
        op_s = max(link.ce_op_s.value, link.ce_enqueue_s.value)
        return LinkCost(0.0, op_s, copy_rate, hop_s, "blocks", staged=False)
    if transport == "ce-batched":
        return LinkCost(0.0, link.ce_batched_op_s.value, copy_rate, hop_s, "runs", staged=False)
    packed = min(copy_rate, hardware.host.pack_bytes_per_s.value)
    return LinkCost(0.0, link.ce_op_s.value, packed, hop_s, "layers", staged=True)


def stream_cost(hardware: HardwareSpec, transport: Transport, gather_ctas: int, host_numa: HostNuma) -> LinkCost:
    """As `fetch_cost` where a whole layer comes in order: no plan to wait for, and nothing to pack or unpack."""
    link = fetch_cost(hardware, transport, gather_ctas, host_numa)
    rate = copy_engine_bytes_per_s(hardware, host_numa) if link.staged else link.bytes_per_s
    return replace(link, hop_s=0.0, bytes_per_s=rate, staged=False)


def write_back_cost(hardware: HardwareSpec, transport: Transport, host_numa: HostNuma) -> LinkCost:
    """D2H of new KV. A gather system writes from its SMs, one launch; copy engines spend an operation per piece."""
    rate = d2h_bytes_per_s(hardware, host_numa)
    if transport == "gather":
        return LinkCost(hardware.link.gather_t0_s.value, 0.0, rate, 0.0, "none", staged=False)
    return LinkCost(0.0, hardware.link.ce_batched_op_s.value, rate, 0.0, "blocks", staged=False)


def transfer_s(link: LinkCost, blocks: Float, runs: Float, block_bytes: int) -> Float:
    """[T, L] seconds on the link alone for `blocks` blocks in `runs` contiguous runs; 0 where there are none."""
    ops = {"none": np.zeros_like(blocks), "blocks": blocks, "runs": runs, "layers": np.sign(blocks)}[link.ops_are]
    seconds = link.t0_s * np.sign(blocks) + ops * link.op_s + blocks * block_bytes / link.bytes_per_s
    return np.asarray(seconds)
