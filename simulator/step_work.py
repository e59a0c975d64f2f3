"""From demand (blocks) and a hardware profile to the work of every step (seconds alone), for one replica's batch.

Each request draws its rows of demand from a seeded offset and wraps over the steady rows, so requests are never in
lockstep. The batch's sum over requests is periodic, a circular correlation of offset counts with the rows: its cost
grows neither with the batch beyond the number of rows nor with the length of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simulator import cost, draft_heads
from simulator import step_layout as at
from simulator.capacity import slots_held
from simulator.demand import Demand
from simulator.engine_rates import gather_wait_s
from simulator.fetch_path import FetchPath, PerBlock, fetch_path, selections_s
from simulator.links import LinkCost
from simulator.specs.experiment import EngineSpec, PlacementSpec, WorkloadSpec
from simulator.specs.hardware import HardwareSpec
from simulator.specs.model import ModelSpec
from simulator.specs.policy import KV_BYTES_PER_ELEMENT, PolicySpec, Predictor
from simulator.step_layout import StepRules, StepWork
from simulator.topology import Solo

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RunWork:
    """One replica's run: rules, work (of any of its GPUs, which run in lockstep) and the bytes of all of them."""

    rules: StepRules
    work: StepWork
    h2d_bytes: Float
    """[T], over the batch."""
    d2h_bytes: Float
    """[T]."""
    link_bytes_per_s: float
    """H2D rate of the transport alone on one GPU's link."""
    remote_read_bytes: Float
    """[T], from beyond the host."""
    remote_write_bytes: Float
    """[T], to beyond the host."""
    remote_bytes_per_s: float = 0.0
    """Blocks from beyond the host alone on one GPU's way; 0: none come."""
    num_gpus: int = 1
    tokens: Float | None = None
    """[T], that the batch gains; None: one per request and step."""
    draft_overhead_s: float = 0.0
    """Mean seconds of a step that drafting and its rows add to the compute stream's kernels."""

    @property
    def solo(self) -> Solo:
        """What one GPU's transfers draw while they run alone, overheads included."""
        seconds = float(self.work.first_s.sum() + self.work.prefetch_s.sum())
        link = float(self.h2d_bytes.sum()) / self.num_gpus / seconds if seconds > 0 else self.link_bytes_per_s
        return Solo(link, self.remote_bytes_per_s or 1.0)


def sum_over_requests(rows: NDArray[np.int32], offsets: NDArray[np.int64], num_steps: int) -> Float:
    """[T, L]: sum over requests i of rows[(offset_i + t) mod n]; `rows` [n, L]. Exact below 2^53."""
    n = rows.shape[0]
    twice = np.concatenate([rows, rows]).astype(np.float64)
    period = np.zeros((n, *rows.shape[1:]))
    for offset, count in enumerate(np.bincount(offsets % n, minlength=n)):
        if count:
            period += count * twice[offset : offset + n]
    return np.asarray(period[np.arange(num_steps) % n])


def transfer_s(link: LinkCost, blocks: Float, runs: Float, block_bytes: int) -> Float:
    """[T, L] seconds on the link alone for `blocks` blocks in `runs` contiguous runs; 0 where there are none."""
    ops = {"none": np.zeros_like(blocks), "blocks": blocks, "runs": runs, "layers": np.sign(blocks)}[link.ops_are]
    seconds = link.t0_s * np.sign(blocks) + ops * link.op_s + blocks * block_bytes / link.bytes_per_s
    return np.asarray(seconds)


