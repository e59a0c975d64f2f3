"""The pair table of a profile, from a kernel and what ran beside it."""

from __future__ import annotations

from typing import Any

from realhw.figures import FigureMaker, rounded
from realhw.measurement import KV_HEADS, Measurement, RawCalibration
from traces.errors import InputError

LEAST_RATE = 0.01
"""A kernel that stands still beside another goes on when that one ends; the timeline knows no rate of 0."""


def pair_rates(raw: RawCalibration, figures: FigureMaker) -> list[dict[str, Any]]:
    """Two kernels by rounds that start together, as a layer starts them; a kernel and a transfer run freely.

    What was timed beside the layer stack holds for both kinds of kernel in it, products and attention.
    """
    names = {"kernel": "kernel", "beside": "beside", "ctas": "gather_ctas", "batch": "batch_size"}
    pairs = []
    for values in dict.fromkeys(tuple(r.params.get(name) for name in names) for r in raw.select("pair")):
        of = dict(zip(names, values, strict=True))
        kind = "pair_round" if raw.select("pair_round", **of) else "pair"
        kernel, beside = (
            sorted(raw.select(kind, which=which, **of), key=lambda r: int(r.params.get("blocks", 0)))
            for which in ("kernel_rate", "beside_rate")
        )
        if len(kernel) != len(beside):
            raise InputError(f"measurements: {kind} {of} lacks the rate of one side")
        what = "rounds that start both" if kind == "pair_round" else "a graph of the two"
        pair: dict[str, Any] = {names[name]: value for name, value in of.items() if value is not None}
        if "batch_size" in pair:
            pair["kv_heads"] = kernel[-1].params.get("kv_heads", KV_HEADS)
        pair["kernel_rate"] = _share(figures, kernel[-1].median, what, kernel[-1])
        pair["beside_rate"] = _share(figures, beside[-1].median, what, beside[-1])
        if len(beside) > 1:
            pair |= _launch_wait(figures, beside[0], beside[-1])
        pairs += _in_stack(pair, beside[-1]) if of["kernel"] == "stack" else [pair]
    return pairs


def _in_stack(pair: dict[str, Any], row: Measurement) -> list[dict[str, Any]]:
    """The pair of either kind in the stack, with a launch of that kind."""
    return [
        pair | {"kernel": kind, "kernel_s": rounded(row.params[f"{kind}_alone_s"])} for kind in ("gemm", "attention")
    ]


def _share(figures: FigureMaker, value: float, what: str, row: Measurement) -> dict[str, Any]:
    figure = figures.figure(min(1.0, max(LEAST_RATE, value)), what, row.spread, row.repetitions)
    return figure.model_dump(exclude_none=True)


def _launch_wait(figures: FigureMaker, short: Measurement, long: Measurement) -> dict[str, Any]:
    """Of gathers of two lengths: what each launch waits beside the kernel, and its rate from then on."""
    alone = [r.params["beside_alone_s"] for r in (short, long)]
    beside = [a / max(LEAST_RATE, r.median) for a, r in zip(alone, (short, long), strict=True)]
    rate = min(1.0, (alone[1] - alone[0]) / max(beside[1] - beside[0], 1e-9))
    wait_s = max(0.0, beside[0] - alone[0] / rate)
    sizes = f"launches of {short.params['blocks']} and {long.params['blocks']} blocks beside the kernel"
    wait = figures.figure(wait_s, sizes, beside[0] * short.spread / short.median, short.repetitions)
    return {
        "beside_rate": _share(figures, rate, sizes, long),
        "launch_wait_s": wait.model_dump(exclude_none=True),
        "kernel_s": rounded(long.params["kernel_alone_s"]),
    }
