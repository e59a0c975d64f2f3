"""The plain iteration: cost functions called directly, transfers priced by `step_work`, every request summed in Python.

Slow and short; `iteration` must play the same seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from simulator import cost, draft_heads
from simulator import step_layout as at
from simulator.capacity import slots_per_head
from simulator.demand import Demand
from simulator.engine_rates import gather_wait_s
from simulator.links import LinkCost, fetch_cost, write_back_cost
from simulator.serving.kernel_times import Setting
from simulator.specs.policy import KV_BYTES_PER_ELEMENT
from simulator.step_layout import StepWork
from simulator.step_work import rules_of, transfer_s


@dataclass(frozen=True, slots=True)
class Decoding:
    """One request in a decode step."""

    kv_len: int
    demands: Sequence[Demand] = ()
    """One per GPU; none for dense attention."""
    row: int = 0
    """Of each demand."""


@dataclass(slots=True)
class ReferenceRun:
    """Iterations in order, each a row of work; `work()` is what `run_steps` and `StepReference` play."""

    setting: Setting
    rows: list[dict[str, np.ndarray]] = field(default_factory=list)
    ahead: list[dict[int, np.ndarray]] = field(default_factory=list)
    urgent: list[dict[int, np.ndarray]] = field(default_factory=list)
    """Blocks of each iteration's plan by GPU: prefetched, and due in the next iteration."""

    def add(self, decoding: Sequence[Decoding], chunks: Sequence[tuple[int, int]], num_last_chunks: int) -> None:
        """One iteration. `chunks`: (tokens, tokens before them); `num_last_chunks` of them end their prompt."""
        row = {
            "durations_s": self._durations(decoding, chunks, num_last_chunks),
            "attention_s": self._attention(decoding, chunks),
        }
        row |= self._transfers(decoding, chunks)
        policy, gemm_s = self.setting.policy, row["durations_s"][[at.QKV, at.FFN]].sum()
        wait_s = gather_wait_s(
            self.setting.hardware, policy.transport, policy.gather_ctas, max(1, len(decoding)), gemm_s,
            row["attention_s"],
        )  # fmt: skip
        row["prefetch_s"] = row["prefetch_s"] + wait_s * (row["prefetch_s"] > 0)
        self.rows.append(row)

    def work(self) -> StepWork:
        model, policy = self.setting.model, self.setting.policy
        selects = np.zeros(model.num_layers, np.bool_)
        if policy.selector != "all":
            selects[list(model.full_attention_layers)] = True
        nothing = np.zeros((len(self.rows), model.num_layers))
        return StepWork(
            selects=selects,
            remote_first_s=nothing,
            remote_prefetch_s=nothing,
            **{name: np.array([row[name] for row in self.rows]) for name in self.rows[0]},
        )

    def _durations(
        self, decoding: Sequence[Decoding], chunks: Sequence[tuple[int, int]], num_last_chunks: int
    ) -> np.ndarray:
        hardware, model, policy = self.setting.hardware, self.setting.model, self.setting.policy
        batch, rules = len(decoding), rules_of(model, policy)
        sampled = batch * cost.logit_rows(policy) + num_last_chunks
        rows = batch * (1 + cost.draft_rows(policy)) + sum(tokens for tokens, _ in chunks)
        dur = np.zeros(at.NUM_DURATIONS)
        dur[at.SOFTWARE] = self.setting.engine.software_overhead_s
        dur[at.ALLREDUCE] = cost.layer_allreduces_s(hardware, model, rows)
        dur[at.ALLREDUCE] += cost.step_collectives_s(hardware, model, rows, sampled) / model.num_layers
        dur[at.QKV], dur[at.FFN] = cost.qkv_s(hardware, model, rows), cost.o_ffn_s(hardware, model, rows)
        if sampled:
            dur[at.SAMPLING] = cost.sampling_s(hardware, model, sampled)
            dur[at.LM_HEAD] = cost.lm_head_s(hardware, model, sampled)
        dur[at.HOP] = self._fetch_link().hop_s
        if not batch:
            return dur
        blocks = int(np.ceil(sum(-(-r.kv_len // policy.block_size_tokens) for r in decoding) / batch))
        dur[at.DRAFT] = draft_heads.draft_s(hardware, model, policy, batch, blocks * policy.block_size_tokens)
        if policy.selector != "all":
            selection = cost.selection_s(hardware, model, policy, batch, blocks, slots_per_head(policy))
            if rules.on_demand:
                dur[at.SCORE : at.PLAN + 1] = selection
            if rules.lookahead_k:
                dur[at.SIDE_SCORE : at.SIDE_PLAN + 1] = selection
        return dur

    def _attention(self, decoding: Sequence[Decoding], chunks: Sequence[tuple[int, int]]) -> np.ndarray:
        hardware, model, policy = self.setting.hardware, self.setting.model, self.setting.policy
        element, rows = KV_BYTES_PER_ELEMENT[policy.kv_dtype], 1 + cost.draft_rows(policy)
        seconds = np.zeros(model.num_layers)
        for layer in range(model.num_layers):
            window = model.sliding_window if layer in model.sliding_layers else None
            dense = policy.selector == "all" or window is not None
            seconds[layer] = cost.chunk_attention_s(hardware, model, chunks, element, window)
            if decoding:
                mean = int(np.ceil(sum(self._attended(r.kv_len, window) for r in decoding) / len(decoding)))
                seconds[layer] += cost.attention_s(hardware, model, len(decoding), mean, rows, element, dense)
        return seconds

    def _attended(self, kv_len: int, window: int | None) -> int:
        policy = self.setting.policy
        if window is not None:
            return min(kv_len, window)
        if policy.selector == "all" or policy.kv_budget_tokens is None:
            return kv_len
        size = policy.block_size_tokens
        open_tokens = kv_len - (-(-kv_len // size) - 1) * size
        return min(kv_len, policy.kv_budget_tokens + open_tokens)

    def _transfers(self, decoding: Sequence[Decoding], chunks: Sequence[tuple[int, int]]) -> dict[str, np.ndarray]:
        """Of the GPU that takes longest, layer by layer; prefetches are those of the GPU with the most."""
        model, policy = self.setting.model, self.setting.policy
        row = {name: np.zeros(model.num_layers) for name in ("first_s", "prefetch_s", "write_s", "scatter_s")}
        row["waits_for_slots"] = np.zeros(model.num_layers, np.bool_)
        if not policy.offloads:
            return row
        full = list(model.full_attention_layers)
        self.ahead.append({})
        self.urgent.append({})
        gpus = [self._fetches(gpu, decoding) for gpu in range(model.tensor_parallel)]
        for name in gpus[0]:
            each = np.stack([gpu[name] for gpu in gpus])
            row[name][full] = each[each.sum(axis=1).argmax()] if name == "prefetch_s" else each.max(axis=0)
        row["write_s"][full] = self._write_s(decoding, chunks)
        return row

    def _fetches(self, gpu: int, decoding: Sequence[Decoding]) -> dict[str, np.ndarray]:
        """What one GPU fetches in the newest iteration, [full-attention layers]."""
        hardware, model, policy = self.setting.hardware, self.setting.model, self.setting.policy
        size, link, lookahead_k = policy.block_size_tokens, self._fetch_link(), rules_of(model, policy).lookahead_k
        block_bytes = model.block_bytes(size, KV_BYTES_PER_ELEMENT[policy.kv_dtype])
        fetching = [r for r in decoding if -(-r.kv_len // size) > r.demands[gpu].num_kept]
        none = np.zeros(model.num_full_attention_layers)

        def total(name: str) -> np.ndarray:
            return sum((getattr(r.demands[gpu], name)[r.row].astype(np.float64) for r in fetching), none)

        fetched, urgent, repaired = total("fetched"), total("urgent"), total("repaired")
        runs, urgent_runs, repair_runs = total("runs"), total("urgent_runs"), total("repair_runs")
        seconds: dict[str, np.ndarray] = {"waits_for_slots": fetched > total("in_slack")}
        if lookahead_k == 0:
            seconds["first_s"] = transfer_s(link, fetched, runs, block_bytes)
        else:
            seconds["prefetch_s"] = transfer_s(link, fetched - urgent, runs - urgent_runs, block_bytes)
            seconds["first_s"] = transfer_s(link, urgent + repaired, urgent_runs + repair_runs, block_bytes)
        self.ahead[-1][gpu], self.urgent[-1][gpu] = fetched - urgent, urgent
        if link.staged:
            landing = repaired + (self.ahead[-1 - lookahead_k][gpu] if len(self.ahead) > lookahead_k else none)
            landing = landing + (self.urgent[-2][gpu] if len(self.urgent) > 1 else none)
            per_block = block_bytes / hardware.kernels.scatter_bytes_per_s.value
            seconds["scatter_s"] = landing * per_block + hardware.kernels.attention_t0_s.value * np.sign(landing)
        return seconds

    def _write_s(self, decoding: Sequence[Decoding], chunks: Sequence[tuple[int, int]]) -> float:
        """Of one layer: blocks that filled (or every token), and each chunk, one operation per KV head."""
        model, policy = self.setting.model, self.setting.policy
        element, heads = KV_BYTES_PER_ELEMENT[policy.kv_dtype], model.num_kv_heads
        link = write_back_cost(self.setting.hardware, policy.transport, self.setting.placement.host_numa)
        if policy.write_back == "token":
            ops, tokens = 2 * heads * len(decoding), len(decoding)
        else:
            filled = sum(r.kv_len % policy.block_size_tokens == 0 for r in decoding)
            ops, tokens = heads * filled, filled * policy.block_size_tokens
        ops += heads * len(chunks)
        tokens += sum(chunk for chunk, _ in chunks)
        if not ops:
            return 0.0
        num_bytes = tokens * model.kv_bytes_per_token_per_layer(element)
        return link.t0_s + (ops * link.op_s if link.ops_are == "blocks" else 0.0) + num_bytes / link.bytes_per_s

    def _fetch_link(self) -> LinkCost:
        policy = self.setting.policy
        return fetch_cost(self.setting.hardware, policy.transport, policy.gather_ctas, self.setting.placement.host_numa)
