"""Micro-benchmarks of the host link: copy engines, gather, the hop from a plan to the CPU, packing."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from realhw import numa
from realhw.copy_engine import DEVICE_TO_HOST, HOST_TO_DEVICE, CopyEngine
from realhw.device import new_event, new_stream
from realhw.graph_timer import Branch, run_branches, summarise, time_behind_plans, time_launches
from realhw.kernels.gather.config import GatherConfig
from realhw.measurement import Recorder
from realhw.schedule import PRIORITY
from realhw.workbench import GatherBench
from traces.errors import EnvironmentMissing

COPY_SIZES = (4096, 8192, 16384, 65536, 262144, 1 << 20, 4 << 20, 16 << 20)
GATHER_CTAS = (1, 2, 3, 4, 8, 16)
Addresses = NDArray[np.uint64]
BATCH_COUNTS = (64, 256, 1024, 4096)


def bench_copies(recorder: Recorder, bench: GatherBench) -> None:
    """64 back-to-back copies in a graph, each way alone and both at once."""
    for size in COPY_SIZES:
        for direction, work in (("h2d", bench.copy_h2d(size)), ("d2h", bench.copy_d2h(size))):
            timing = time_launches(work.launches, 64, 7)
            recorder.add("copy", timing.median_s, timing.spread_s, timing.repetitions, size, direction=direction)
    size = 16 << 20
    up, down = bench.copy_h2d(size), bench.copy_d2h(size)
    both = run_branches([Branch(up.launches, 64), Branch(down.launches, 64)], 7)
    for direction, column in (("h2d", 0), ("d2h", 1)):
        timing = summarise(both[:, column], 64)
        recorder.add("copy_duplex", timing.median_s, timing.spread_s, timing.repetitions, size, direction=direction)


def bench_gather(recorder: Recorder, bench: GatherBench) -> None:
    """Random 8 KiB blocks by grid size, back to back; by number of blocks, each launch behind one of another stream."""
    for ctas in GATHER_CTAS:
        config = GatherConfig(num_ctas=ctas)
        work = bench.gather(256 * max(1, min(ctas, 8)), config)
        timing = time_launches(work.launches, len(work.launches), 5)
        recorder.add(
            "gather", timing.median_s, timing.spread_s, timing.repetitions, work.num_bytes, ctas=ctas,
            in_flight_bytes=config.in_flight_bytes,
        )  # fmt: skip
    for blocks in (0, 16, 64, 256, 1024, 4096):
        work = bench.gather(blocks, GatherConfig())
        timing = time_behind_plans(work.launches, PRIORITY["H"])
        recorder.add(
            "gather_size", timing.median_s, timing.spread_s, timing.repetitions, work.num_bytes, blocks=blocks,
            ctas=GatherConfig().num_ctas,
        )  # fmt: skip


def bench_submission(recorder: Recorder, bench: GatherBench) -> None:
    """Copies of single blocks outside a graph: CPU time to submit and time on the engine's stream, per block."""
    engine, stream = CopyEngine(), new_stream()
    rng = np.random.default_rng(3)
    block = np.uint64(bench.block_bytes)
    for count, kind in itertools.product(BATCH_COUNTS, (HOST_TO_DEVICE, DEVICE_TO_HOST)):
        slots = rng.permutation(bench.pool.shape[0])[:count].astype(np.uint64)
        blocks = rng.permutation(bench.num_host_blocks)[:count].astype(np.uint64)
        on_device = np.uint64(bench.pool.data_ptr()) + slots * block
        on_host = np.uint64(bench.host.data_ptr()) + blocks * block
        targets, sources = (on_device, on_host) if kind == HOST_TO_DEVICE else (on_host, on_device)
        sizes = np.full(count, bench.block_bytes, dtype=np.uint64)

        def batched(t: Addresses = targets, s: Addresses = sources, z: Addresses = sizes) -> None:
            engine.copy_batch(t, s, z, stream.cuda_stream)

        def per_block(t: Addresses = targets, s: Addresses = sources, k: int = kind) -> None:
            for target, source in zip(t.tolist(), s.tolist(), strict=True):
                engine.copy(target, source, bench.block_bytes, k, stream.cuda_stream)

        direction = "h2d" if kind == HOST_TO_DEVICE else "d2h"
        for method, submit in (("batched", batched), ("per_block", per_block)):
            try:
                cpu_s, engine_s = _submissions(submit, stream)
            except EnvironmentMissing:  # a driver without batched submission
                continue
            for name, samples in (("submit_cpu", cpu_s), ("submit_engine", engine_s)):
                timing = summarise(samples, count)
                recorder.add(
                    name, timing.median_s, timing.spread_s, timing.repetitions, bench.block_bytes, method=method,
                    count=count, direction=direction,
                )  # fmt: skip


