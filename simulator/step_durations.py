"""Seconds of each kernel of every step of a closed run, alone on the GPU."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator import cost, draft_heads
from simulator import step_layout as at
from simulator.capacity import slots_held
from simulator.fetch_path import FetchPath, selections_s
from simulator.specs.experiment import EngineSpec
from simulator.specs.hardware import HardwareSpec
from simulator.specs.model import ModelSpec
from simulator.specs.policy import KV_BYTES_PER_ELEMENT, PolicySpec

Float = NDArray[np.float64]


def kernel_durations(
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
                dur[here, at.JOIN] = cost.side_streams_s(hardware)
    return dur


def attention_durations(
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


def compute_s(durations_s: Float, attention_s: Float, selects: NDArray[np.bool_]) -> float:
    """Mean seconds of a step's kernels on the compute stream, one after another."""
    once = durations_s[:, [at.DRAFT, at.SAMPLING, at.LM_HEAD]].sum(axis=1)
    per_layer = durations_s[:, [at.QKV, at.FFN, at.ALLREDUCE]].sum(axis=1) * len(selects)
    selection = durations_s[:, [at.SCORE, at.TOPK, at.PLAN]].sum(axis=1) * selects.sum()
    return float((once + per_layer + selection + attention_s.sum(axis=1)).mean())


def _num_blocks(policy: PolicySpec, kv_len: NDArray[np.int64]) -> NDArray[np.int64]:
    return -(-kv_len // policy.block_size_tokens)
