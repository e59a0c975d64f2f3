"""Triton kernel of the residency plan: diff against the slots, cap, victims, slots, and the block table they make.

One program per (request, KV head) holds a head's slots in registers from load to store. What must cross from ranks to
slots goes through a map from block id to slot in scratch memory, written anew by each plan. The rules are
docs/decisions.md section 2.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

NEVER = tl.constexpr(2**31 - 1)


@triton.jit
def _enter(
    block, due, leaves, last, fill_slot, bh, step, kv_len, K, S, evict, counts,
    P: tl.constexpr, NB: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """Free what leaves at `step`; a block that the step before filled takes a slot without a fetch.

    A free slot; else, with K blocks there, its victim's; else that of the block that leaves soonest.
    """
    s = tl.arange(0, SP)
    inside = s < S
    gone = inside & (leaves <= step)
    block = tl.where(gone, -1, block)
    leaves = tl.where(gone, NEVER, leaves)
    target = tl.full((), -1, tl.int32)
    if (step > 0) & (kv_len > 1) & ((kv_len - 1) % P == 0):
        future = inside & (block >= 0) & (leaves == NEVER)
        full = tl.sum(future.to(tl.int32), axis=0) == K
        first_free = tl.min(tl.where(inside & (block < 0), s, SP), axis=0)
        key = tl.where(future, (last + 1) * NB + block, NEVER)
        victim = key == tl.where(full, tl.min(key, axis=0), -1)
        victim_slot = tl.min(tl.where(victim, s, SP), axis=0)
        leaving = inside & (block >= 0) & (leaves != NEVER)
        soonest = tl.min(tl.where(leaving, leaves, NEVER), axis=0)
        leaving_slot = tl.min(tl.where(leaving & (leaves == soonest), s, SP), axis=0)
        target = tl.where(first_free < SP, first_free, tl.where(full, victim_slot, leaving_slot))
        if full:
            at = tl.atomic_add(counts + 1, 1, sem="relaxed")
            tl.store(evict + at * 2, bh.to(tl.int32))
            tl.store(evict + at * 2 + 1, tl.sum(tl.where(victim, block, 0), axis=0))
        placed = s == target
        block = tl.where(placed, (kv_len - 1) // P - 1, tl.where(victim, -1, block))
        due = tl.where(placed, step, due)
        leaves = tl.where(placed, NEVER, leaves)
        last = tl.where(placed, step, last)
    tl.store(fill_slot + bh, target)
    return block, due, leaves, last


@triton.jit
def _smallest(key, count, KEY_BITS: tl.constexpr):
    """The count-th smallest of distinct keys in [0, 2^KEY_BITS), built from its leading bit; count >= 1."""
    bound = tl.zeros((), dtype=tl.int32)
    for bit in range(KEY_BITS):
        next_bound = bound + (tl.full((), 1, tl.int32) << (KEY_BITS - 1 - bit))
        below = tl.sum((key < next_bound).to(tl.int32), axis=0)
        bound = tl.where(below < count, next_bound, bound)
    return bound


@triton.jit
def _plan(
    block, due, leaves, last, ranking, slot_of, bh, step, due_step, selectable, allowed, K, S, M, fetch, evict, counts,
    NB: tl.constexpr, SP: tl.constexpr, MP: tl.constexpr, KEY_BITS: tl.constexpr,
):  # fmt: skip
    """slot_of: scratch [NB + SP], slots by block id, then a mark per slot."""
    marks = slot_of + NB
    s = tl.arange(0, SP)
    r = tl.arange(0, MP)
    inside = s < S
    future = inside & (block >= 0) & (leaves == NEVER)
    num_future = tl.sum(future.to(tl.int32), axis=0)

    ranked = tl.load(ranking + r, mask=r < M, other=-1)
    usable = (ranked >= 0) & (ranked < selectable)
    predicted = usable & (tl.cumsum(usable.to(tl.int32), axis=0) <= K)
    tl.store(slot_of + ranked, tl.full((MP,), -1, tl.int32), mask=predicted)
    tl.debug_barrier()
    tl.store(slot_of + block, s, mask=future)
    tl.store(marks + s, tl.zeros((SP,), tl.int32))
    tl.debug_barrier()
    at_slot = tl.load(slot_of + ranked, mask=predicted, other=-1)
    resident = at_slot >= 0
    tl.store(marks + at_slot, tl.full((MP,), 1, tl.int32), mask=resident)
    tl.debug_barrier()
    kept = future & (tl.load(marks + s) > 0)
    last = tl.where(kept, step, last)

    missing = predicted & (at_slot < 0)
    fetched = missing & (tl.cumsum(missing.to(tl.int32), axis=0) <= allowed)
    num_fetched = tl.sum(fetched.to(tl.int32), axis=0)
    num_victims = tl.maximum(num_future + num_fetched - K, 0)
    pair = tl.arange(0, 2)
    logged = tl.atomic_add(counts + pair, tl.where(pair == 0, num_fetched, num_victims), sem="relaxed")
    candidate = future & (kept == 0)
    key = tl.where(candidate, (last + 1) * NB + block, NEVER)
    victim = key <= tl.where(num_victims > 0, _smallest(key, num_victims, KEY_BITS), -1)

    free = inside & (block < 0)
    seen = tl.cumsum(free.to(tl.int32) + (victim.to(tl.int32) << 16), axis=0)
    num_free = tl.sum(free.to(tl.int32), axis=0)
    victim_at = (seen >> 16) - 1
    at = tl.where(free, (seen & 0xFFFF) - 1, num_free + victim_at)
    takes = (free | victim) & (at < num_fetched)
    ascending = tl.sort(tl.where(fetched, ranked, NEVER))
    incoming = tl.gather(ascending, tl.where(takes, at, 0), 0)

    first_fetched = tl.sum(tl.where(pair == 0, logged, 0), axis=0)
    first_evicted = tl.sum(tl.where(pair == 1, logged, 0), axis=0)
    row = fetch + (first_fetched + at) * 3
    tl.store(row, bh.to(tl.int32), mask=takes)
    tl.store(row + 1, incoming, mask=takes)
    tl.store(row + 2, s, mask=takes)
    row = evict + (first_evicted + victim_at) * 2
    tl.store(row, bh.to(tl.int32), mask=victim)
    tl.store(row + 1, block, mask=victim)

    now = due_step <= step
    block = tl.where(takes, incoming, tl.where(victim & now, -1, block))
    leaves = tl.where(takes, NEVER, tl.where(victim & (now == 0), due_step, leaves))
    return block, tl.where(takes, due_step, due), leaves, tl.where(takes, step, last)


@triton.jit
def _table(block, due, leaves, table, counts, bh, step, S, table_width, SP: tl.constexpr):
    """List the slots that attention reads at `step`, then the open block, as pool block indices."""
    s = tl.arange(0, SP)
    read = (s < S) & (block >= 0) & (due <= step) & (step < leaves)
    at = tl.cumsum(read.to(tl.int32), axis=0) - 1
    num_read = tl.sum(read.to(tl.int32), axis=0)
    tl.store(table + bh * table_width + at, (bh * (S + 1) + s).to(tl.int32), mask=read)
    tl.store(table + bh * table_width + num_read, (bh * (S + 1) + S).to(tl.int32))
    tl.store(counts + bh, num_read + 1)


# Step and layer change with every launch: specialising on them would compile the kernel again and again.
@triton.jit(do_not_specialize=["offset", "layer", "lookahead", "num_steps"])
def residency_kernel(
    slots, rankings, rows, allowed, clock, kv_start, table, table_counts, fill_slot, fetch, evict, counts, scratch,
    offset, layer, lookahead, num_steps, rank_row_stride, rank_layer_stride, H, K, S, M, table_width,
    ON_DEMAND: tl.constexpr, P: tl.constexpr, NB: tl.constexpr, SP: tl.constexpr, MP: tl.constexpr,
    KEY_BITS: tl.constexpr,
):  # fmt: skip
    """On demand: enter, plan and table of step t. Lookahead: plan of step t, then enter and table of step t + 1."""
    bh = tl.program_id(0).to(tl.int64)
    b = bh // H
    step = tl.load(clock) + offset
    kv_len = tl.load(kv_start + b) + step
    due_step = step + lookahead
    row = tl.load(rows + b) + due_step
    cap = tl.load(allowed + step)
    s = tl.arange(0, SP)
    base = slots + bh * 4 * S + s
    block = tl.load(base, mask=s < S, other=-1)
    due = tl.load(base + S, mask=s < S, other=0)
    leaves = tl.load(base + 2 * S, mask=s < S, other=0)
    last = tl.load(base + 3 * S, mask=s < S, other=0)
    if ON_DEMAND:
        block, due, leaves, last = _enter(
            block, due, leaves, last, fill_slot, bh, step, kv_len, K, S, evict, counts, P, NB, SP
        )
    if (due_step < num_steps) & (row >= 0):
        num_blocks = (kv_len + P - 1) // P
        room = (kv_len + lookahead + P - 1) // P - num_blocks  # blocks that fill by the due step
        ranking = rankings + row.to(tl.int64) * rank_row_stride + layer * rank_layer_stride + (bh % H) * M
        block, due, leaves, last = _plan(
            block, due, leaves, last, ranking, scratch + bh * (NB + SP), bh, step, due_step, num_blocks - 1, cap,
            tl.maximum(K - room, 0), S, M, fetch, evict, counts, NB, SP, MP, KEY_BITS,
        )  # fmt: skip
    if ON_DEMAND:
        _table(block, due, leaves, table, table_counts, bh, step, S, table_width, SP)
    else:
        block, due, leaves, last = _enter(
            block, due, leaves, last, fill_slot, bh, step + 1, kv_len + 1, K, S, evict, counts, P, NB, SP
        )
        _table(block, due, leaves, table, table_counts, bh, step + 1, S, table_width, SP)
    tl.store(base, block, mask=s < S)
    tl.store(base + S, due, mask=s < S)
    tl.store(base + 2 * S, leaves, mask=s < S)
    tl.store(base + 3 * S, last, mask=s < S)
