"""The pair table: how a kernel kind and a transfer, or two kernel kinds, slow each other in one graph."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from realhw.device import device_info
from realhw.geometry import GEOMETRIES, ModelGeometry
from realhw.graph_timer import Branch, run_branches, run_rounds
from realhw.kernels.gather.config import GatherConfig
from realhw.measurement import Recorder
from realhw.products import leave_multiprocessors
from realhw.schedule import PRIORITY
from realhw.workbench import GatherBench, Work, attention_work, score_work, topk_work, weight_sets

TARGET_S = 8e-3
"""Each branch alone takes about this long, so that the two end together unless they slow each other. A gather reads
more host memory in it than a CPU caches."""
ROUNDS = 32
BATCHES = (1, 8, 16, 32, 64)
GATHER_CTAS = (4, 8, 16)
GATHER_BLOCKS = (256, 2048)
"""Blocks of a short and a long launch: how long a launch waits for a multiprocessor, and its rate from then on."""
COPY_BYTES = 1 << 20
WORKING_SET_TOKENS, SCORED_BLOCKS = 2064, 1030


@dataclass(frozen=True, slots=True)
class Side:
    """What runs beside a kernel, on a stream of its priority."""

    name: str
    work: Work
    priority: int = 0
    params: dict[str, Any] = field(default_factory=dict)


def bench_pairs(recorder: Recorder, bench: GatherBench, geometry: ModelGeometry) -> None:
    """{GEMM, attention, score, top-K} x copies each way, {layer stack, score, top-K} x gather of 4, 8, 16 blocks,
    {GEMM, attention} x {score, top-K}.

    A gather beside products alone, or beside attention alone, finds multiprocessors free at other times than beside a
    stack of both.
    """
    copies = [Side("ce_h2d", bench.copy_h2d(COPY_BYTES)), Side("ce_d2h", bench.copy_d2h(COPY_BYTES))]
    gathers = []
    for ctas, blocks in itertools.product(GATHER_CTAS, GATHER_BLOCKS):
        work = bench.gather(blocks, GatherConfig(num_ctas=ctas))
        gathers.append(Side("gather", work, PRIORITY["H"], {"ctas": ctas, "blocks": blocks}))
    sides_alone = {id(side): _alone(side.work) for side in (*copies, *gathers)}
    for batch in BATCHES:
        kernels: dict[str, Work] = {
            "gemm": layer_products(geometry, 2 * batch),
            "attention": attention_work(geometry, batch, WORKING_SET_TOKENS, 2),
            "score": score_work(geometry, batch, SCORED_BLOCKS),
            "topk": topk_work(geometry, batch, SCORED_BLOCKS, 128),
        }
        alone = {name: _alone(work) for name, work in kernels.items()}
        for name, kernel in kernels.items():
            for side in copies if name in ("gemm", "attention") else (*copies, *gathers):
                _pair(recorder, batch, name, kernel, alone[name], side, sides_alone[id(side)])
        with leave_multiprocessors(GatherConfig().num_ctas):
            stack = layer_stack(geometry, batch, kernels["attention"])
            stack_s = _alone(stack)
            parts = {f"{name}_alone_s": alone[name] for name in ("gemm", "attention")}
            for side in gathers:
                told = replace(side, params=side.params | parts)
                _pair(recorder, batch, "stack", stack, stack_s, told, sides_alone[id(side)])
        for name in ("gemm", "attention"):
            for other in ("score", "topk"):
                side = Side(other, kernels[other], PRIORITY["B"])
                _pair(recorder, batch, name, kernels[name], alone[name], side, alone[other])
                _round(recorder, batch, name, kernels[name], 4 if name == "gemm" else 1, other, kernels[other])


def layer_stack(geometry: ModelGeometry, batch: int, attention: Work) -> Work:
    """Products and attention of a layer in turn, two rows a request."""
    qkv, *others = (weight_sets(n, k).product(2 * batch) for k, n in geometry.layer_weight_shapes().values())
    parts = [qkv, attention, *others]
    turns = max(len(work.launches) for work in parts)
    launches = [work.launches[i % len(work.launches)] for i in range(turns) for work in parts]
    return Work(launches, sum(work.num_bytes for work in parts) // len(parts))


def layer_products(geometry: ModelGeometry, rows: int) -> Work:
    """A layer's products in turn: what slows a product depends on how its grid fills the chip."""
    products = [weight_sets(n, k).product(rows) for k, n in geometry.layer_weight_shapes().values()]
    turns = max(len(work.launches) for work in products)
    launches = [work.launches[i % len(work.launches)] for i in range(turns) for work in products]
    return Work(launches, sum(work.num_bytes for work in products) // len(products))


def _alone(work: Work) -> float:
    """Seconds per launch in a graph of its own, as long as the pair's graph."""
    once = float(np.median(run_branches([Branch(work.launches, 16)], 3)[:, 0])) / 16
    calls = max(4, round(TARGET_S / once))
    return float(np.median(run_branches([Branch(work.launches, calls)], 5)[:, 0])) / calls


def _pair(
    recorder: Recorder, batch: int, name: str, kernel: Work, kernel_s: float, side: Side, side_s: float
) -> None:  # fmt: skip
    first = Branch(kernel.launches, max(4, round(TARGET_S / kernel_s)))
    second = Branch(side.work.launches, max(4, round(TARGET_S / side_s)), side.priority)
    both = run_branches([first, second], 5)
    rates = np.array([overlap_rates(a, b, first.calls * kernel_s, second.calls * side_s) for a, b in both])
    params = {"ctas": None, **side.params, "kernel_alone_s": kernel_s, "beside_alone_s": side_s}
    _record(recorder, "pair", rates, batch, name, side.name, params)


def _round(
    recorder: Recorder, batch: int, name: str, kernel: Work, calls: int, side: str, work: Work
) -> None:  # fmt: skip
    """The same for launches that start together, as a layer starts attention and scoring.

    Attention joins its blocks' arrival, so scoring starts a little earlier and holds the multiprocessors first. Top-K
    comes when attention already runs.
    """
    first, second = Branch(kernel.launches, calls), Branch(work.launches, 1, PRIORITY["B"])
    joins = (name, side) == ("attention", "score")
    first_s = float(np.median(_mean_rounds([first], joins)[:, 0]))
    second_s = float(np.median(_mean_rounds([second])[:, 0]))
    both = _mean_rounds([first, second], joins)
    rates = np.array([overlap_rates(a, b, first_s, second_s) for a, b in both])
    _record(recorder, "pair_round", rates, batch, name, side, {"ctas": None})
    for which, column in (("kernel", 0), ("beside", 1)):
        recorder.add(
            "round", float(np.median(both[:, column])), float(np.diff(np.percentile(both[:, column], [25, 75]))[0]),
            len(both), which=which, alone_s=(first_s, second_s)[column], kernel=name, beside=side, batch=batch,
        )  # fmt: skip


def _mean_rounds(branches: list[Branch], joins: bool = False) -> np.ndarray:
    """Seconds of each branch, mean over a replay's rounds: [replays, branches]. Their sum is what a step pays."""
    seconds = run_rounds(branches, ROUNDS, 5, joins).reshape(5, ROUNDS, len(branches))
    return np.asarray(seconds.mean(axis=1))


def _record(
    recorder: Recorder, kind: str, rates: np.ndarray, batch: int, name: str, side: str, params: dict[str, Any]
) -> None:
    low, mid, high = np.percentile(rates, [25, 50, 75], axis=0)
    for column, which in enumerate(("kernel_rate", "beside_rate")):
        recorder.add(
            kind, float(mid[column]), float((high - low)[column]), len(rates), unit="1", which=which, kernel=name,
            beside=side, batch=batch, **params,
        )  # fmt: skip


def overlap_rates(first_s: float, second_s: float, first_alone_s: float, second_alone_s: float) -> tuple[float, float]:
    """Rate of each branch while both ran, 1 = alone: what is left when one ends runs alone."""
    if first_s <= second_s:
        done_s = second_alone_s - (second_s - first_s)
        return first_alone_s / first_s, max(0.0, done_s) / first_s
    done_s = first_alone_s - (first_s - second_s)
    return max(0.0, done_s) / second_s, second_alone_s / second_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--raw", type=Path, required=True, help="JSONL file of measurements")
    parser.add_argument("--pinned-gib", type=int, default=2)
    options = parser.parse_args()
    recorder = Recorder(options.raw, device_info().as_dict())
    bench_pairs(recorder, GatherBench(options.pinned_gib << 30), GEOMETRIES["Qwen3-8B"])


if __name__ == "__main__":
    main()
