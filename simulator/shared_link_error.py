"""What step-constant link shares cost in accuracy: the timeline against shares that change with every transfer.

`python -m simulator.shared_link_error` prints the table in docs/validation.md, for the default experiment at fetch cap
0.1 on 2, 4 and 8 replicas whose KV is local or on the far socket.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from simulator.engine_rates import engine_rates
from simulator.experiment import expand, resolve
from simulator.points import run_works
from simulator.replay import replay
from simulator.specs.experiment import ExperimentSpec
from simulator.step_reference import play_host
from simulator.timeline import play
from simulator.topology import HostTopology

NUM_STEPS, WARM_UP_STEPS = 24, 4


@dataclass(frozen=True, slots=True)
class SharedLinkError:
    timeline_s: float
    """Mean step of the timeline."""
    reference_s: float
    """Mean step of the reference."""
    link_utilization: float
    link_share: float
    """Share of its solo rate that each GPU gets when all transfer."""

    @property
    def error(self) -> float:
        return self.timeline_s / self.reference_s - 1


def shared_link_error(experiment: ExperimentSpec) -> SharedLinkError:
    """Play an experiment with several replicas both ways."""
    point = resolve(experiment)
    runs = run_works(point, replay(point.group, point.policy, point.mapping, experiment.seed))
    rates = engine_rates(point.hardware, point.policy.transport, point.policy.gather_ctas)
    topology = HostTopology(point.hardware, len(runs), experiment.placement.host_numa)
    fast = play(runs, rates, topology)
    slow = play_host([(run.rules, run.work) for run in runs], rates, topology, runs[0].link_bytes_per_s)
    return SharedLinkError(
        timeline_s=float(fast.step_s[:, WARM_UP_STEPS:].mean()),
        reference_s=float(np.mean([gpu.step_s[WARM_UP_STEPS:].mean() for gpu in slow])),
        link_utilization=float(fast.h2d_busy_s.sum() / fast.step_s.sum()),
        link_share=topology.shares(list(range(len(runs))), runs[0].link_bytes_per_s)[0],
    )


def main() -> None:
    print("host KV  GPUs  batch  link busy  share  timeline ms  reference ms   error")
    for numa, num_gpus, batch in itertools.product(("local", "far"), (2, 4, 8), (8, 16, 32, 64)):
        (experiment,) = expand(
            {
                "placement.host_numa": numa,
                "placement.num_gpus": num_gpus,
                "workload.batch_size": batch,
                "workload.output_tokens": NUM_STEPS,
                "policy.fetch_cap": 0.1,
            },
            {},
        )
        e = shared_link_error(experiment)
        print(
            f"{numa:<8} {num_gpus:>4} {batch:>6} {e.link_utilization:>10.0%} {e.link_share:>6.2f} "
            f"{e.timeline_s * 1e3:>12.3f} {e.reference_s * 1e3:>13.3f} {e.error:>+7.2%}"
        )


if __name__ == "__main__":
    main()
