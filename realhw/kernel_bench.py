"""Every harness kernel against its byte floor, one JSON line per figure: `python -m realhw.kernel_bench --out FILE`.

The ceilings (copy in HBM, large copies over the host link) are measured in the same run. A figure's `floor_s` is the
time in which its bytes, each input read once, would move at its ceiling.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from realhw import linkbench
from realhw.device import device_info
from realhw.geometry import GEOMETRIES
from realhw.graph_timer import Branch, Timing, run_branches, time_launches
from realhw.kernels.attention.api import AttentionConfig
from realhw.kernels.gather.config import GatherConfig
from realhw.kernels.score.api import ScoreConfig
from realhw.measurement import Recorder
from realhw.microbench import activation_work, append_work, bench_memory, measure
from realhw.pairbench import layer_stack
from realhw.products import leave_multiprocessors
from realhw.schedule import PRIORITY
from realhw.workbench import (
    GatherBench,
    Work,
    attention_work,
    plan_reset_work,
    plan_work,
    pool_work,
    score_work,
    topk_work,
    write_back_work,
)

QWEN = GEOMETRIES["Qwen3-8B"]
KIB = 1 << 10
LINK_BYTES = 16 << 20
LAYERS, KERNELS_PER_LAYER = 24, 5
BESIDE = (GatherConfig(), GatherConfig(8, 32 * KIB, 8), GatherConfig(12, 32 * KIB, 8), GatherConfig(2, 128 * KIB, 16))
BESIDE_TUNE = (
    *BESIDE, GatherConfig(5, 64 * KIB, 8), GatherConfig(6, 32 * KIB, 8), GatherConfig(3, 64 * KIB, 16),
    GatherConfig(8, 64 * KIB, 16), GatherConfig(16, 16 * KIB, 8), GatherConfig(16, 32 * KIB, 8),
)  # fmt: skip


class Bench:
    """Records figures with their share of a ceiling: `hbm`, `h2d` or `d2h` bytes per second."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._ceilings: dict[str, float] = {}

    def ceiling(self, name: str, bytes_per_s: float) -> None:
        """What figures named so are compared with from here on."""
        self._ceilings[name] = bytes_per_s

    def figure(self, kind: str, num_bytes: int, timing: Timing, ceiling: str = "hbm", **params: Any) -> None:
        """Record one; prints what it wrote."""
        floor_s = num_bytes / self._ceilings[ceiling]
        row = self.recorder.add(
            kind, timing.median_s, timing.spread_s, timing.repetitions, num_bytes, ceiling=ceiling, floor_s=floor_s,
            of_ceiling=round(floor_s / timing.median_s, 4), **params,
        )  # fmt: skip
        print(kind, f"{row.median * 1e6:.2f} us", f"{floor_s / row.median:.1%} of {ceiling}", params, flush=True)


def bench_ceilings(bench: Bench, link: GatherBench | None) -> None:
    """HBM copy and read, and with `link` large copies each way."""
    bench_memory(bench.recorder)
    copy = bench.recorder.rows[-2]
    bench.ceiling("hbm", copy.num_bytes / copy.median)
    if link is not None:
        for direction, work in (("h2d", link.copy_h2d(LINK_BYTES)), ("d2h", link.copy_d2h(LINK_BYTES))):
            timing = time_launches(work.launches, 64, 7)
            bench.ceiling(direction, LINK_BYTES / timing.median_s)
            bench.figure("copy", LINK_BYTES, timing, direction, direction=direction)


def bench_attention(bench: Bench, tune: bool) -> None:
    """Two rows over 129 blocks; with `tune` other tiles and splits."""
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
            bench.figure("attention", work.num_bytes, measure(work), batch=batch, rows=2, config=str(config))
    work = attention_work(QWEN, 16, 32768, 1)
    bench.figure("attention", work.num_bytes, measure(work), batch=16, rows=1, tokens=32768)


def bench_score(bench: Bench, tune: bool) -> None:
    """Compressed keys of 16K and 32K tokens; with `tune` other tiles."""
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
            bench.figure("score", work.num_bytes, measure(work), batch=batch, blocks=blocks, config=str(config))


def bench_select(bench: Bench, tune: bool) -> None:
    """Top-K and plan: sizes on both sides of a power of two, 128 slots and 135."""
    for batch, slots in ((64, 128), (64, 135), (8, 135), (32, 135)):
        reset = plan_reset_work(QWEN, batch, slots)
        reset_s = measure(reset).median_s
        for warps in (1, 2, 4) if tune else (0,):
            for cap in (6, 28):
                work = plan_work(QWEN, batch, 1030, 128, cap, slots, warps)
                timing = measure(work)
                net = Timing(timing.median_s - reset_s, timing.spread_s, timing.repetitions)
                bench.figure("plan", work.num_bytes, net, batch=batch, k=128, slots=slots, cap=cap, warps=warps)
    for batch, blocks in ((64, 1030), (32, 1030), (8, 1030), (16, 2060), (64, 2060)):
        for warps in (1, 2, 4, 8) if tune else (0,):
            work = topk_work(QWEN, batch, blocks, 128, warps)
            bench.figure("topk", work.num_bytes, measure(work), batch=batch, k=128, blocks=blocks, warps=warps)


