"""Grid of the gather. Plain data: who only describes a run needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatherConfig:
    """Grid of the gather, bytes that a program has in flight (at least a block), and its warps."""

    num_ctas: int = 4
    in_flight_bytes: int = 1 << 16
    num_warps: int = 16


DEFAULT = GatherConfig()
