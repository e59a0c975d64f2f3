"""The plain iteration: cost functions called directly, transfers priced by `links`, every request summed in Python.

Slow and short; `iteration` must play the same seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from simulator import cost, draft_heads
from simulator import step_layout as at
from simulator.capacity import slots_held
from simulator.demand import Demand
from simulator.engine_rates import gather_wait_s
from simulator.fetch_path import FetchPath, fetch_path, selections_s
from simulator.links import transfer_s
from simulator.remote import stream_write_bytes_per_s
from simulator.serving.kernel_times import Setting
from simulator.specs.policy import KV_BYTES_PER_ELEMENT
from simulator.step_layout import StepWork


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
    corrected_share: float = 0.0
    """Of the heads that miss rule correct repairs."""
    own_path: FetchPath | None = None
    """How blocks come, where that is not the setting's own."""
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
            row["attention_s"], self.setting.model.num_kv_heads,
        )  # fmt: skip
        row["prefetch_s"] = row["prefetch_s"] + wait_s * (row["prefetch_s"] > 0)
        row["attention_s"] = row["attention_s"] + row.pop("fallback_s")
        self.rows.append(row)

    def work(self) -> StepWork:
        model, policy = self.setting.model, self.setting.policy
        selects = np.zeros(model.num_layers, np.bool_)
        if policy.selector != "all" or policy.residency == "streamed":
            selects[list(model.full_attention_layers)] = True
        return StepWork(selects=selects, **{name: np.array([row[name] for row in self.rows]) for name in self.rows[0]})

    @property
    def path(self) -> FetchPath:
        if self.own_path is not None:
            return self.own_path
        setting = self.setting
        return fetch_path(setting.model, setting.hardware, setting.policy, setting.placement, self.corrected_share)

    def _durations(
        self, decoding: Sequence[Decoding], chunks: Sequence[tuple[int, int]], num_last_chunks: int
    ) -> np.ndarray:
        hardware, model, policy = self.setting.hardware, self.setting.model, self.setting.policy
        batch = len(decoding)
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
        dur[at.HOP] = self.path.link.hop_s
        if not batch:
            return dur
        blocks = int(np.ceil(sum(-(-r.kv_len // policy.block_size_tokens) for r in decoding) / batch))
        dur[at.DRAFT] = draft_heads.draft_s(hardware, model, policy, batch, blocks * policy.block_size_tokens)
        if policy.selector != "all":
            slots = int(
                np.ceil(sum(slots_held(policy, -(-r.kv_len // policy.block_size_tokens)) for r in decoding) / batch)
            )
            dur[at.SCORE : at.PLAN + 1], dur[at.SIDE_SCORE : at.SIDE_PLAN + 1] = selections_s(
                hardware, model, policy, self.path.rules, self.corrected_share, batch, blocks, slots
            )
            if self.path.rules.prefetches:
                dur[at.JOIN] = cost.side_streams_s(hardware)
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
        names = ("first_s", "prefetch_s", "write_s", "scatter_s", "remote_first_s", "remote_prefetch_s", "fallback_s")
        row = {name: np.zeros(model.num_layers) for name in names}
        row["waits_for_slots"] = np.zeros(model.num_layers, np.bool_)
        if not policy.offloads:
            return row
        full = list(model.full_attention_layers)
        row["write_s"][full] = self._write_s(decoding, chunks)
        if policy.residency == "streamed":
            row["prefetch_s"][full] = self._stream_s(decoding)
            return row
        self.ahead.append({})
        self.urgent.append({})
        gpus = [self._fetches(gpu, decoding) for gpu in range(model.tensor_parallel)]
        for name in gpus[0]:
            each = np.stack([gpu[name] for gpu in gpus])
            busiest = name in ("prefetch_s", "remote_prefetch_s")
            row[name][full] = each[each.sum(axis=1).argmax()] if busiest else each.max(axis=0)
        return row

    def _stream_s(self, decoding: Sequence[Decoding]) -> float:
        """A layer's whole KV but the open blocks; all KV heads of a block are one piece."""
        model, size, link = self.setting.model, self.setting.policy.block_size_tokens, self.path.link
        pieces = np.array([float(sum(-(-r.kv_len // size) - 1 for r in decoding))])
        return float(transfer_s(link, pieces, pieces, model.num_kv_heads * self.path.block_bytes)[0])

    def _fetches(self, gpu: int, decoding: Sequence[Decoding]) -> dict[str, np.ndarray]:
        """What one GPU fetches in the newest iteration, [full-attention layers]."""
        hardware, model, policy, path = self.setting.hardware, self.setting.model, self.setting.policy, self.path
        size, link, lookahead_k = policy.block_size_tokens, path.link, path.rules.lookahead_k
        block_bytes = cost.moved_block_bytes(model, policy)
        fetching = [r for r in decoding if -(-r.kv_len // size) > r.demands[gpu].num_kept]
        none = np.zeros(model.num_full_attention_layers)

        def total(name: str) -> np.ndarray:
            return sum((getattr(r.demands[gpu], name)[r.row].astype(np.float64) for r in fetching), none)

        fetched, urgent, repaired = total("fetched"), total("urgent"), total("repaired")
        runs, urgent_runs, repair_runs = total("runs"), total("urgent_runs"), total("repair_runs")
        seconds: dict[str, np.ndarray] = {}
        seconds["waits_for_slots"] = (fetched > total("in_slack")) & (policy.predictor != "previous-layer")
        if not path.rules.prefetches:
            seconds["first_s"] = transfer_s(link, fetched + repaired, runs + repair_runs, block_bytes)
        else:
            seconds["prefetch_s"] = transfer_s(link, fetched - urgent, runs - urgent_runs, block_bytes)
            seconds["first_s"] = transfer_s(link, urgent + repaired, urgent_runs + repair_runs, block_bytes)
        if path.remote is not None:
            if self.setting.placement.remote_path == "direct":
                seconds |= {name: none for name in ("first_s", "prefetch_s") if name in seconds}
            seconds |= self._remote_reads(gpu, fetching, path.remote.read_s)
        self.ahead[-1][gpu], self.urgent[-1][gpu] = fetched - urgent, urgent
        landing = repaired + (self.ahead[-1 - lookahead_k][gpu] if len(self.ahead) > lookahead_k else none)
        landing = landing + (self.urgent[-2][gpu] if len(self.urgent) > 1 else none)
        kernels = hardware.kernels
        seconds["scatter_s"] = np.array([cost.rebuild_keys_s(hardware, model, policy, n) for n in landing])
        if link.staged:
            seconds["scatter_s"] += kernels.attention_t0_s.value * np.sign(landing)
            seconds["scatter_s"] += landing * block_bytes / kernels.scatter_bytes_per_s.value
        if policy.miss_rule == "dense":
            read_s = (
                model.block_bytes(size, KV_BYTES_PER_ELEMENT[policy.kv_dtype]) / kernels.attention_bytes_per_s.value
            )
            seconds["fallback_s"] = kernels.attention_t0_s.value * np.sign(repaired) + repaired * read_s
        return seconds

    def _remote_reads(self, gpu: int, fetching: Sequence[Decoding], read_s: float) -> dict[str, np.ndarray]:
        """Seconds of what host memory does not hold, [full-attention layers]."""
        none = np.zeros(self.setting.model.num_full_attention_layers)
        rows = [[part[r.row].astype(np.float64) for part in r.demands[gpu].from_remote()] for r in fetching]
        fetched, urgent, repaired = (sum((row[part] for row in rows), none) for part in range(3))
        if not self.path.rules.prefetches:
            return {"remote_first_s": (fetched + repaired) * read_s}
        return {"remote_prefetch_s": (fetched - urgent) * read_s, "remote_first_s": (urgent + repaired) * read_s}

    def _write_s(self, decoding: Sequence[Decoding], chunks: Sequence[tuple[int, int]]) -> float:
        """Of one layer: blocks that filled (or every token), and each chunk, one operation per KV head."""
        model, policy, path = self.setting.model, self.setting.policy, self.path
        heads, link = model.num_kv_heads, path.write_link
        if policy.write_back == "token":
            pieces, tokens = heads * len(decoding), len(decoding)
        else:
            filled = sum(r.kv_len % policy.block_size_tokens == 0 for r in decoding)
            pieces, tokens = heads * filled, filled * policy.block_size_tokens
        ops = pieces * path.ops_per_piece + heads * len(chunks)
        if not ops:
            return 0.0
        token_bytes = heads * cost.moved_block_bytes(model, policy) / policy.block_size_tokens
        chunk_bytes = sum(chunk for chunk, _ in chunks) * token_bytes
        seconds = link.t0_s + (ops * link.op_s if link.ops_are == "blocks" else 0.0)
        seconds += (tokens * token_bytes + chunk_bytes) / link.bytes_per_s
        if path.remote is None or not path.writes_beyond:
            return seconds
        rate = stream_write_bytes_per_s(self.setting.hardware, self.setting.placement)
        remote_s = pieces * path.remote.write_s + chunk_bytes / rate
        return remote_s if self.setting.placement.remote_path == "direct" else max(seconds, remote_s)
