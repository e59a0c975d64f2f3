"""The loop against queueing theory: iterations of a given length, the scheduler and the clock as they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from simulator import catalog
from simulator.policy_composition import resolve_policy
from simulator.serving.decode_batch import DecodeBatch
from simulator.serving.demand_table import DemandTable
from simulator.serving.loop import Replica, serve_all
from simulator.serving.pools import Pools, request_pools
from simulator.serving.records import RequestLog
from simulator.serving.scheduler import Scheduler
from simulator.serving.work import Batch
from simulator.specs.experiment import PlacementSpec
from simulator.specs.serving import ServingSpec
from simulator.timeline import SharedLinks
from simulator.topology import HostTopology, Share, Solo
from traces.arrivals import poisson
from traces.workload import Request

MODEL, H100 = catalog.load_model("Qwen3-0.6B"), catalog.load_hardware("h100-sxm")
DENSE = resolve_policy("dense", {}, 4096)
TABLES = request_pools(MODEL, DENSE, 4096)


@dataclass
class TimePerRow:
    """Every token of a batch takes the same time: a processor that its requests share equally."""

    seconds: float

    def resume(self) -> None:
        pass

    def run(self, batch: Batch, share: Share) -> float:
        return self.seconds * (batch.num_decoding + len(batch.chunks))


def play(requests: list[Request], serving: ServingSpec, times: TimePerRow, num_replicas: int = 1) -> RequestLog:
    log = RequestLog()
    nobody = [False] * num_replicas
    links = SharedLinks(HostTopology(H100, num_replicas, PlacementSpec()), Solo(1.0, 1.0), nobody, nobody)

    def replicas(env):
        made = []
        for number in range(num_replicas):
            decode = DecodeBatch(serving.max_num_seqs, 16, DemandTable((), 1, 0))
            scheduler = Scheduler(serving, TABLES, Pools(10**15, 0), decode)
            made.append(Replica(env, number, scheduler, times, links, log))
        return made

    serve_all(requests, replicas, serving.router, log)
    assert log.num_finished == len(requests)
    return log


def drawn(num_requests: int, rate_per_s: float, output_tokens: np.ndarray) -> list[Request]:
    arrival_s = poisson(num_requests, rate_per_s, np.random.default_rng(5))
    return [Request(float(at), 100, int(n)) for at, n in zip(arrival_s, output_tokens, strict=True)]


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_one_at_a_time_with_constant_service_is_m_d_1(load):
    """Each wait follows from the one before (Lindley); the mean is Pollaczek and Khinchine's."""
    service_s, num_requests = 0.01, 10_000
    requests = drawn(num_requests, load / service_s, np.ones(num_requests))
    log = play(requests, ServingSpec(max_num_seqs=1), TimePerRow(service_s))
    waits_s = np.zeros(num_requests)
    for n in range(1, num_requests):
        gap_s = requests[n].arrival_s - requests[n - 1].arrival_s
        waits_s[n] = max(0.0, waits_s[n - 1] + service_s - gap_s)
    np.testing.assert_allclose(log.times_s("queue_s"), waits_s, atol=1e-9)
    np.testing.assert_allclose(log.times_s("e2e_s"), waits_s + service_s, atol=1e-9)
    assert waits_s.mean() == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.1)


@pytest.mark.parametrize("lengths", ["geometric", "constant"])
def test_a_shared_processor_serves_all_lengths_alike(lengths):
    """M/G/1 processor sharing: mean time in system = mean service / (1 - load), whatever the lengths' distribution."""
    mean, seconds, load, num_requests = 30, 0.001, 0.5, 2_500
    tokens = np.full(num_requests, mean)
    if lengths == "geometric":
        tokens = np.random.default_rng(1).geometric(1 / mean, num_requests)
    service_s = tokens.mean() * seconds
    log = play(drawn(num_requests, load / service_s, tokens), ServingSpec(), TimePerRow(seconds))
    assert log.times_s("e2e_s").mean() == pytest.approx(service_s / (1 - load), rel=0.08)


def test_littles_law_holds_exactly():
    """Requests in the system, integrated over time, are the times in the system, summed over requests."""
    tokens = np.random.default_rng(2).integers(1, 40, 500)
    log = play(drawn(500, 20.0, tokens), ServingSpec(max_num_seqs=8), TimePerRow(0.002), num_replicas=2)
    assert log.request_seconds == pytest.approx(float(log.times_s("e2e_s").sum()), rel=1e-9)


def test_shortest_remaining_first_has_the_least_mean_time():
    tokens = np.random.default_rng(3).integers(1, 100, 400)
    requests = drawn(400, 16.0, tokens)
    means = {
        policy: play(requests, ServingSpec(max_num_seqs=1, scheduler=policy), TimePerRow(0.001)).times_s("e2e_s").mean()
        for policy in ("fcfs", "shortest-remaining-first")
    }
    assert means["shortest-remaining-first"] < 0.9 * means["fcfs"]


def test_the_least_loaded_replica_is_no_worse_than_taking_turns():
    tokens = np.random.default_rng(4).geometric(1 / 25, 800)
    requests = drawn(800, 120.0, tokens)
    means = {
        router: play(requests, ServingSpec(router=router, max_num_seqs=1), TimePerRow(0.001), 4)
        .times_s("queue_s")
        .mean()
        for router in ("round-robin", "least-loaded")
    }
    assert means["least-loaded"] < means["round-robin"]


def test_a_closed_batch_is_served_in_the_order_of_the_file():
    requests = [Request(0.0, 100, 1) for _ in range(10)]
    log = play(requests, ServingSpec(max_num_seqs=1), TimePerRow(0.5))
    np.testing.assert_allclose(log.times_s("e2e_s"), 0.5 * np.arange(1, 11), rtol=1e-12)


def test_gaps_between_tokens_are_the_iterations_and_a_stop_is_in_one_of_them():
    """200 tokens alone, and another request's prompt and 50 tokens in between: each token of two takes twice as long,
    and the second request's own gap is that of its iterations."""
    service_s = 0.01
    alone = play([Request(0.0, 100, 200)], ServingSpec(), TimePerRow(service_s))
    assert alone.gaps.num_gaps == 199
    assert alone.gaps.quantile_s(1.0) == pytest.approx(service_s, rel=1e-9)
    log = play([Request(0.0, 100, 200), Request(0.5, 100, 50)], ServingSpec(), TimePerRow(service_s))
    # One iteration with the prompt, 49 in which both decode.
    num_shared = 49
    assert log.gaps.num_gaps == 199 + num_shared
    assert log.gaps.total_s == pytest.approx(service_s * (199 + (1 + num_shared) + 2 * num_shared))
    at = (199 - 1 - num_shared) / log.gaps.num_gaps
    assert log.gaps.quantile_s(at) == pytest.approx(service_s, rel=1e-9)
    assert log.gaps.quantile_s(at + 1e-6) == pytest.approx(2 * service_s, rel=1e-9)
