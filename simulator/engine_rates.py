"""How fast the engines of one GPU run beside each other: a lookup on what is active.

Engines: C (compute stream), B (side stream), H (host-to-device transfers), D (device-to-host).
C and B run a kernel kind; H and D are idle or busy. Rate 1 is the engine alone.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from simulator.specs.hardware import HardwareSpec, PairRate
from simulator.specs.policy import Transport

NUM_KINDS = 5
C, B, H, D = range(4)


class Kind(IntEnum):
    """What C or B runs; index of the rate table."""

    IDLE = 0
    GEMM = 1
    ATTENTION = 2
    SCORE = 3
    TOPK = 4


def _pair(pairs: tuple[PairRate, ...], kernel: Kind, beside: str, gather_ctas: int) -> tuple[float, float]:
    """(rate of `kernel`, rate of `beside`) while both run; gather grids between measured ones are interpolated."""
    name = kernel.name.lower()
    rows = [p for p in pairs if p.kernel == name and p.beside == beside]
    if not rows:
        return 1.0, 1.0
    if beside != "gather":
        return rows[0].kernel_rate.value, rows[0].beside_rate.value
    rows.sort(key=lambda p: p.gather_ctas or 0)
    grids = [float(p.gather_ctas or 0) for p in rows]
    kernel_rate = float(np.interp(gather_ctas, grids, [p.kernel_rate.value for p in rows]))
    return kernel_rate, float(np.interp(gather_ctas, grids, [p.beside_rate.value for p in rows]))


def engine_rates(hardware: HardwareSpec, transport: Transport, gather_ctas: int) -> NDArray[np.float64]:
    """Rates [kind of C, kind of B, H busy, D busy, engine], float64 in (0, 1].

    Measured in pairs. Three at once is an assumption: a kernel's slowdowns multiply (it loses SMs to one and
    bandwidth to another), a link takes the worse of its two (its limit is one queue, not a sum).
    Duplex: H and D slow each other as the link's duplex figures say.
    """
    link = hardware.link
    h_name = "gather" if transport == "gather" else "ce_h2d"
    duplex_h = min(1.0, link.duplex_h2d_bytes_per_s.value / link.h2d_bytes_per_s.value)
    duplex_d = min(1.0, link.duplex_d2h_bytes_per_s.value / link.d2h_bytes_per_s.value)
    kernels = [kind for kind in Kind if kind]
    beside_link = {
        (kind, engine): _pair(hardware.pairs, kind, name, gather_ctas)
        for kind in kernels
        for engine, name in ((H, h_name), (D, "ce_d2h"))
    }
    rates = np.ones((NUM_KINDS, NUM_KINDS, 2, 2, 4))
    for c in Kind:
        for b in Kind:
            if c and b:
                rates[c, b, :, :, C], rates[c, b, :, :, B] = _streams(hardware.pairs, c, b, gather_ctas)
            for direction, busy in ((H, np.s_[1, :]), (D, np.s_[:, 1])):
                for engine, kind in ((C, c), (B, b)):
                    if kind:
                        kernel_rate, link_rate = beside_link[kind, direction]
                        state = rates[c, b][busy]
                        state[:, engine] *= kernel_rate
                        state[:, direction] = np.minimum(state[:, direction], link_rate)
    rates[:, :, 1, 1, H] *= duplex_h
    rates[:, :, 1, 1, D] *= duplex_d
    if not (rates > 0).all():
        raise ValueError(f"profile {hardware.name}: a pair rate of 0 would stop an engine for ever")
    return rates


def _streams(pairs: tuple[PairRate, ...], c: Kind, b: Kind, gather_ctas: int) -> tuple[float, float]:
    """Rates of C running `c` and B running `b`; a pair may be listed either way round."""
    c_rate, b_rate = _pair(pairs, c, b.name.lower(), gather_ctas)
    if (c_rate, b_rate) == (1.0, 1.0):
        b_rate, c_rate = _pair(pairs, b, c.name.lower(), gather_ctas)
    return c_rate, b_rate