def bench_small(bench: Bench) -> None:
    """Pooling of whole blocks, append of one token, gated activation."""
    work = pool_work(QWEN, 1 << 16)
    bench.figure("pool", work.num_bytes, measure(work), blocks=1 << 16)
    for batch in (16, 64):
        for kind, work in (("append", append_work(QWEN, batch)), ("activation", activation_work(QWEN, 2 * batch))):
            bench.figure(kind, work.num_bytes, time_launches(work.launches, 200, 9), batch=batch)


def bench_link(bench: Bench, link: GatherBench) -> None:
    """Gather by grid and bytes in flight, write-back of filled blocks, copies by method."""
    for ctas in (1, 2, 4, 8, 16):
        for in_flight, warps in ((8 * KIB, 4), (32 * KIB, 8), (64 * KIB, 16)):
            work = link.gather(2048, GatherConfig(ctas, in_flight, warps))
            timing = time_launches(work.launches, len(work.launches), 5)
            bench.figure("gather", work.num_bytes, timing, "h2d", ctas=ctas, in_flight_bytes=in_flight, warps=warps)
    for batch in (16, 64):
        for per_token in (False, True):
            work = write_back_work(link, QWEN, batch, per_token)
            timing = time_launches(work.launches, 32, 7)
            bench.figure("writeback", work.num_bytes, timing, "d2h", batch=batch, per_token=per_token)
    linkbench.bench_copies(bench.recorder, link)
    linkbench.bench_submission(bench.recorder, link)


def bench_gather_beside_stack(bench: Bench, link: GatherBench, tune: bool) -> None:
    """A gather beside the layer stack (four products and attention a layer): rates of both against alone.

    Products leave the default gather's multiprocessors, as in a decode step; with `tune` also none.
    """
    reserved = GatherConfig().num_ctas
    for batch, left in itertools.product((8, 16, 32, 64), (reserved, 0) if tune else (reserved,)):
        work = layer_stack(QWEN, batch, attention_work(QWEN, batch, 2064, 2))
        stack = Branch(work.launches, LAYERS * KERNELS_PER_LAYER)
        with leave_multiprocessors(left):
            run_branches([stack], 20)  # the first replays after so many allocations are up to a tenth slower
            for config in BESIDE_TUNE if tune else BESIDE:
                _beside_stack(bench, link.gather(1024, config), stack, config, {"batch": batch, "left": left})


def _beside_stack(
    bench: Bench, gather: Work, stack: Branch, config: GatherConfig, params: dict[str, Any]
) -> None:  # fmt: skip
    alone = float(np.median(run_branches([stack], 5)[:, 0]))  # each time: clocks move by several percent
    solo = time_launches(gather.launches, 8, 5).median_s
    second = Branch(gather.launches, max(1, int(0.9 * alone / solo)), PRIORITY["H"])
    both = np.median(run_branches([stack, second], 5), axis=0)
    bench.figure(
        "beside_stack", second.calls * gather.num_bytes, Timing(float(both[1]), 0.0, 5), "h2d", **params,
        ctas=config.num_ctas, in_flight_bytes=config.in_flight_bytes, warps=config.num_warps,
        stack_alone_s=alone, stack_slower=round(both[0] / alone - 1, 4),
        gather_keeps=round(second.calls * solo / both[1], 4), gather_solo_s=solo,
    )  # fmt: skip


PARTS = ("select", "beside", "link", "attention", "score", "small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("kernel_bench.jsonl"))
    parser.add_argument("--tune", action="store_true", help="also try other tile shapes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--host-gib", type=int, default=2)
    parser.add_argument("--commit", help="what the file says that it was made with")
    options = parser.parse_args()
    given = [text.replace(str(options.out), options.out.name) for text in sys.argv[1:]]
    of = {"commit": options.commit, "command": ["python", "-m", "realhw.kernel_bench", *given]}
    recorder = Recorder(options.out, {**device_info().as_dict(), **of})
    bench = Bench(recorder)
    link = GatherBench(options.host_gib << 30) if {"beside", "link"} & set(options.parts) else None
    bench_ceilings(bench, link)
    if "attention" in options.parts:
        bench_attention(bench, options.tune)
    if "score" in options.parts:
        bench_score(bench, options.tune)
    if "select" in options.parts:
        bench_select(bench, options.tune)
    if "small" in options.parts:
        bench_small(bench)
    if link is not None and "beside" in options.parts:
        bench_gather_beside_stack(bench, link, options.tune)
    if link is not None and "link" in options.parts:
        bench_link(bench, link)
    print(json.dumps({"out": str(options.out), "figures": len(recorder.rows)}))


if __name__ == "__main__":
    main()