def _submissions(submit: Callable[[], None], stream: torch.cuda.Stream) -> tuple[list[float], list[float]]:
    """CPU seconds of six submissions and seconds of their copies on the stream, one thrown away before."""
    cpu_s, engine_s = [], []
    for _ in range(7):
        start, end = new_event(timing=True), new_event(timing=True)
        start.record(stream)
        began = time.perf_counter()
        submit()
        cpu_s.append(time.perf_counter() - began)
        end.record(stream)
        torch.cuda.synchronize()
        engine_s.append(start.elapsed_time(end) * 1e-3)
    return cpu_s[1:], engine_s[1:]


def bench_hop(recorder: Recorder) -> None:
    """From the end of a kernel that writes a plan to the start of a copy that the CPU enqueues on seeing it.

    The plan's count is copied to pinned memory on the plan's stream; the CPU spins on it, then enqueues.
    """
    plan_stream, copy_stream = new_stream(), new_stream()
    count = torch.zeros(1024, dtype=torch.int32, device="cuda")
    seen = torch.zeros(1024, dtype=torch.int32, pin_memory=True)
    view = seen.numpy()
    source = torch.zeros(1 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    engine, samples = CopyEngine(), []
    for i in range(1, 61):
        planned, started = new_event(timing=True), new_event(timing=True)
        with torch.cuda.stream(plan_stream):
            count.fill_(i)
            planned.record(plan_stream)
            seen.copy_(count, non_blocking=True)
        while view[-1] != i:
            pass
        started.record(copy_stream)
        engine.copy(target.data_ptr(), source.data_ptr(), 1 << 20, HOST_TO_DEVICE, copy_stream.cuda_stream)
        torch.cuda.synchronize()
        samples.append(planned.elapsed_time(started) * 1e-3)
    timing = summarise(samples[10:])
    recorder.add("plan_to_host", timing.median_s, timing.spread_s, timing.repetitions)


def bench_pack(recorder: Recorder, bench: GatherBench) -> None:
    """The CPU packs scattered blocks into one staging buffer, by torch's threads and by one."""
    host = bench.host.view(bench.num_host_blocks, -1).view(torch.int64)
    staging = torch.empty(4096, host.shape[1], dtype=torch.int64, pin_memory=True)
    threads = torch.get_num_threads()
    for used in (threads, 1):
        torch.set_num_threads(used)
        samples = []
        for _ in range(18):
            ids = torch.randint(0, bench.num_host_blocks, (4096,))
            began = time.perf_counter()
            torch.index_select(host, 0, ids, out=staging)
            samples.append(time.perf_counter() - began)
        timing = summarise(samples[3:])
        recorder.add("pack", timing.median_s, timing.spread_s, timing.repetitions, staging.numel() * 8, threads=used)
    torch.set_num_threads(threads)


def bench_nodes(recorder: Recorder, nodes: Iterable[int], num_bytes: int = 1 << 28) -> None:
    """From the memory of each NUMA node, by CPUs of that node: large copies, and a gather by one thread block."""
    for node in nodes:
        try:
            with numa.bound(node):
                _bench_node(recorder, node, num_bytes)
        except EnvironmentMissing as error:  # a container that hides a node measures the rest
            print(error, file=sys.stderr)
        torch._C._host_emptyCache()  # else the next node's memory is this one's


def _bench_node(recorder: Recorder, node: int, num_bytes: int) -> None:
    bench = GatherBench(num_bytes)
    copy, gather = bench.copy_h2d(COPY_SIZES[-1]), bench.gather(256, GatherConfig(num_ctas=1))
    for kind, work, calls in (("node_copy", copy, 64), ("node_gather", gather, 4)):
        timing = time_launches(work.launches, calls, 7)
        recorder.add(kind, timing.median_s, timing.spread_s, timing.repetitions, work.num_bytes, node=node)


def bench_overheads(recorder: Recorder) -> None:
    """Launch of a graph by the CPU, to its end."""
    value = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value.fill_(0.0)
    samples = []
    for _ in range(30):
        torch.cuda.synchronize()
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        samples.append(time.perf_counter() - began)
    timing = summarise(samples[5:])
    recorder.add("graph_launch", timing.median_s, timing.spread_s, timing.repetitions)