def build_run_work(
    model: ModelSpec,
    hardware: HardwareSpec,
    policy: PolicySpec,
    workload: WorkloadSpec,
    placement: PlacementSpec,
    engine: EngineSpec,
    context_tokens: int,
    demands: Sequence[Demand],
    offsets: NDArray[np.int64],
) -> RunWork:
    """Work of `workload.output_tokens` tokens per request. `offsets` [batch_size]: each request's first demand row.

    A step gains one token, or with verified drafts those of a demand row; the context then grows by their mean.
    `model` is what one GPU of the replica has and `demands` is one per GPU; none for dense attention, which moves
    nothing. The GPUs run in lockstep (`Transfers.of_the_slowest`).
    """
    batch_size = workload.batch_size
    tokens_per_step = demands[0].tokens_per_step() if policy.verify_drafts else 1.0
    num_steps = max(1, round(workload.output_tokens / tokens_per_step))
    kv_len = context_tokens + np.floor(np.arange(num_steps) * tokens_per_step).astype(np.int64)
    corrected_share = max((demand.corrected_share for demand in demands), default=0.0)
    path = fetch_path(model, hardware, policy, placement, corrected_share)
    rules = path.rules
    selects = np.zeros(model.num_layers, dtype=np.bool_)
    if rules.plan_waits:
        selects[list(model.full_attention_layers)] = True
    shape = (num_steps, model.num_full_attention_layers)
    moved = Transfers.none(shape)
    write_s, written_bytes = np.zeros(shape), np.zeros(num_steps)
    if policy.residency == "streamed":
        moved = _streamed(model, policy, path, kv_len, batch_size)
    elif demands and policy.offloads:
        # GPUs that hold the same heads ask for the same blocks.
        by_gpu = {id(demand): _transfers(path, demand, offsets, num_steps) for demand in demands}
        moved = Transfers.of_the_slowest([by_gpu[id(demand)] for demand in demands])
    if policy.offloads:
        write_s, written_bytes = _write_back(model, policy, path, kv_len, tokens_per_step, offsets)
        written_bytes *= model.tensor_parallel

    def per_layer(values: Float) -> Float:
        spread = np.zeros((num_steps, model.num_layers))
        spread[:, model.full_attention_layers] = values
        return spread

    def kernels(of: PolicySpec) -> tuple[Float, Float]:
        durations_s = _durations(model, hardware, of, path, engine, batch_size, kv_len, corrected_share)
        return durations_s, _attention(model, hardware, of, batch_size, kv_len)

    durations_s, attention_s = kernels(policy)
    tokens, draft_overhead_s = None, 0.0
    if policy.verify_drafts:
        tokens = _batch_rows(demands[0], demands[0].tokens_by_row()[:, None], offsets, num_steps)[:, 0]
    if cost.drafts(policy):
        plain = policy.model_copy(update={"predictor": _WITHOUT_DRAFTS[policy.predictor], "verify_drafts": False})
        draft_overhead_s = _compute_s(durations_s, attention_s, selects) - _compute_s(*kernels(plain), selects)
    prefetch_s = per_layer(moved.prefetch_s)
    gemm_s = durations_s[:, [at.QKV, at.FFN]].sum(axis=1, keepdims=True)
    wait_s = gather_wait_s(hardware, policy.transport, policy.gather_ctas, batch_size, gemm_s, attention_s)
    return RunWork(
        rules=rules,
        work=StepWork(
            durations_s=durations_s,
            attention_s=attention_s + per_layer(moved.fallback_s),
            scatter_s=per_layer(moved.scatter_s),
            selects=selects,
            first_s=per_layer(moved.first_s),
            prefetch_s=prefetch_s + wait_s * np.sign(prefetch_s),
            write_s=per_layer(write_s),
            waits_for_slots=per_layer(moved.waits_for_slots).astype(np.bool_),
            remote_first_s=per_layer(moved.remote_first_s),
            remote_prefetch_s=per_layer(moved.remote_prefetch_s),
        ),
        h2d_bytes=moved.h2d_bytes,
        d2h_bytes=np.zeros(num_steps) if rules.lands_in_slots else written_bytes,
        link_bytes_per_s=path.link.bytes_per_s,
        remote_read_bytes=moved.remote_bytes,
        remote_write_bytes=written_bytes if rules.remote else np.zeros(num_steps),
        remote_bytes_per_s=path.block_bytes / path.remote.read_s if path.remote is not None else 0.0,
        num_gpus=model.tensor_parallel,
        tokens=tokens,
        draft_overhead_s=draft_overhead_s,
    )


