"""One serving point from its resolved experiment to its row: requests, replicas, the loop, the summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import simpy

from simulator.engine_rates import RatesByBatch
from simulator.experiment import ResolvedExperiment, serving_groups
from simulator.fetch_path import fetch_path
from simulator.metrics import COLUMNS, SERVING
from simulator.parallel import rank_mappings
from simulator.remote import reads_beyond_host
from simulator.replay import replay_by_gpu
from simulator.serving.decode_batch import DecodeBatch
from simulator.serving.demand_table import DemandTable, Group
from simulator.serving.handover import Handover
from simulator.serving.handover_bytes import HandoverBytes, staging_tables
from simulator.serving.iteration import Iteration
from simulator.serving.kernel_times import Setting
from simulator.serving.left_behind import ALL_CAME, keeps_all_fetched, left_behind, pull_path
from simulator.serving.link_demand import LinkDemand
from simulator.serving.loop import Replica, serve_all
from simulator.serving.network import Network, Traffic, Wire
from simulator.serving.pools import Pools, make_pools, request_pools, static_bytes
from simulator.serving.prefix_reuse import PrefixReuse
from simulator.serving.records import RequestLog, RequestWriter
from simulator.serving.requests import make_workload
from simulator.serving.scheduler import Role, Scheduler
from simulator.serving.summary import Run, summarise
from simulator.serving.usage import Usage, write_usage
from simulator.specs.serving import ServingSpec
from simulator.timeline import SharedLinks
from simulator.topology import HostTopology, Share
from traces.errors import CapacityError

Row = dict[str, Any]


def serve(
    point: ResolvedExperiment,
    requests_path: Path | None = None,
    usage_path: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Row:
    """Row with `simulator.metrics.COLUMNS` and SERVING, without the parameters. Status does_not_fit: no request ran.

    `requests_path`: write one line per request there (`simulator.serving.records.COLUMNS`). `usage_path`: what ran and
    was held over time (`simulator.serving.usage.COLUMNS`). `on_progress` is called
    with (requests done, requests) now and then. Raises InputError for requests that cannot be used.
    """
    serving = point.spec.serving
    assert serving is not None, "not a serving run"
    row: Row = dict.fromkeys((*COLUMNS, *SERVING))
    workload = make_workload(serving, point.spec.seed)
    with nullcontext() if requests_path is None else RequestWriter(requests_path) as writer:
        log = RequestLog(
            serving.slo_ttft_s,
            serving.slo_tpot_s,
            None if writer is None else writer.write,
            None if on_progress is None else lambda done: on_progress(done, workload.num_requests),
        )
        try:
            builder = ReplicaBuilder(point, serving, log, workload.hash_block_tokens)
        except CapacityError as error:
            need, have = (f"{num_bytes / 2**30:.2f} GiB" for num_bytes in (error.need_bytes, error.have_bytes))
            what = f"weights and the activations of {serving.max_num_batched_tokens:,} tokens need {need} of HBM"
            return row | {"status": "does_not_fit", "error": f"{what}, there is {have}", "bound": "capacity"}
        make_prefill = None if serving.disaggregation == "none" else builder.build_prefill
        builder.records_usage = usage_path is not None
        replicas, prefill = serve_all(workload.requests(), builder.build, serving.router, log, make_prefill)
    if usage_path is not None and log.num_finished:
        write_usage(usage_path, [of_role(some) for some in (replicas, prefill) if some])
    tensor_parallel = point.spec.placement.tensor_parallel
    static = builder.static_bytes
    row |= summarise(Run(log, replicas, builder.iterations, builder.demand, static, tensor_parallel, prefill))
    if not log.num_finished:
        reason = f"no request fits: {row['first_refused']} is the first of {log.num_refused}; "
        reason += f"one has at most {builder.tables.max_tokens:,} tokens, which must fit an empty replica's memory"
        return row | {"status": "does_not_fit", "error": reason, "bound": "capacity"}
    return row | {"status": "ok"}


class ReplicaBuilder:
    """Everything that the replicas of a run share, and the replicas once there is a clock."""

    def __init__(
        self, point: ResolvedExperiment, serving: ServingSpec, log: RequestLog, block_tokens: int | None = None
    ) -> None:
        """`block_tokens`: of the workload's hash ids."""
        spec, model, hardware, policy = point.spec, point.shard, point.hardware, point.policy
        self.point, self.serving, self.log, self.block_tokens = point, serving, log, block_tokens
        self.demand = demand_table(point)
        self.tables = request_pools(model, policy, serving.max_model_len or model.max_position, spec.placement)
        self.static_bytes = static_bytes(model, policy, serving.max_num_batched_tokens)
        self.rates = RatesByBatch(hardware, policy.transport, policy.gather_ctas, model.num_kv_heads)
        self.topology = HostTopology(hardware, point.num_gpus, spec.placement)
        self.setting = Setting(model, hardware, policy, spec.placement, spec.engine)
        self.path = fetch_path(model, hardware, policy, spec.placement, self.demand.corrected_share)
        self.left = ALL_CAME
        if serving.leaves_some_behind:
            self.path = pull_path(self.path, hardware, point.num_gpus)
            num_gpus, follows = spec.placement.tensor_parallel, serving.disaggregation == "first-set"
            self.left = left_behind(model, policy, self.tables, self.demand.group_rows, num_gpus, follows)
        self.uses_link = policy.offloads and not self.path.rules.lands_in_slots
        self.iterations: list[Iteration] = []
        self.records_usage = False
        self._new_pools()  # a model that does not fit is told before the run

    def build_prefill(self, env: simpy.Environment, decoding: Sequence[Replica]) -> list[Replica]:
        """Replicas on other hosts, and the network between them and the `decoding` ones."""
        point, serving = self.point, self.serving
        wire, traffic = Wire(point.hardware, point.num_gpus, len(decoding)), Traffic()
        networks = [Network(env, wire, point.hardware.nic.t0_s.value, traffic) for _ in range(wire.num_links)]
        sizes = HandoverBytes(point.shard, point.policy, self.tables, point.spec.placement.tensor_parallel)
        tables = staging_tables(point.shard, point.policy, self.tables)
        count = serving.prefill_replicas or len(decoding)
        nobody = [False] * count
        links = SharedLinks(self.topology, self.path.solo, nobody, nobody)
        replicas = []
        for number in range(count):
            decode = DecodeBatch(serving.max_num_seqs, tables.block_size_tokens, self.demand)
            iteration = Iteration(self.setting, decode, self.rates)
            pools = self._new_pools()
            scheduler = Scheduler(serving, tables, pools, decode, self._prefix(pools), role="prefill")
            replicas.append(Replica(env, number, scheduler, iteration, links, self.log))
        handover = Handover(env, serving, networks, sizes, replicas, decoding, point.shard.num_layers, self.left)
        for replica in (*replicas, *decoding):
            replica.handover = handover
        return self._recorded(replicas)

    def _prefix(self, pools: Pools) -> PrefixReuse | None:
        if self.serving.prefix_cache == "none":
            return None
        assert self.block_tokens is not None, "a workload with hash ids names the size of their blocks"
        policy, placement = self.point.policy, self.point.spec.placement
        has_copy = policy.offloads and not reads_beyond_host(policy, placement)
        return PrefixReuse(self.serving, self.point.shard, policy, pools, self.block_tokens, has_copy)

    def _new_pools(self) -> Pools:
        point, tokens = self.point, self.serving.max_num_batched_tokens
        of = (point.shard, point.hardware, point.policy, point.spec.engine, tokens, point.num_gpus)
        return make_pools(*of, point.spec.placement)

    def build(self, env: simpy.Environment) -> list[Replica]:
        num_replicas = self.point.num_replicas
        uses_remote = [self._shares_remote] * num_replicas
        links = SharedLinks(self.topology, self.path.solo, [self.uses_link] * num_replicas, uses_remote)
        replicas = []
        for number in range(num_replicas):
            size = self.tables.block_size_tokens
            decode = DecodeBatch(self.serving.max_num_seqs, size, self.demand, self.left)
            iteration = Iteration(self.setting, decode, self.rates, self.path)
            pools = self._new_pools()
            role: Role = "both" if self.serving.disaggregation == "none" else "decode"
            prefix = self._prefix(pools) if role == "both" else None
            scheduler = Scheduler(self.serving, self.tables, pools, decode, prefix, role, *self._admission(iteration))
            replicas.append(Replica(env, number, scheduler, iteration, links, self.log))
            self.iterations.append(iteration)
        return self._recorded(replicas)

    def _recorded(self, replicas: list[Replica]) -> list[Replica]:
        usage = Usage(len(replicas)) if self.records_usage else None
        for replica in replicas:
            replica.usage = usage
        return replicas

    @property
    def _shares_remote(self) -> bool:
        """Whether replicas share a tier beyond the host; the network to prefill replicas has its share in its path."""
        return self.path.rules.remote and self.serving.disaggregation == "none"

    def _admission(self, iteration: Iteration) -> list[Callable[[int], bool]]:
        limit = self.serving.link_limit
        if limit is None or not iteration.transfers:
            return []
        gpus: Sequence[int] = range(self.point.num_gpus)
        on_link, on_remote = gpus if self.uses_link else (), gpus if self._shares_remote else ()
        shares = self.topology.shares(on_link, on_remote, self.path.solo).values()
        slowest = Share(min(share.link for share in shares), min(share.remote for share in shares))
        return [LinkDemand(iteration, self.demand, limit, slowest).has_room]


def of_role(replicas: Sequence[Replica]) -> tuple[str, Usage, Pools]:
    """What `usage.write_usage` takes of the replicas of one role."""
    scheduler, usage = replicas[0].scheduler, replicas[0].usage
    assert usage is not None, "usage was not recorded"
    return scheduler.role, usage, scheduler.pools


def demand_table(point: ResolvedExperiment) -> DemandTable:
    """Demand of every trace group that serves; none for dense attention."""
    layers = point.shard.num_full_attention_layers
    dense = point.policy.selector == "all"
    if dense and not point.policy.verify_drafts:
        return DemandTable((), layers, point.spec.seed)
    pulls = point.spec.serving is not None and point.spec.serving.leaves_some_behind
    groups = []
    for group, mapping in serving_groups(point):
        mappings = rank_mappings(mapping, point.spec.placement.tensor_parallel)
        policy = keeps_all_fetched(point.policy, int(group.kv_len[-1])) if pulls else point.policy
        demands = replay_by_gpu(group, policy, mappings, point.spec.seed, host_keeps_new=pulls)
        groups.append(Group(group.name, int(group.kv_len[0]), demands))
    return DemandTable(groups, layers, point.spec.seed, attends_all=dense, pulls=pulls)
