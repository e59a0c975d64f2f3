"""Triton kernel of the residency plan: diff against the slots, cap, victims, slots, and the block table they make.

One program per (request, KV head) keeps a head's slots in registers; lists cross threads through scratch in global
memory behind a barrier. The rules are docs/decisions.md section 2.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

NEVER = tl.constexpr(2**31 - 1)


@triton.jit
def _num_smaller(values, count, mine, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """How many of values[:count] in memory are smaller than each of `mine` [WIDTH]."""
    smaller = tl.zeros((WIDTH,), dtype=tl.int32)
    c = tl.arange(0, CHUNK)
    for start in range(0, count, CHUNK):
        other = tl.load(values + start + c, mask=start + c < count, other=NEVER)
        smaller += tl.sum((other[:, None] < mine[None, :]).to(tl.int32), axis=0)
    return smaller


@triton.jit
def _enter(
    slots, fill_slot, bh, step, kv_len, K, S, evict, evict_count,
    P: tl.constexpr, NB: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """Free what leaves at `step`; a block that the step before filled takes a slot without a fetch.

    A free slot; else, with K blocks there, its victim's; else that of the block that leaves soonest.
    """
    s = tl.arange(0, SP)
    inside = s < S
    base = slots + bh * 4 * S + s
    block = tl.load(base, mask=inside, other=0)
    leaves = tl.load(base + 2 * S, mask=inside, other=0)
    last = tl.load(base + 3 * S, mask=inside, other=0)
    gone = inside & (leaves <= step)
    block = tl.where(gone, -1, block)
    leaves = tl.where(gone, NEVER, leaves)
    filled = (step > 0) & (kv_len > 1) & ((kv_len - 1) % P == 0)
    new_block = (kv_len - 1) // P - 1
    future = inside & (block >= 0) & (leaves == NEVER)
    full = filled & (tl.sum(future.to(tl.int32), axis=0) == K)
    first_free = tl.min(tl.where(inside & (block < 0), s, SP), axis=0)
    key = tl.where(future, (last + 1) * NB + block, NEVER)
    victim = key == tl.where(full, tl.min(key, axis=0), -1)
    victim_slot = tl.min(tl.where(victim, s, SP), axis=0)
    leaving = inside & (block >= 0) & (leaves != NEVER)
    soonest = tl.min(tl.where(leaving, leaves, NEVER), axis=0)
    leaving_slot = tl.min(tl.where(leaving & (leaves == soonest), s, SP), axis=0)
    target = tl.where(first_free < SP, first_free, tl.where(full, victim_slot, leaving_slot))
    if full:
        at = tl.atomic_add(evict_count, 1)
        tl.store(evict + at * 2, bh.to(tl.int32))
        tl.store(evict + at * 2 + 1, tl.sum(tl.where(victim, block, 0), axis=0))
    block = tl.where(victim, -1, block)
    placed = s == tl.where(filled, target, -1)
    tl.store(fill_slot + bh, tl.where(filled, target, -1))
    tl.store(base, tl.where(placed, new_block, block), mask=inside)
    tl.store(base + S, step, mask=inside & placed)
    tl.store(base + 2 * S, tl.where(placed, NEVER, leaves), mask=inside)
    tl.store(base + 3 * S, step, mask=inside & placed)


@triton.jit
def _plan(
    slots, ranking, scratch, bh, step, due, selectable, allowed, K, S, M, fetch, fetch_count, evict, evict_count,
    NB: tl.constexpr, SP: tl.constexpr, KP: tl.constexpr, MP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    predicted_list = scratch + bh * (2 * KP + SP)
    fetch_list = predicted_list + KP
    slot_list = fetch_list + KP
    i = tl.arange(0, KP)
    s = tl.arange(0, SP)
    c = tl.arange(0, CHUNK)
    r = tl.arange(0, MP)

    ranked = tl.load(ranking + r, mask=r < M, other=-1)
    usable = (ranked >= 0) & (ranked < selectable)
    order = tl.cumsum(usable.to(tl.int32), axis=0)
    num_predicted = tl.minimum(tl.sum(usable.to(tl.int32), axis=0), K)
    tl.store(predicted_list + order - 1, ranked, mask=usable & (order <= K))
    tl.debug_barrier()

    inside = s < S
    base = slots + bh * 4 * S
    block = tl.load(base + s, mask=inside, other=0)
    leaves = tl.load(base + 2 * S + s, mask=inside, other=0)
    last = tl.load(base + 3 * S + s, mask=inside, other=0)
    future = inside & (block >= 0) & (leaves == NEVER)
    num_future = tl.sum(future.to(tl.int32), axis=0)

    predicted = tl.load(predicted_list + i, mask=i < num_predicted, other=-1)
    resident = tl.zeros((KP,), dtype=tl.int32)
    for start in range(0, SP, CHUNK):
        o = start + c
        other = tl.load(base + o, mask=o < S, other=-2)
        stays = tl.load(base + 2 * S + o, mask=o < S, other=0) == NEVER
        other = tl.where(stays, other, -2)
        resident += tl.sum((other[:, None] == predicted[None, :]).to(tl.int32), axis=0)
    selected = tl.zeros((SP,), dtype=tl.int32)
    for start in range(0, KP, CHUNK):
        o = start + c
        other = tl.load(predicted_list + o, mask=o < num_predicted, other=-2)
        selected += tl.sum((other[:, None] == block[None, :]).to(tl.int32), axis=0)
    kept = future & (selected > 0)
    last = tl.where(kept, step, last)

    missing = (i < num_predicted) & (resident == 0)
    rank = tl.cumsum(missing.to(tl.int32), axis=0)
    fetched = missing & (rank <= allowed)
    num_fetched = tl.sum(fetched.to(tl.int32), axis=0)
    num_victims = tl.maximum(num_future + num_fetched - K, 0)
    candidate = future & (kept == 0)
    key = tl.where(candidate, (last + 1) * NB + block, NEVER)
    tl.store(slot_list + s, key)
    tl.store(fetch_list + rank - 1, predicted, mask=fetched)
    tl.debug_barrier()
    victim = candidate & (_num_smaller(slot_list, S, key, CHUNK, SP) < num_victims)
    ascending = _num_smaller(fetch_list, num_fetched, predicted, CHUNK, KP)
    tl.debug_barrier()

    free = inside & (block < 0)
    num_free = tl.sum(free.to(tl.int32), axis=0)
    free_at = tl.cumsum(free.to(tl.int32), axis=0) - 1
    victim_at = num_free + tl.cumsum(victim.to(tl.int32), axis=0) - 1
    tl.store(slot_list + free_at, s, mask=free)
    tl.store(slot_list + victim_at, s, mask=victim)

    now = due <= step
    tl.store(base + s, tl.where(victim, tl.where(now, -1, block), block), mask=inside)
    tl.store(base + 2 * S + s, tl.where(victim, tl.where(now, leaves, due), leaves), mask=inside)
    tl.store(base + 3 * S + s, last, mask=inside)
    if num_victims > 0:
        first_evicted = tl.atomic_add(evict_count, num_victims)
        tl.store(evict + (first_evicted + victim_at - num_free) * 2, bh.to(tl.int32), mask=victim)
        tl.store(evict + (first_evicted + victim_at - num_free) * 2 + 1, block, mask=victim)
    tl.debug_barrier()

    if num_fetched > 0:
        slot = tl.load(slot_list + ascending, mask=fetched, other=0)
        tl.store(base + slot, predicted, mask=fetched)
        tl.store(base + S + slot, due, mask=fetched)
        tl.store(base + 2 * S + slot, NEVER, mask=fetched)
        tl.store(base + 3 * S + slot, step, mask=fetched)
        first_fetched = tl.atomic_add(fetch_count, num_fetched)
        at = (first_fetched + rank - 1) * 3
        tl.store(fetch + at, bh.to(tl.int32), mask=fetched)
        tl.store(fetch + at + 1, predicted, mask=fetched)
        tl.store(fetch + at + 2, slot, mask=fetched)


@triton.jit
def _table(slots, table, counts, bh, step, S, table_width, SP: tl.constexpr):
    """List the slots that attention reads at `step`, then the open block, as pool block indices."""
    s = tl.arange(0, SP)
    base = slots + bh * 4 * S + s
    block = tl.load(base, mask=s < S, other=-1)
    due = tl.load(base + S, mask=s < S, other=0)
    leaves = tl.load(base + 2 * S, mask=s < S, other=0)
    read = (s < S) & (block >= 0) & (due <= step) & (step < leaves)
    at = tl.cumsum(read.to(tl.int32), axis=0) - 1
    num_read = tl.sum(read.to(tl.int32), axis=0)
    tl.store(table + bh * table_width + at, (bh * (S + 1) + s).to(tl.int32), mask=read)
    tl.store(table + bh * table_width + num_read, (bh * (S + 1) + S).to(tl.int32))
    tl.store(counts + bh, num_read + 1)


# Step and layer change with every launch: specialising on them would compile the kernel again and again.
@triton.jit(do_not_specialize=["offset", "layer", "lookahead", "num_steps"])
def residency_kernel(
    slots, rankings, rows, allowed, clock, kv_start, table, counts, fill_slot, fetch, fetch_count, evict, evict_count,
    scratch,
    offset, layer, lookahead, num_steps, rank_row_stride, rank_layer_stride, H, K, S, M, table_width,
    ON_DEMAND: tl.constexpr, P: tl.constexpr, NB: tl.constexpr, SP: tl.constexpr, KP: tl.constexpr,
    MP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """On demand: enter, plan and table of step t. Lookahead: plan of step t, then enter and table of step t + 1."""
    bh = tl.program_id(0).to(tl.int64)
    b = bh // H
    step = tl.load(clock) + offset
    kv_len = tl.load(kv_start + b) + step
    if ON_DEMAND:
        _enter(slots, fill_slot, bh, step, kv_len, K, S, evict, evict_count, P, NB, SP)
        tl.debug_barrier()
    due = step + lookahead
    row = tl.load(rows + b) + due
    if (due < num_steps) & (row >= 0):
        room = (kv_len + lookahead + P - 1) // P - (kv_len + P - 1) // P  # blocks that fill by the due step
        ranking = rankings + row.to(tl.int64) * rank_row_stride + layer * rank_layer_stride + (bh % H) * M
        _plan(
            slots, ranking, scratch, bh, step, due, (kv_len + P - 1) // P - 1, tl.load(allowed + step),
            tl.maximum(K - room, 0), S, M,
            fetch, fetch_count, evict, evict_count, NB, SP, KP, MP, CHUNK,
        )  # fmt: skip
        tl.debug_barrier()
    if ON_DEMAND:
        _table(slots, table, counts, bh, step, S, table_width, SP)
    else:
        _enter(slots, fill_slot, bh, step + 1, kv_len + 1, K, S, evict, evict_count, P, NB, SP)
        tl.debug_barrier()
        _table(slots, table, counts, bh, step + 1, S, table_width, SP)
