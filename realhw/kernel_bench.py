"""Benchmark of every harness kernel against its byte floor, one JSON line per figure: `python -m realhw.kernel_bench`.

Ceilings (device copy, read, large copies over the host link) are measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from realhw.copy_engine import CopyEngine
from realhw.device import device_info, new_event, new_stream
from realhw.geometry import GEOMETRIES
from realhw.graph_timer import Branch, Timing, run_branches, summarise, time_launches
from realhw.kernels.attention.api import AttentionConfig
from realhw.kernels.gather.api import GatherConfig
from realhw.kernels.score.api import ScoreConfig
from realhw.schedule import PRIORITY
from realhw.workbench import (
    GatherBench,
    Work,
    attention_work,
    plan_reset_work,
    plan_work,
    score_work,
    topk_work,
    weight_sets,
)

QWEN = GEOMETRIES["Qwen3-8B"]


class Log:
    """Writes each figure as it is measured, with its share of the ceiling."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.copy_bytes_per_s = 0.0
        self._start = time.perf_counter()

    def figure(self, name: str, work_bytes: int, timing: Timing, **params: Any) -> float:
        rate = work_bytes / timing.median_s
        share = rate / self.copy_bytes_per_s if self.copy_bytes_per_s else None
        row = {
            "name": name, **params, "us": round(timing.median_s * 1e6, 3), "spread_us": round(timing.spread_s * 1e6, 3),
            "floor_bytes": work_bytes, "GB_per_s": round(rate / 1e9, 2),
            "of_copy": None if share is None else round(share, 4), "n": timing.repetitions,
            "at_s": round(time.perf_counter() - self._start, 1),
        }  # fmt: skip
        line = json.dumps(row)
        print(line, flush=True)
        self._out.write(line + "\n")
        self._out.flush()
        return timing.median_s


def measure(work: Work, target_s: float = 2e-3, repetitions: int = 9) -> Timing:
    """Time a work with as many calls as fill `target_s`."""
    once = time_launches(work.launches, len(work.launches), 3).median_s
    calls = max(len(work.launches), int(target_s / once))
    return time_launches(work.launches, min(calls, 2000), repetitions)


def bench_ceilings(log: Log) -> None:
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        torch.mul(source, 1.5, out=target)

    timing = measure(Work([copy], 2 * source.numel() * 4))
    log.copy_bytes_per_s = 2 * source.numel() * 4 / timing.median_s
    log.figure("copy", 2 * source.numel() * 4, timing)
    out = torch.empty((), device="cuda")

    def read() -> None:
        torch.sum(source, dim=0, out=out)

    log.figure("read", source.numel() * 4, measure(Work([read], 0)))


def bench_attention(log: Log, tune: bool) -> None:
    for batch in (16, 32, 64):
        configs = [AttentionConfig()]
        if tune and batch != 16:
            configs += [
                AttentionConfig(block_n, splits, warps, stages)
                for block_n, warps, stages in (
                    (32, 2, 4), (32, 4, 4), (64, 4, 2), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 8, 3), (128, 4, 3),
                )
                for splits in ((2, 4, 8) if batch == 32 else (1, 2, 4))
            ]  # fmt: skip
        for config in configs:
            work = attention_work(QWEN, batch, 2064, 2, config=config)
            log.figure("attention", work.num_bytes, measure(work), batch=batch, rows=2, config=str(config))


def bench_score(log: Log, tune: bool) -> None:
    for batch, blocks in ((16, 2060), (32, 1030), (64, 1030)):
        configs = [ScoreConfig()]
        if tune and batch != 32:
            configs += [
                ScoreConfig(block_n, tiles, warps, stages)
                for block_n, warps, stages in ((32, 4, 3), (32, 2, 4), (64, 4, 2), (64, 8, 3), (128, 8, 2), (32, 4, 5))
                for tiles in (1, 4, 8)
            ]
        for config in configs:
            work = score_work(QWEN, batch, blocks, config)
            log.figure("score", work.num_bytes, measure(work), batch=batch, blocks=blocks, config=str(config))


