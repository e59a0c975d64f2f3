"""Seconds and memory of serving a request file: `python docs/scripts/serving_speed.py FILE SYSTEM [--set KEY=VALUE]`.

Qwen3-32B on 8 H100 with tensor parallelism, batched stamps spread. CPU seconds of this process, imports included.
"""

from __future__ import annotations

import argparse
import resource
import time

from oasis_sim.settings import parse_value
from simulator.experiment import expand
from simulator.points import run_point

parser = argparse.ArgumentParser()
parser.add_argument("file")
parser.add_argument("system")
parser.add_argument("--set", action="append", default=[])
options = parser.parse_args()
settings = {
    "system": options.system,
    "model": "Qwen3-32B",
    "placement.tensor_parallel": 8,
    "serving.requests": options.file,
    "serving.stamped_batches": "spread",
    "serving.max_model_len": 131_072,
    **{key: parse_value(text) for key, _, text in (given.partition("=") for given in options.set)},
}
(point,) = expand(settings, {})
started_s = time.perf_counter()
row = run_point(point, use_cache=False)
wall_s, used = time.perf_counter() - started_s, resource.getrusage(resource.RUSAGE_SELF)
print(
    f"{options.system}: {row['num_finished']:,} requests, {row['num_iterations']:,} iterations; CPU "
    f"{used.ru_utime + used.ru_stime:.1f} s, wall {wall_s:.1f} s, peak {used.ru_maxrss / 1024:.0f} MB"
)
for name in ("throughput_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "prefix_hit_share"):
    print(f"  {name} {row[name]}")
