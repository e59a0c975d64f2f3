"""Speed of the timeline and of a whole `oasis-sim run`; `pytest -m bench -p no:xdist`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from simulator.engine_rates import engine_rates
from simulator.experiment import expand, resolve
from simulator.points import demands_by_gpu, run_works
from simulator.timeline import play
from simulator.topology import HostTopology

pytestmark = pytest.mark.bench
NUM_STEPS = 20_000


@pytest.mark.parametrize("batch_size", [14, 128])
@pytest.mark.parametrize("system", ["dense", "retrieval", "oasiskv"])
def test_timeline_steps_per_second(benchmark, synthetic, system, batch_size):
    """Steps/s of Qwen3-8B's 36 layers on one GPU, SimPy included; the work of the steps is built before."""
    settings = {"trace": "synthetic", "trace_group": "short", "system": system, "workload.batch_size": batch_size}
    (experiment,) = expand({**settings, "workload.output_tokens": NUM_STEPS}, {})
    point = resolve(experiment)
    runs = run_works(point, demands_by_gpu(point))
    rates = engine_rates(
        point.hardware, point.policy.transport, point.policy.gather_ctas, point.spec.workload.batch_size
    )
    topology = HostTopology(point.hardware, 1, point.spec.placement)
    play(runs, rates, topology)
    benchmark.pedantic(play, (runs, rates, topology), rounds=5)
    benchmark.extra_info["steps_per_s"] = round(NUM_STEPS / benchmark.stats.stats.median)


@pytest.mark.parametrize("start", ["cold", "warm"])
def test_run_from_the_shell(benchmark, tmp_path, start):
    """`oasis-sim run --json`: with an empty result cache, and repeated."""
    calls = iter(range(1000))

    def run() -> None:
        number = next(calls)
        cache = tmp_path / ("cache" if start == "warm" else f"cache-{number}")
        subprocess.run(
            [sys.executable, "-m", "oasis_sim", "run", "--json", "--out", str(tmp_path / f"run-{number}")],
            env={**os.environ, "OASIS_SIM_CACHE": str(cache)},
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            check=True,
        )

    run()
    benchmark.pedantic(run, rounds=3)