_WITHOUT_DRAFTS: dict[Predictor, Predictor] = {
    "current": "current", "previous": "previous", "draft": "previous", "oracle": "previous", "random": "previous",
    "previous-layer": "previous-layer",
}  # fmt: skip
"""A predictor that plans at the same place and needs no drafts."""


def _compute_s(durations_s: Float, attention_s: Float, selects: NDArray[np.bool_]) -> float:
    """Mean seconds of a step's kernels on the compute stream, one after another."""
    once = durations_s[:, [at.DRAFT, at.SAMPLING, at.LM_HEAD]].sum(axis=1)
    per_layer = durations_s[:, [at.QKV, at.FFN, at.ALLREDUCE]].sum(axis=1) * len(selects)
    selection = durations_s[:, [at.SCORE, at.TOPK, at.PLAN]].sum(axis=1) * selects.sum()
    return float((once + per_layer + selection + attention_s.sum(axis=1)).mean())


def _batch_rows(demand: Demand, rows: NDArray[np.int32], offsets: NDArray[np.int64], num_steps: int) -> Float:
    return sum_over_requests(rows[demand.steady_start : demand.steady_stop], offsets, num_steps)


@dataclass(frozen=True, slots=True)
class Transfers:
    """What one GPU moves, [T, full-attention layers]; bytes [T] of the whole replica."""

    first_s: Float
    prefetch_s: Float
    scatter_s: Float
    waits_for_slots: Float
    """1 where a fetch waits for attention to have read its slots."""
    remote_first_s: Float
    remote_prefetch_s: Float
    fallback_s: Float
    """Attention over what heads that fall back to dense read besides."""
    h2d_bytes: Float
    remote_bytes: Float

    @classmethod
    def none(cls, shape: tuple[int, int]) -> Transfers:
        nothing, no_bytes = np.zeros(shape), np.zeros(shape[0])
        return cls(nothing, nothing, nothing, nothing, nothing, nothing, nothing, no_bytes, no_bytes)

    @classmethod
    def of_the_slowest(cls, gpus: Sequence[Transfers]) -> Transfers:
        """What holds GPUs that wait for each other after every layer, and the bytes of all.

        The first queue is waited for in its own layer, so per (step, layer) the longest counts. Prefetches run on while
        a layer waits, so per step it is the GPU with the most of them.
        """

        def slowest(name: str) -> Float:
            return np.asarray(np.max([getattr(gpu, name) for gpu in gpus], axis=0))

        def busiest(name: str) -> Float:
            each = np.stack([getattr(gpu, name) for gpu in gpus])
            return np.asarray(each[each.sum(axis=2).argmax(axis=0), np.arange(each.shape[1])])

        return cls(
            first_s=slowest("first_s"),
            prefetch_s=busiest("prefetch_s"),
            scatter_s=slowest("scatter_s"),
            waits_for_slots=slowest("waits_for_slots"),
            remote_first_s=slowest("remote_first_s"),
            remote_prefetch_s=busiest("remote_prefetch_s"),
            fallback_s=slowest("fallback_s"),
            h2d_bytes=np.sum([gpu.h2d_bytes for gpu in gpus], axis=0),
            remote_bytes=np.sum([gpu.remote_bytes for gpu in gpus], axis=0),
        )


def _streamed(
    model: ModelSpec, policy: PolicySpec, path: FetchPath, kv_len: NDArray[np.int64], batch_size: int
) -> Transfers:
    """The whole KV but the open block, every step.

    Where pieces count, one is a block of all KV heads, as paged systems keep it.
    """
    none = Transfers.none((len(kv_len), model.num_full_attention_layers))
    pieces = np.repeat(((_num_blocks(policy, kv_len) - 1) * batch_size)[:, None], none.first_s.shape[1], axis=1)
    piece_bytes = model.num_kv_heads * path.block_bytes
    seconds = transfer_s(path.link, pieces.astype(np.float64), pieces.astype(np.float64), piece_bytes)
    total_bytes = pieces.sum(axis=1, dtype=np.float64) * piece_bytes * model.tensor_parallel
    return replace(none, prefetch_s=seconds, h2d_bytes=total_bytes)


