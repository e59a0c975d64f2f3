"""Triton kernel of split-K grouped-query decode attention over a per-head block table."""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_attention_kernel(
    query,
    pool,
    table,
    counts,
    last_tokens,
    out,
    partial_acc,
    partial_ml,
    arrivals,
    scale_log2,
    query_stride,
    H,
    table_width,
    R: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (B*H, SPLITS). All R*G query rows of a KV head share one pass over its blocks.

    Each program leaves (max, sum, accumulator) of its share; the last one to arrive at a head merges them, so that no
    second launch is needed. `arrivals` is zero between launches.
    """
    bh = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    b = bh // H
    h = bh % H
    count = tl.load(counts + bh)
    kv_tokens = tl.maximum((count - 1) * P + tl.load(last_tokens + b), 0)
    row = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    row_ok = row < R * G
    q_row = (b * R + row // G) * query_stride + (h * G + row % G) * D
    q = tl.load(query + q_row[:, None] + d[None, :], mask=row_ok[:, None], other=0.0)

    share = tl.cdiv(tl.cdiv(kv_tokens, BLOCK_N), SPLITS) * BLOCK_N
    start = split * share
    end = tl.minimum(start + share, kv_tokens)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for first in range(start, end, BLOCK_N):
        token = first + tl.arange(0, BLOCK_N)
        ok = token < end
        block = tl.load(table + bh * table_width + token // P, mask=ok, other=0).to(tl.int64)
        base = block * (2 * P * D) + (token % P) * D
        k = tl.load(pool + base[:, None] + d[None, :], mask=ok[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        s = tl.where(ok[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new[:, None])
        v = tl.load(pool + base[:, None] + (P * D + d)[None, :], mask=ok[:, None], other=0.0)
        total = total * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new

    out_row = ((b * R + row // G) * (H * G) + h * G + row % G) * D
    if SPLITS == 1:
        o = acc / total[:, None]
        tl.store(out + out_row[:, None] + d[None, :], o.to(out.dtype.element_ty), mask=row_ok[:, None])
    else:
        slot = (bh * SPLITS + split) * ROWS + row
        tl.store(partial_acc + slot[:, None] * D + d[None, :], acc, mask=row_ok[:, None])
        tl.store(partial_ml + slot * 2, m, mask=row_ok)
        tl.store(partial_ml + slot * 2 + 1, total, mask=row_ok)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + bh, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            tl.debug_barrier()
            m = tl.full((ROWS,), float("-inf"), tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            acc = tl.zeros((ROWS, D), tl.float32)
            for other in range(SPLITS):
                slot = (bh * SPLITS + other) * ROWS + row
                m_o = tl.load(partial_ml + slot * 2, mask=row_ok, other=0.0, cache_modifier=".cg")
                total_o = tl.load(partial_ml + slot * 2 + 1, mask=row_ok, other=1.0, cache_modifier=".cg")
                acc_o = tl.load(
                    partial_acc + slot[:, None] * D + d[None, :], mask=row_ok[:, None], other=0.0, cache_modifier=".cg"
                )
                m_new = tl.maximum(m, m_o)
                old_weight = tl.exp2(m - m_new)
                new_weight = tl.exp2(m_o - m_new)
                total = total * old_weight + total_o * new_weight
                acc = acc * old_weight[:, None] + acc_o * new_weight[:, None]
                m = m_new
            o = acc / total[:, None]
            tl.store(out + out_row[:, None] + d[None, :], o.to(out.dtype.element_ty), mask=row_ok[:, None])
            tl.store(arrivals + bh, 0)
