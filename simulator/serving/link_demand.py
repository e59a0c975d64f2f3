"""Admission by link demand: requests that decode together must not ask for more than the host link can bring."""

from __future__ import annotations

import numpy as np

from simulator import cost
from simulator.links import transfer_s
from simulator.serving.batch_kernel import ATTENDED_TOKENS, BLOCKS, FETCHED, REPAIR_RUNS, REPAIRED, RUNS, SLOTS
from simulator.serving.demand_table import DemandTable
from simulator.serving.iteration import Iteration, mean_size
from simulator.topology import Share


class LinkDemand:
    """Expected fetches of a decode step against its kernels, for a number of requests. The slower of the host link and
    the way beyond the host counts.

    Every request counts with the mean of the demand rows, also while it still fits its budget: it will outgrow it.
    Contexts are those of the batch at hand.
    """

    def __init__(self, iteration: Iteration, demand: DemandTable, limit: float, share: Share) -> None:
        self.iteration, self.limit, self.share = iteration, limit, share
        counts = demand.mean_counts()
        self._blocks = counts[FETCHED] + counts[REPAIRED]
        self._runs = counts[RUNS] + counts[REPAIR_RUNS]
        fetched, _, repaired = demand.remote_counts
        self._remote_blocks = float((counts[fetched] + counts[repaired]).sum())

    def has_room(self, num_decoding: int) -> bool:
        return self.fetch_s(num_decoding) <= self.limit * self.compute_s(num_decoding)

    def fetch_s(self, num_decoding: int) -> float:
        """Seconds of transfers that a step of `num_decoding` requests is expected to need."""
        path, streams = self.iteration.path, self.iteration.rules.stream_buffers > 0
        blocks, runs, block_bytes = num_decoding * self._blocks, num_decoding * self._runs, path.block_bytes
        if streams:  # the whole KV but the open blocks, all KV heads in a piece
            pieces = num_decoding * (self._mean(BLOCKS) - 1)
            blocks = runs = np.full(len(self.iteration.full_layers), float(pieces))
            block_bytes *= self.iteration.setting.model.num_kv_heads
        link_s = float(transfer_s(path.link, blocks, runs, block_bytes).sum()) / self.share.link
        if path.remote is None:
            return link_s
        remote_s = num_decoding * self._remote_blocks * path.remote.read_s / self.share.remote
        return remote_s if path.rules.lands_in_slots else max(link_s, remote_s)

    def _mean(self, total: int) -> int:
        """Of a batch total (`batch_kernel`) over the requests at hand, at least 1."""
        return mean_size(self.iteration.totals[total], max(self.iteration.measured_decoding, 1)) or 1

    def compute_s(self, num_decoding: int) -> float:
        """Seconds of the compute stream in such a step, without prefill and waiting."""
        it, kernels, model = self.iteration, self.iteration.kernels, self.iteration.setting.model
        policy = it.setting.policy
        blocks, attended = self._mean(BLOCKS), self._mean(ATTENDED_TOKENS)
        rows = num_decoding * (1 + cost.draft_rows(policy))
        layer_s: float = kernels.qkv_s(rows) + kernels.attention_s(num_decoding, attended) + kernels.ffn_s(rows)
        layer_s += kernels.allreduce_s(rows) + kernels.collectives_s(rows, num_decoding * cost.logit_rows(policy))
        layer_s += sum(kernels.selections_s(num_decoding, blocks, self._mean(SLOTS))[0])
        sampled = num_decoding * cost.logit_rows(policy)
        once_s: float = kernels.sampling_s(sampled) + kernels.lm_head_s(sampled)
        once_s += kernels.draft_s(num_decoding, blocks * policy.block_size_tokens)
        return it.setting.engine.software_overhead_s + once_s + model.num_layers * layer_s