def bench_select(log: Log, tune: bool) -> None:
    """Top-K and plan: sizes on both sides of a power of two, 128 slots and 135."""
    for batch, slots in ((64, 128), (64, 135), (8, 135), (32, 135)):
        reset = plan_reset_work(QWEN, batch, slots)
        reset_s = log.figure("plan_reset", reset.num_bytes, measure(reset), batch=batch, slots=slots)
        for warps in (1, 2, 4) if tune else (0,):
            for cap in (6, 28):
                work = plan_work(QWEN, batch, 1030, 128, cap, slots, warps)
                timing = measure(work)
                net = Timing(timing.median_s - reset_s, timing.spread_s, timing.repetitions)
                log.figure("plan", work.num_bytes, net, batch=batch, slots=slots, cap=cap, warps=warps)
    for batch, blocks in ((64, 1030), (32, 1030), (8, 1030), (16, 2060), (64, 2060)):
        for search in (False, True) if tune else (False,):
            for warps in ((1, 2, 4) if blocks <= 1536 else (2, 4)) if tune else (0,):
                work = topk_work(QWEN, batch, blocks, 128, warps, search)
                log.figure(
                    "topk", work.num_bytes, measure(work), batch=batch, blocks=blocks, warps=warps, search=search
                )


def bench_link(log: Log, bench: GatherBench) -> None:
    for size in (4096, 8192, 65536, 1 << 20, 1 << 24):
        for direction, work in (("h2d", bench.copy_h2d(size)), ("d2h", bench.copy_d2h(size))):
            log.figure(f"ce_{direction}", size, time_launches(work.launches, 64, 9), size=size)
    for ctas in (1, 2, 4, 8, 16, 32):
        for unroll, warps in ((1, 4), (2, 8), (4, 8)):
            work = bench.gather(2048, GatherConfig(ctas, unroll, warps))
            calls = max(1, ctas // 4)
            timing = time_launches(work.launches, calls, 5)
            log.figure("gather", work.num_bytes, timing, ctas=ctas, unroll=unroll, warps=warps)


def bench_batched_copies(log: Log, bench: GatherBench) -> None:
    """Scattered 8 KiB blocks by batched submission, outside a graph; CPU time to submit and engine time apart."""
    engine = CopyEngine()
    stream = new_stream()
    rng = np.random.default_rng(3)
    for count in (64, 1024, 4096):
        slots = rng.permutation(bench.pool.shape[0])[:count].astype(np.uint64)
        blocks = rng.integers(0, bench.num_host_blocks, count).astype(np.uint64)
        targets = np.uint64(bench.pool.data_ptr()) + slots * np.uint64(bench.block_bytes)
        sources = np.uint64(bench.host.data_ptr()) + blocks * np.uint64(bench.block_bytes)
        sizes = np.full(count, bench.block_bytes, dtype=np.uint64)

        def batched(t: Any = targets, s: Any = sources, z: Any = sizes) -> None:
            engine.copy_batch(t, s, z, stream.cuda_stream)

        def one_by_one(t: Any = targets, s: Any = sources) -> None:
            for target, source in zip(t.tolist(), s.tolist(), strict=True):
                engine.copy(target, source, bench.block_bytes, 1, stream.cuda_stream)

        methods: tuple[tuple[str, Callable[[], None]], ...] = (("batched", batched), ("per_block", one_by_one))
        for name, submit in methods:
            gpu, cpu = [], []
            try:
                for _ in range(8):
                    start, end = (new_event(timing=True) for _ in range(2))
                    start.record(stream)
                    began = time.perf_counter()
                    submit()
                    cpu.append(time.perf_counter() - began)
                    end.record(stream)
                    torch.cuda.synchronize()
                    gpu.append(start.elapsed_time(end) * 1e-3)
            except Exception as error:  # a driver without the call is a finding, not a failure of the bench
                print(f"{name}: {error}", file=sys.stderr)
                continue
            size = count * bench.block_bytes
            log.figure(f"ce_{name}", size, summarise(gpu[2:]), count=count)
            log.figure(f"ce_{name}_cpu", size, summarise(cpu[2:]), count=count)


BESIDE = (
    GatherConfig(8, 4, 8), GatherConfig(6, 4, 8), GatherConfig(5, 8, 8), GatherConfig(4, 8, 16),
    GatherConfig(8, 1, 1, 6), GatherConfig(6, 1, 1, 6), GatherConfig(16, 1, 4, 3),
)  # fmt: skip
BESIDE_TUNE = (
    *BESIDE, GatherConfig(7, 4, 8), GatherConfig(6, 8, 8), GatherConfig(8, 8, 16), GatherConfig(8, 4, 4),
    GatherConfig(12, 4, 8), GatherConfig(16, 2, 8), GatherConfig(3, 8, 16), GatherConfig(2, 16, 16),
    GatherConfig(4, 1, 1, 10), GatherConfig(4, 2, 2, 6), GatherConfig(6, 1, 2, 8), GatherConfig(8, 1, 2, 4),
    GatherConfig(8, 2, 4, 3), GatherConfig(12, 1, 1, 4), GatherConfig(32, 1, 1, 2), GatherConfig(5, 1, 1, 8),
)  # fmt: skip


def bench_gather_beside_stack(log: Log, bench: GatherBench, tune: bool) -> None:
    """A gather beside the layer stack (four products and attention a layer): rates of both against alone."""
    for batch in (32, 64):
        shapes = QWEN.layer_weight_shapes()
        layer = [weight_sets(n, k).product(2 * batch).launches for k, n in shapes.values()]
        attention = attention_work(QWEN, batch, 2064, 2).launches
        stack = []
        for i in range(24):
            for part in (layer[0], attention, *layer[1:]):
                stack.append(part[i % len(part)])
        first = Branch(stack, len(stack))
        alone = float(np.median(run_branches([first], 5)[:, 0]))
        for config in BESIDE_TUNE if tune else BESIDE:
            work = bench.gather(1024, config)
            try:
                solo = time_launches(work.launches, 8, 5).median_s
            except RuntimeError as error:  # a shape that this GPU cannot hold is a finding, not a failure of the bench
                print(f"{config}: {error}", file=sys.stderr)
                continue
            second = Branch(work.launches, max(1, int(0.9 * alone / solo)), PRIORITY["H"])
            both = np.median(run_branches([first, second], 5), axis=0)
            log.figure(
                "stack_beside_gather", 0, Timing(float(both[0]), 0.0, 5), batch=batch, config=str(config),
                stack_alone_us=alone * 1e6, slower=round(both[0] / alone, 4),
                gather_rate=round(second.calls * solo / both[1], 4),
                gather_solo_GB_per_s=round(work.num_bytes / solo / 1e9, 2), gather_us=float(both[1]) * 1e6,
            )  # fmt: skip


PARTS = ("select", "beside", "link", "batched", "attention", "score")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("kernel_bench.jsonl"))
    parser.add_argument("--tune", action="store_true", help="also try other tile shapes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--host-gib", type=int, default=2)
    options = parser.parse_args()
    print(json.dumps(device_info().as_dict()), flush=True)
    with options.out.open("w") as out:
        log = Log(out)
        bench_ceilings(log)
        for part in options.parts:
            if part in ("attention", "score", "select"):
                {"attention": bench_attention, "score": bench_score, "select": bench_select}[part](log, options.tune)
        if {"beside", "link", "batched"} & set(options.parts):
            bench = GatherBench(options.host_gib << 30)
            if "beside" in options.parts:
                bench_gather_beside_stack(log, bench, options.tune)
            if "link" in options.parts:
                bench_link(log, bench)
            if "batched" in options.parts:
                bench_batched_copies(log, bench)


if __name__ == "__main__":
    main()