def _transfers(path: FetchPath, demand: Demand, offsets: NDArray[np.int64], num_steps: int) -> Transfers:
    """One GPU's fetches for its batch."""

    def batch_rows(rows: NDArray[np.int32]) -> Float:
        return _batch_rows(demand, rows, offsets, num_steps)

    rules, link, block_bytes = path.rules, path.link, path.block_bytes
    fetched, urgent, repaired = (batch_rows(x) for x in (demand.fetched, demand.urgent, demand.repaired))
    runs, urgent_runs, repair_runs = (batch_rows(x) for x in (demand.runs, demand.urgent_runs, demand.repair_runs))
    moved_bytes = (fetched + repaired).sum(axis=1) * block_bytes
    prefetch_s = np.zeros_like(fetched)
    if not rules.prefetches:
        first_s = transfer_s(link, fetched + repaired, runs + repair_runs, block_bytes)
    else:
        prefetch_s = transfer_s(link, fetched - urgent, runs - urgent_runs, block_bytes)
        first_s = transfer_s(link, urgent + repaired, urgent_runs + repair_runs, block_bytes)
    waits_for_slots = (fetched > batch_rows(demand.in_slack)).astype(np.float64)
    arriving = np.zeros_like(fetched)
    k = rules.lookahead_k
    arriving[k:] += (fetched - urgent)[: max(0, num_steps - k)]
    arriving[1:] += urgent[:-1]
    arriving += repaired
    remote_first_s = remote_prefetch_s = np.zeros_like(fetched)
    remote_bytes = np.zeros(num_steps)
    if path.remote is not None:
        fetched, urgent, repaired = (batch_rows(x) for x in demand.from_remote())
        remote_bytes = (fetched + repaired).sum(axis=1) * block_bytes
        if not rules.prefetches:
            remote_first_s = (fetched + repaired) * path.remote.read_s
        else:
            remote_prefetch_s = (fetched - urgent) * path.remote.read_s
            remote_first_s = (urgent + repaired) * path.remote.read_s
    if rules.lands_in_slots:
        first_s, prefetch_s, moved_bytes = np.zeros_like(first_s), np.zeros_like(first_s), np.zeros(num_steps)
    return Transfers(
        fallback_s=_kernel_s(path.fallback, batch_rows(demand.repaired)),
        first_s=first_s,
        prefetch_s=prefetch_s,
        scatter_s=_kernel_s(path.landing, arriving),
        waits_for_slots=waits_for_slots * (not rules.same_step),
        remote_first_s=remote_first_s,
        remote_prefetch_s=remote_prefetch_s,
        h2d_bytes=moved_bytes,
        remote_bytes=remote_bytes,
    )


def _kernel_s(kernel: PerBlock, blocks: Float) -> Float:
    return np.asarray(kernel.t0_s * np.sign(blocks) + kernel.block_s * blocks)


