"""What step-constant link shares cost in accuracy: the timeline against shares that change with every transfer.

`python -m simulator.shared_link_error` prints the table in docs/validation.md, for the default experiment at fetch cap
0.1 on eight replicas whose KV lies on the far socket, with inter-socket links narrower than the profile's (which eight
gathers do not fill), and that of docs/topology.md: KV behind one NIC per socket, cap 0.05.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from simulator.engine_rates import engine_rates
from simulator.experiment import ResolvedExperiment, expand, resolve
from simulator.points import demands_by_gpu, run_works
from simulator.step_reference import play_host
from simulator.timeline import SharedLinks, play
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


def shared_link_error(point: ResolvedExperiment) -> SharedLinkError:
    """Play a point with several replicas both ways."""
    runs = run_works(point, demands_by_gpu(point))
    rates = engine_rates(
        point.hardware, point.policy.transport, point.policy.gather_ctas, point.spec.workload.batch_size,
        point.shard.num_kv_heads,
    )  # fmt: skip
    topology = HostTopology(point.hardware, len(runs), point.spec.placement)
    links = SharedLinks.of_runs(topology, runs)
    fast = play(runs, rates, topology)
    slow = play_host([(run.rules, run.work) for run in runs], rates, topology, links.solo)
    return SharedLinkError(
        timeline_s=float(fast.step_s[:, WARM_UP_STEPS:].mean()),
        reference_s=float(np.mean([gpu.step_s[WARM_UP_STEPS:].mean() for gpu in slow])),
        link_utilization=float(fast.h2d_busy_s.sum() / fast.step_s.sum()),
        link_share=links.begin_all()[0].link,
    )


def narrowed(point: ResolvedExperiment, inter_socket_bytes_per_s: float) -> ResolvedExperiment:
    """The same point on a host whose sockets are joined by a link of that rate."""
    host = point.hardware.host
    link = host.inter_socket_bytes_per_s.model_copy(update={"value": inter_socket_bytes_per_s})
    host = host.model_copy(update={"inter_socket_bytes_per_s": link})
    return replace(point, hardware=point.hardware.model_copy(update={"host": host}))


def with_one_nic_per_socket(point: ResolvedExperiment) -> ResolvedExperiment:
    nic = point.hardware.nic
    nic = nic.model_copy(update={"per_socket": nic.per_socket.model_copy(update={"value": 1})})
    return replace(point, hardware=point.hardware.model_copy(update={"nic": nic}))


def main() -> None:
    print("inter-socket GB/s  batch  link busy  share  timeline ms  reference ms   error")
    for rate, batch in itertools.product((100e9, 80e9, 60e9, 40e9), (8, 16, 32, 64)):
        (experiment,) = expand(
            {
                "placement.host_numa": "far",
                "placement.num_gpus": 8,
                "workload.batch_size": batch,
                "workload.output_tokens": NUM_STEPS,
                "policy.fetch_cap": 0.1,
            },
            {},
        )
        e = shared_link_error(narrowed(resolve(experiment), rate))
        print(
            f"{rate / 1e9:>17.0f} {batch:>6} {e.link_utilization:>10.0%} {e.link_share:>6.2f} "
            f"{e.timeline_s * 1e3:>12.3f} {e.reference_s * 1e3:>13.3f} {e.error:>+7.2%}"
        )
    print("host residency  batch  link busy  timeline ms  reference ms   error")
    for residency, batch in itertools.product(("none", "fetched"), (4, 8, 16, 32)):
        (experiment,) = expand(
            {
                "placement.kv_tier": "remote",
                "placement.num_gpus": 8,
                "workload.batch_size": batch,
                "workload.output_tokens": NUM_STEPS,
                "policy.fetch_cap": 0.05,
                "policy.host_residency": residency,
            },
            {},
        )
        e = shared_link_error(with_one_nic_per_socket(resolve(experiment)))
        print(
            f"{residency:>14} {batch:>6} {e.link_utilization:>10.0%} {e.timeline_s * 1e3:>12.3f} "
            f"{e.reference_s * 1e3:>13.3f} {e.error:>+7.2%}"
        )


if __name__ == "__main__":
    main()
