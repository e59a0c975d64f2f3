"""Measure this machine into a hardware profile: micro-benchmarks of one kernel kind, and pairs of two.

No graph here holds more than two kernel kinds and nothing is fitted to a decode step. Measuring needs torch and triton
only (`python -m realhw.calibrate --raw FILE`); writing the profile needs the simulator's specs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from realhw import gpu_pair, launchbench, linkbench, microbench, numa, pairbench
from realhw.device import device_info, require_gpu
from realhw.geometry import GEOMETRIES
from realhw.host_kv import require_pinnable
from realhw.measurement import Recorder
from realhw.workbench import GatherBench
from traces.errors import InputError


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """Where the profile goes and how much host memory may be pinned."""

    out: Path
    name: str | None = None
    """Profile name; null: from the device's."""
    base: str | None = None
    """Catalog profile for what cannot be measured here; null: the one whose device name matches."""
    pinned_gib: int = 2
    numa_node: int | None = None
    """Node to bind the CPU and the pinned memory to; null: as started."""


def calibrate(options: CalibrateOptions) -> Path:
    """Measure, fit, write the profile's YAML (raw measurements beside it); returns its path.

    Raises `EnvironmentMissing` without a usable GPU, `InputError` for an unknown base or node.
    """
    from realhw.measurement import read_measurements
    from realhw.profile import build_profile, find_template, write_profile

    require_gpu()
    find_template(device_info().name, options.base)  # before a minute of measuring
    raw = options.out.with_suffix(".jsonl")
    measure_machine(raw, options.pinned_gib, options.numa_node)
    write_profile(build_profile(read_measurements(raw), options.name, options.base), options.out)
    return options.out


def measure_machine(
    raw: Path, pinned_gib: int = 2, numa_node: int | None = None, only: Sequence[str] | None = None
) -> None:
    """Run every micro-benchmark, appending to `raw` as it goes; parts that `raw` has of this very GPU are left out.

    only: names of the parts to run; null: all.
    """
    require_gpu()
    require_pinnable(pinned_gib << 30)
    nodes, num_gpus = numa.describe(), torch.cuda.device_count()
    if numa_node is not None:
        numa.bind(numa_node)
    uuid = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    on = {"numa_nodes": nodes.num_nodes, "numa_node": numa_node, "gpus": num_gpus, "uuid": uuid}
    recorder = Recorder(raw, {**device_info().as_dict(), **on})
    print(nodes.summary(), file=sys.stderr)
    if num_gpus < 2:
        print("one GPU: copies between GPUs and two host links at once cannot be measured here", file=sys.stderr)
    torch.cuda.manual_seed(0)
    geometry = GEOMETRIES["Qwen3-8B"]
    bench = GatherBench(pinned_gib << 30)
    parts: tuple[tuple[str, Callable[[], None]], ...] = (
        ("memory", lambda: microbench.bench_memory(recorder)),
        ("copies", lambda: linkbench.bench_copies(recorder, bench)),
        ("gather", lambda: linkbench.bench_gather(recorder, bench)),
        ("submission", lambda: linkbench.bench_submission(recorder, bench)),
        ("hop", lambda: linkbench.bench_hop(recorder)),
        ("packing", lambda: linkbench.bench_pack(recorder, bench)),
        ("overheads", lambda: linkbench.bench_overheads(recorder)),
        ("launches", lambda: launchbench.bench_layer_launches(recorder)),
        ("pairs", lambda: pairbench.bench_pairs(recorder, bench, geometry)),
        ("selection", lambda: microbench.bench_selection(recorder, geometry)),
        ("attention", lambda: microbench.bench_attention(recorder, geometry)),
        ("small heads", lambda: microbench.bench_small_heads(recorder, GEOMETRIES["SmolLM2-135M"])),
        ("switches", lambda: microbench.bench_switches(recorder, geometry)),
        ("small", lambda: microbench.bench_small(recorder, geometry)),
        ("gemm", lambda: microbench.bench_gemm(recorder, tuple(GEOMETRIES.values()))),
        ("nodes", lambda: linkbench.bench_nodes(recorder, nodes.cpus if nodes.num_nodes > 1 else ())),
        ("two GPUs", lambda: gpu_pair.bench_gpu_pair(recorder, pinned_gib << 30) if num_gpus > 1 else None),
    )
    unknown = set(only or ()) - {name for name, _ in parts}
    if unknown:
        raise InputError(f"parts {sorted(unknown)}: known are {', '.join(name for name, _ in parts)}")
    for name, part in parts:
        if name in recorder.finished or (only is not None and name not in only):
            continue
        began = time.perf_counter()
        part()
        recorder.finish(name)
        torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--raw", type=Path, required=True, help="JSONL file of measurements")
    parser.add_argument("--pinned-gib", type=int, default=2)
    parser.add_argument("--numa-node", type=int)
    parser.add_argument("--parts", nargs="+", help="names of the parts to measure")
    options = parser.parse_args()
    began = time.perf_counter()
    measure_machine(options.raw, options.pinned_gib, options.numa_node, options.parts)
    print(json.dumps({"raw": str(options.raw), "seconds": round(time.perf_counter() - began, 1)}))


if __name__ == "__main__":
    main()
