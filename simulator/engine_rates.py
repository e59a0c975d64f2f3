"""How fast the engines of one GPU run beside each other: a lookup on what is active.

Engines: C (compute stream), B (side stream), H (host-to-device transfers), D (device-to-host).
C and B run a kernel kind; H and D are idle or busy. Rate 1 is the engine alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from simulator.specs.hardware import HardwareSpec, PairRate
from simulator.specs.policy import Transport

NUM_KINDS = 5
C, B, H, D = range(4)
Float = NDArray[np.float64]
PRODUCTS_PER_LAYER = 4
"""QKV, O, gate and up, down: what calibration runs in turn."""
ALONE = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Served:
    """What the kernels of a step work for: requests, and KV heads of one on this GPU (null: as many as were timed)."""

    batch_size: float
    kv_heads: int | None = None


class Kind(IntEnum):
    """What C or B runs; index of the rate table."""

    IDLE = 0
    GEMM = 1
    ATTENTION = 2
    SCORE = 3
    TOPK = 4


def _pair(
    pairs: tuple[PairRate, ...], kernel: Kind, beside: str, gather_ctas: int, served: Served
) -> tuple[float, float] | None:
    """(rate of `kernel`, rate of `beside`) while both run, null where the pair is not listed."""
    rows = _rows(pairs, kernel, beside)
    if not rows:
        return None
    values = [(row.kernel_rate.value, row.beside_rate.value) for row in rows]
    kernel_rate, beside_rate = _interpolated(rows, values, gather_ctas, served)
    return kernel_rate, beside_rate


def _rows(pairs: tuple[PairRate, ...], kernel: Kind, beside: str) -> list[PairRate]:
    """Rows of a pair, those that name a batch before those that do not."""
    rows = [p for p in pairs if p.kernel == kernel.name.lower() and p.beside == beside]
    return [p for p in rows if p.batch_size is not None] or rows


def _interpolated(
    rows: Sequence[PairRate], values: Sequence[tuple[float, float]], gather_ctas: int, served: Served
) -> tuple[float, float]:
    """Both values, linear in the grid of a gather and in the logarithm of the batch size, constant beyond."""
    timed_heads = rows[0].kv_heads
    batch_size = served.batch_size
    if timed_heads is not None and served.kv_heads is not None:
        batch_size *= served.kv_heads / timed_heads
    sizes = sorted({row.batch_size or 1 for row in rows})
    at_size = []
    for size in sizes:
        chosen = sorted(
            (row.gather_ctas or 0, *pair)
            for row, pair in zip(rows, values, strict=True)
            if (row.batch_size or 1) == size
        )
        grids, first, second = np.array(chosen).T
        at_size.append([np.interp(gather_ctas, grids, first), np.interp(gather_ctas, grids, second)])
    first, second = (np.interp(np.log2(batch_size), np.log2(sizes), column) for column in np.array(at_size).T)
    return float(first), float(second)


class GatherWait:
    """Seconds that a gather beside the layer stack waits for a free multiprocessor: until a running program ends.

    A shorter launch than the one that was timed has shorter programs; a longer one has more of them.
    """

    def __init__(
        self, hardware: HardwareSpec, transport: Transport, gather_ctas: int, kv_heads: int | None = None
    ) -> None:
        self._ctas, self._kv_heads = gather_ctas, kv_heads
        self._timed: list[tuple[bool, int, list[PairRate], list[tuple[float, float]]]] = []
        """(whether products, launches a layer, rows, their wait and launch in seconds)."""
        for kind, launches in ((Kind.GEMM, PRODUCTS_PER_LAYER), (Kind.ATTENTION, 1)):
            rows = [row for row in _rows(hardware.pairs, kind, "gather") if row.launch_wait_s and row.kernel_s]
            values = [(row.launch_wait_s.value, row.kernel_s) for row in rows if row.launch_wait_s and row.kernel_s]
            if rows and transport == "gather":
                self._timed.append((kind is Kind.GEMM, launches, rows, values))

    @property
    def is_timed(self) -> bool:
        """Whether the profile knows of any wait."""
        return bool(self._timed)

    def seconds(self, batch_size: int, gemm_s: Float, attention_s: Float) -> Float:
        """Mean over the instants of a layer of `gemm_s` seconds of products and `attention_s` of attention."""
        wait_s = np.zeros_like(gemm_s + attention_s)
        for is_gemm, launches, rows, values in self._timed:
            total_s = gemm_s if is_gemm else attention_s
            timed_wait_s, timed_s = _interpolated(rows, values, self._ctas, Served(batch_size, self._kv_heads))
            wait_s += total_s * timed_wait_s * np.minimum(1.0, total_s / launches / timed_s)
        return np.asarray(wait_s / (gemm_s + attention_s))


def gather_wait_s(
    hardware: HardwareSpec, transport: Transport, gather_ctas: int, batch_size: int, gemm_s: Float, attention_s: Float,
    kv_heads: int | None = None,
) -> Float:  # fmt: skip
    """`GatherWait.seconds` of one setting."""
    return GatherWait(hardware, transport, gather_ctas, kv_heads).seconds(batch_size, gemm_s, attention_s)


def engine_rates(
    hardware: HardwareSpec, transport: Transport, gather_ctas: int, batch_size: int, kv_heads: int | None = None
) -> Float:
    """Rates [kind of C, kind of B, H busy, D busy, engine], float64 in (0, 1].

    Measured in pairs; three at once is an assumption. C and B share the multiprocessors as their pair does. A transfer
    takes from each of them the part that it takes from it alone (rates multiply), and is slowed by each for the share
    of the multiprocessors that it holds (a mean, weighted by the rates of C and B). H and D slow each other as the
    link's duplex figures say.
    """
    link, served = hardware.link, Served(batch_size, kv_heads)
    h_name = "gather" if transport == "gather" else "ce_h2d"
    duplex_h = min(1.0, link.duplex_h2d_bytes_per_s.value / link.h2d_bytes_per_s.value)
    duplex_d = min(1.0, link.duplex_d2h_bytes_per_s.value / link.d2h_bytes_per_s.value)
    beside_link = {
        (kind, engine): _pair(hardware.pairs, kind, name, gather_ctas, served) or ALONE
        for kind in Kind
        for engine, name in ((H, h_name), (D, "ce_d2h"))
    }
    rates = np.ones((NUM_KINDS, NUM_KINDS, 2, 2, 4))
    for c, b, h, d in itertools.product(Kind, Kind, (0, 1), (0, 1)):
        state = rates[c, b, h, d]
        running = [(engine, kind) for engine, kind in ((C, c), (B, b)) if kind]
        if len(running) == 2:
            state[:2] = _streams(hardware.pairs, c, b, served)
        share = {engine: state[engine] / sum(state[e] for e, _ in running) for engine, _ in running}
        for direction in [engine for engine, busy in ((H, h), (D, d)) if busy]:
            for engine, kind in running:
                state[engine] *= beside_link[kind, direction][0]
            if running:
                state[direction] = sum(share[engine] * beside_link[kind, direction][1] for engine, kind in running)
    rates[:, :, 1, 1, H] *= duplex_h
    rates[:, :, 1, 1, D] *= duplex_d
    if not (rates > 0).all():
        raise ValueError(f"profile {hardware.name}: a pair rate of 0 would stop an engine for ever")
    return rates


def _streams(pairs: tuple[PairRate, ...], c: Kind, b: Kind, served: Served) -> tuple[float, float]:
    """Rates of C running `c` and B running `b`; a pair may be listed either way round."""
    found = _pair(pairs, c, b.name.lower(), 0, served)
    if found is None:
        b_rate, c_rate = _pair(pairs, b, c.name.lower(), 0, served) or ALONE
        return c_rate, b_rate
    return found


class RatesByBatch:
    """`engine_rates` of one GPU for whatever batch size is at hand, each made once."""

    def __init__(
        self, hardware: HardwareSpec, transport: Transport, gather_ctas: int, kv_heads: int | None = None
    ) -> None:
        self._of, self._kv_heads = (hardware, transport, gather_ctas), kv_heads
        self._rates: dict[int, Float] = {}

    def at(self, batch_size: int) -> Float:
        """The table of a batch; an iteration without decoding requests takes that of one."""
        size = max(1, batch_size)
        if size not in self._rates:
            self._rates[size] = engine_rates(*self._of, size, self._kv_heads)
        return self._rates[size]
