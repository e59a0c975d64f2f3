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
    rates = np.ones((NUM_KINDS, NUM_KINDS, 2, 2, 4))
    for c in Kind:
        for b in Kind:
            c_beside_b = b_beside_c = 1.0
            if c and b:
                c_beside_b, b_beside_c = _pair(hardware.pairs, c, b.name.lower(), gather_ctas)
                if (c_beside_b, b_beside_c) == (1.0, 1.0):
                    b_beside_c, c_beside_b = _pair(hardware.pairs, b, c.name.lower(), gather_ctas)
            for h in range(2):
                for d in range(2):
                    rate = rates[c, b, h, d]
                    rate[C], rate[B] = c_beside_b, b_beside_c
                    for engine, kind in ((C, c), (B, b)):
                        if kind and h:
                            kernel_rate, h_rate = _pair(hardware.pairs, kind, h_name, gather_ctas)
                            rate[engine] *= kernel_rate
                            rate[H] = min(rate[H], h_rate)
                        if kind and d:
                            kernel_rate, d_rate = _pair(hardware.pairs, kind, "ce_d2h", gather_ctas)
                            rate[engine] *= kernel_rate
                            rate[D] = min(rate[D], d_rate)
                    if h and d:
                        rate[H] *= duplex_h
                        rate[D] *= duplex_d
    if not (rates > 0).all():
        raise ValueError(f"profile {hardware.name}: a pair rate of 0 would stop an engine for ever")
    return rates
