"""Admission by link demand: requests that decode together must not ask for more than the host link can bring."""

from __future__ import annotations

from simulator import cost
from simulator.capacity import slots_per_head
from simulator.serving.batch_kernel import ATTENDED_TOKENS, BLOCKS, FETCHED, REPAIR_RUNS, REPAIRED, RUNS
from simulator.serving.demand_table import DemandTable
from simulator.serving.iteration import Iteration, mean_size
from simulator.step_work import transfer_s


class LinkDemand:
    """Expected fetches of a decode step against its kernels, for a number of requests.

    Every request counts with the mean of the demand rows, also while it still fits its budget: it will outgrow it.
    Contexts are those of the batch at hand.
    """

    def __init__(self, iteration: Iteration, demand: DemandTable, limit: float, link_share: float) -> None:
        self.iteration, self.limit, self.link_share = iteration, limit, link_share
        counts = demand.mean_counts()
        self._blocks = counts[FETCHED] + counts[REPAIRED]
        self._runs = counts[RUNS] + counts[REPAIR_RUNS]

    def has_room(self, num_decoding: int) -> bool:
        return self.fetch_s(num_decoding) <= self.limit * self.compute_s(num_decoding)

    def fetch_s(self, num_decoding: int) -> float:
        """Seconds of link that a step of `num_decoding` requests is expected to need."""
        it = self.iteration
        seconds = transfer_s(it.link, num_decoding * self._blocks, num_decoding * self._runs, it.block_bytes)
        return float(seconds.sum()) / self.link_share

    def compute_s(self, num_decoding: int) -> float:
        """Seconds of the compute stream in such a step, without prefill and waiting."""
        it, kernels, model = self.iteration, self.iteration.kernels, self.iteration.setting.model
        policy = it.setting.policy
        measured = max(it.measured_decoding, 1)
        blocks = mean_size(it.totals[BLOCKS], measured) or 1
        attended = mean_size(it.totals[ATTENDED_TOKENS], measured) or 1
        rows = num_decoding * (1 + cost.draft_rows(policy))
        layer_s: float = kernels.qkv_s(rows) + kernels.attention_s(num_decoding, attended) + kernels.ffn_s(rows)
        layer_s += kernels.allreduce_s(rows) + kernels.collectives_s(rows, num_decoding * cost.logit_rows(policy))
        if it.rules.on_demand:
            layer_s += sum(kernels.selection_s(num_decoding, blocks, slots_per_head(policy)))
        sampled = num_decoding * cost.logit_rows(policy)
        once_s: float = kernels.sampling_s(sampled) + kernels.lm_head_s(sampled)
        once_s += kernels.draft_s(num_decoding, blocks * policy.block_size_tokens)
        return it.setting.engine.software_overhead_s + once_s + model.num_layers * layer_s