def _write_back(
    model: ModelSpec, policy: PolicySpec, path: FetchPath, kv_len: NDArray[np.int64], tokens_per_step: float,
    offsets: NDArray[np.int64],
) -> tuple[Float, Float]:  # fmt: skip
    """(seconds [T, full-attention layers], bytes [T]) of bringing new KV to its home, as blocks fill or every token.

    On its way through host memory the slower of the two stages counts: pieces follow each other.
    """
    num_steps, size, link = len(kv_len), policy.block_size_tokens, path.write_link
    if policy.write_back == "token":
        pieces = np.full(num_steps, len(offsets) * model.num_kv_heads * tokens_per_step)
    else:
        position = kv_len[0] + offsets[:, None] + np.floor(np.arange(-1, num_steps) * tokens_per_step)[None, :]
        pieces = np.diff(position // size, axis=1).sum(axis=0) * model.num_kv_heads
    per_full_layer = np.repeat(pieces[:, None], model.num_full_attention_layers, axis=1)
    seconds = transfer_s(link, per_full_layer, per_full_layer, path.piece_bytes)
    if link.ops_are == "blocks":
        seconds += per_full_layer * (path.ops_per_piece - 1) * link.op_s
    if path.remote is not None:
        remote_s = per_full_layer * path.remote.write_s
        seconds = remote_s if path.rules.lands_in_slots else np.maximum(seconds, remote_s)
    return seconds, pieces * model.num_full_attention_layers * path.piece_bytes


def _num_blocks(policy: PolicySpec, kv_len: NDArray[np.int64]) -> NDArray[np.int64]:
    return -(-kv_len // policy.block_size_tokens)


def _durations(
    model: ModelSpec, hardware: HardwareSpec, policy: PolicySpec, path: FetchPath, engine: EngineSpec,
    batch_size: int, kv_len: NDArray[np.int64], corrected_share: float,
) -> Float:  # fmt: skip
    """[T, NUM_DURATIONS]. Scoring, top-k and drafting grow with the context, the rest is constant."""
    rows, logit_rows = batch_size * (1 + cost.draft_rows(policy)), batch_size * cost.logit_rows(policy)
    dur = np.zeros((len(kv_len), at.NUM_DURATIONS))
    dur[:, at.SOFTWARE] = engine.software_overhead_s
    dur[:, at.SAMPLING] = cost.sampling_s(hardware, model, logit_rows)
    dur[:, at.QKV] = cost.qkv_s(hardware, model, rows)
    dur[:, at.FFN] = cost.o_ffn_s(hardware, model, rows)
    # Both of a layer's all-reduces at its end, and the step's own spread over the layers: C is serial, so only what
    # runs beside them differs.
    dur[:, at.ALLREDUCE] = cost.layer_allreduces_s(hardware, model, rows)
    dur[:, at.ALLREDUCE] += cost.step_collectives_s(hardware, model, rows, logit_rows) / model.num_layers
    dur[:, at.LM_HEAD] = cost.lm_head_s(hardware, model, logit_rows)
    dur[:, at.HOP] = path.link.hop_s
    blocks = _num_blocks(policy, kv_len)
    for n in map(int, np.unique(blocks)):
        here = blocks == n
        # Drafting attends over the whole context; within a block its length changes by less than a block.
        dur[here, at.DRAFT] = draft_heads.draft_s(hardware, model, policy, batch_size, n * policy.block_size_tokens)
        if policy.selector != "all":
            dur[here, at.SCORE : at.PLAN + 1], dur[here, at.SIDE_SCORE : at.SIDE_PLAN + 1] = selections_s(
                hardware, model, policy, path.rules, corrected_share, batch_size, n, slots_held(policy, n)
            )
            if path.rules.prefetches:
                dur[here, at.QKV] += cost.side_streams_s(hardware)
    return dur


def _attention(
    model: ModelSpec, hardware: HardwareSpec, policy: PolicySpec, batch_size: int, kv_len: NDArray[np.int64]
) -> Float:
    """[T, L]: attention over the working set (K blocks + the open block), the whole KV, or a window."""
    element = KV_BYTES_PER_ELEMENT[policy.kv_dtype]
    rows = 1 + cost.draft_rows(policy)
    sliding = np.isin(np.arange(model.num_layers), model.sliding_layers)
    attended = kv_len
    dense = policy.selector == "all"
    if not dense:
        assert policy.kv_budget_tokens is not None
        size = policy.block_size_tokens
        slots = policy.kv_budget_tokens // size
        open_tokens = kv_len - (_num_blocks(policy, kv_len) - 1) * size
        attended = np.minimum(kv_len, slots * size + open_tokens)
    full_s = np.array(
        [
            cost.attention_s(hardware, model, batch_size, tokens, rows, element, dense_table=dense)
            for tokens in map(int, attended)
        ]
    )
    window_s = np.zeros(len(kv_len))
    if sliding.any():
        windows = np.minimum(kv_len, model.sliding_window or kv_len[0])
        by_tokens = {
            tokens: cost.attention_s(hardware, model, batch_size, tokens, rows, element, dense_table=True)
            for tokens in map(int, np.unique(windows))
        }
        window_s = np.array([by_tokens[int(tokens)] for tokens in windows])
    return np.where(sliding[None, :], window_s[:, None], full_s[:, None])
