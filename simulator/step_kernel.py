"""One decode step of one GPU as a compiled fluid loop over five engines (C, B, H, D, R).

Between two events every active engine runs at the rate that `engine_rates` gives for the set of active ones. With
all rates 1 this is the max-plus recurrence over layers. `step_reference` is the same model as SimPy processes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simulator.step_layout import (
    ALLREDUCE,
    ATTENTION,
    B_PART,
    D_BUSY,
    END,
    H_BUSY,
    HOP,
    JOIN,
    LEFT_FIRST,
    LEFT_PREFETCH,
    LEFT_REMOTE_FIRST,
    LEFT_REMOTE_PREFETCH,
    LEFT_SIDE,
    LEFT_WRITE,
    N_ATTENTION,
    N_FIRST,
    N_PLANNED,
    N_PREFETCH,
    N_QKV,
    N_REMOTE_FIRST,
    N_REMOTE_PREFETCH,
    N_SELECTED,
    N_WRITTEN,
    NOW,
    PHASE_KIND,
    PHASE_PART,
    PLAN,
    QKV,
    R_BUSY,
    SCATTER,
    SCORE,
    SIDE_PLAN,
    SIDE_SCORE,
    SIDE_TOPK,
    STEP,
    T_EXPOSED,
    T_PLAN,
    TOPK,
    WAIT,
)

Float = NDArray[np.float64]
INF = np.inf
_KIND_SCORE, _KIND_TOPK = 3, 4


@njit(cache=True)
def run_step(
    t: int,
    lookahead_k: int,
    on_demand: bool,
    urgent: bool,
    plan_waits: bool,
    remote: bool,
    lands_in_slots: bool,
    same_step: bool,
    stream_buffers: int,
    link_share: float,
    remote_share: float,
    durations_s: Float,
    attention_s: Float,
    scatter_s: Float,
    selects: NDArray[np.bool_],
    first_s: Float,
    prefetch_s: Float,
    write_s: Float,
    waits_for_slots: NDArray[np.bool_],
    remote_first_s: Float,
    remote_prefetch_s: Float,
    counts: NDArray[np.int64],
    clock: Float,
    planned_at_s: Float,
    rates: Float,
    steps_s: Float,
) -> float:
    """Advance one step and return its seconds.

    `link_share` in (0, 1] scales H, `remote_share` R. Row t of `steps_s` [T, 17] gets the breakdown (13), the step and
    how long H, D and R were busy. Mutates `counts`, `clock`, `planned_at_s`.
    Shapes: `durations_s` [T, 20], `attention_s` … `remote_prefetch_s` [T, L], `selects` [L], `rates` [5, 5, 2, 2, 4].
    """
    num_layers = selects.shape[0]
    ring = planned_at_s.shape[1]
    dur = durations_s[t]
    now = clock[NOW]
    start = now
    side, first, prefetch, write = clock[LEFT_SIDE], clock[LEFT_FIRST], clock[LEFT_PREFETCH], clock[LEFT_WRITE]
    r_first, r_prefetch = clock[LEFT_REMOTE_FIRST], clock[LEFT_REMOTE_PREFETCH]
    h_busy_s = d_busy_s = r_busy_s = 0.0
    parts_s = steps_s[t]
    num_qkv, num_selected, num_attended = counts[N_QKV], counts[N_SELECTED], counts[N_ATTENTION]
    num_planned, side_part = counts[N_PLANNED], counts[B_PART]
    num_first, num_prefetched, num_written = counts[N_FIRST], counts[N_PREFETCH], counts[N_WRITTEN]
    num_r_first, num_r_prefetched = counts[N_REMOTE_FIRST], counts[N_REMOTE_PREFETCH]
    hop_s = dur[HOP]
    prefetches = lookahead_k > 0 or same_step
    last_prefetch = prefetch_s.shape[0] * num_layers
    table = rates.reshape(-1)
    layer = 0
    g = t * num_layers
    phase = 0
    compute = dur[0]
    while True:
        # Everything that happens without time passing.
        wait_part = -1
        wake = INF
        moved = True
        while moved:
            moved = False
            # Compute stream: step over finished phases.
            while phase != END and compute <= 0.0:
                if phase == WAIT:
                    wait_part = -1
                    if plan_waits and selects[layer]:
                        # Idle for what is missing: the plan (and its way to the CPU), then the transfer.
                        awaited = -1
                        plan_exists = True
                        if on_demand and num_first <= g:
                            awaited = t
                            source = 0
                        elif urgent and t >= 1 and num_first <= g - num_layers:
                            awaited = t - 1
                            source = 1
                            plan_exists = num_planned > g - num_layers
                        elif prefetches and t >= lookahead_k and num_prefetched <= g - lookahead_k * num_layers:
                            awaited = t - lookahead_k
                            source = 1
                            plan_exists = num_planned > g - lookahead_k * num_layers
                        if awaited >= 0:
                            wait_part = T_EXPOSED
                            if not plan_exists:
                                wait_part = T_PLAN
                            else:
                                ready = planned_at_s[source, awaited % ring, layer] + hop_s
                                if now < ready:
                                    wait_part = T_PLAN
                                    wake = min(wake, ready)
                    if wait_part >= 0:
                        break
                elif phase == QKV:
                    num_qkv = g + 1
                elif phase == PLAN:
                    num_selected = g + 1
                    planned_at_s[0, t % ring, layer] = now
                elif phase == ATTENTION:
                    num_attended = g + 1
                if phase == ALLREDUCE and layer + 1 < num_layers:
                    phase = QKV
                    layer += 1
                    g += 1
                else:
                    phase += 1
                if phase == ATTENTION:
                    compute = attention_s[t, layer]
                elif phase == SCATTER:
                    compute = scatter_s[t, layer]
                elif ((SCORE <= phase <= PLAN or phase == JOIN) and not selects[layer]) or phase in (WAIT, END, PLAN):
                    compute = 0.0
                elif phase == TOPK:  # top-k and plan are one kind of work and follow each other: one interval
                    compute = dur[TOPK] + dur[PLAN]
                else:
                    compute = dur[phase]
            if phase == END:
                break
            # Side stream: score, top-k, plan of the next layer whose query exists, or can be told a layer before.
            while True:
                if side < 0.0:
                    early = same_step and stream_buffers == 0 and num_planned % num_layers > 0
                    if num_planned >= num_qkv + early:
                        break
                    side_part = SIDE_SCORE
                    side = dur[SIDE_SCORE] if selects[num_planned % num_layers] else 0.0
                if side > 0.0:
                    break
                if side_part == SIDE_SCORE:
                    side_part = SIDE_TOPK
                    side = dur[SIDE_TOPK] + dur[SIDE_PLAN] if selects[num_planned % num_layers] else 0.0
                else:
                    done = num_planned
                    planned_at_s[1, (done // num_layers) % ring, done % num_layers] = now
                    num_planned = done + 1
                    side = -1.0
                    moved = moved or wait_part >= 0  # attention may be waiting for it
            # Engine R: what the plan of a (step, layer) takes from beyond the host, first queue before prefetches.
            while remote:
                if r_first < 0.0:
                    h = num_r_first
                    ht, hl = h // num_layers, h % num_layers
                    if on_demand:
                        if h >= num_selected:
                            break
                        ready = planned_at_s[0, ht % ring, hl] + hop_s
                    else:
                        if h >= num_planned or (lands_in_slots and waits_for_slots[ht, hl] and h >= num_attended):
                            break
                        ready = planned_at_s[1, ht % ring, hl] + hop_s
                    if remote_first_s[ht, hl] > 0.0 or first_s[ht, hl] > 0.0:
                        if ht >= 2 and num_written <= h - 2 * num_layers:
                            break
                        if now < ready:
                            wake = min(wake, ready)
                            break
                    r_first = remote_first_s[ht, hl]
                if r_first > 0.0:
                    break
                num_r_first += 1
                r_first = -1.0
            while remote and prefetches:
                if r_prefetch < 0.0:
                    h = num_r_prefetched
                    ht, hl = h // num_layers, h % num_layers
                    if h == last_prefetch or h >= (num_attended + stream_buffers if stream_buffers else num_planned):
                        break
                    if remote_prefetch_s[ht, hl] > 0.0 or prefetch_s[ht, hl] > 0.0:
                        if lands_in_slots and waits_for_slots[ht, hl] and h >= num_attended:
                            break
                        if ht >= 2 and num_written <= h - 2 * num_layers:
                            break
                        ready = planned_at_s[1, ht % ring, hl] + hop_s
                        if now < ready:
                            wake = min(wake, ready)
                            break
                    r_prefetch = remote_prefetch_s[ht, hl]
                if r_prefetch > 0.0:
                    break
                num_r_prefetched += 1
                r_prefetch = -1.0
            # First queue: on demand (plan on C) or urgent (plan on B).
            while True:
                if first < 0.0:
                    h = num_first
                    ht, hl = h // num_layers, h % num_layers
                    if remote:
                        if h >= num_r_first or (not on_demand and waits_for_slots[ht, hl] and h >= num_attended):
                            break
                        ready = now  # R has waited for plan, hop and write-back
                    elif on_demand:
                        if h >= num_selected:
                            break
                        ready = planned_at_s[0, ht % ring, hl] + hop_s
                    else:
                        if h >= num_planned or (waits_for_slots[ht, hl] and h >= num_attended):
                            break
                        ready = planned_at_s[1, ht % ring, hl] + hop_s
                    if first_s[ht, hl] > 0.0 and not remote:
                        if ht >= 2 and num_written <= h - 2 * num_layers:
                            break
                        if now < ready:
                            wake = min(wake, ready)
                            break
                    first = first_s[ht, hl]
                if first > 0.0:
                    break
                moved = moved or wait_part >= 0  # attention may be waiting for it
                num_first += 1
                first = -1.0
            # Prefetches.
            while prefetches:
                if prefetch < 0.0:
                    h = num_prefetched
                    ht, hl = h // num_layers, h % num_layers
                    if remote:
                        startable = num_r_prefetched
                    elif stream_buffers:
                        startable = min(num_attended + stream_buffers, last_prefetch)
                    else:
                        startable = num_planned
                    if h >= startable:
                        break
                    if prefetch_s[ht, hl] > 0.0 and waits_for_slots[ht, hl] and h >= num_attended:
                        break
                    if prefetch_s[ht, hl] > 0.0 and not remote:
                        if ht >= 2 and num_written <= h - 2 * num_layers:
                            break
                        ready = planned_at_s[1, ht % ring, hl] + hop_s
                        if now < ready:
                            wake = min(wake, ready)
                            break
                    prefetch = prefetch_s[ht, hl]
                if prefetch > 0.0:
                    break
                moved = moved or wait_part >= 0  # attention may be waiting for it
                num_prefetched += 1
                prefetch = -1.0
            # Write-backs.
            while True:
                if write < 0.0:
                    h = num_written
                    if h >= num_qkv:
                        break
                    write = write_s[h // num_layers, h % num_layers]
                if write > 0.0:
                    break
                moved = True  # a fetch may be waiting for it
                num_written += 1
                write = -1.0
        if phase == END:
            break
        # One interval of constant rates.
        c_kind = PHASE_KIND[phase]
        b_kind = 0
        if side > 0.0:
            b_kind = _KIND_SCORE if side_part == SIDE_SCORE else _KIND_TOPK
        h_left = first if first > 0.0 else prefetch
        h_on = 1 if h_left > 0.0 else 0
        d_on = 1 if write > 0.0 else 0
        r_left = r_first if r_first > 0.0 else r_prefetch
        at = (((c_kind * 5 + b_kind) * 2 + h_on) * 2 + d_on) * 4
        c_rate, b_rate, h_rate, d_rate = table[at], table[at + 1], table[at + 2] * link_share, table[at + 3]
        dt = wake - now
        c_dt = b_dt = h_dt = d_dt = r_dt = INF
        if compute > 0.0:
            c_dt = compute / c_rate
            dt = min(dt, c_dt)
        if side > 0.0:
            b_dt = side / b_rate
            dt = min(dt, b_dt)
        if h_on:
            h_dt = h_left / h_rate
            dt = min(dt, h_dt)
        if d_on:
            d_dt = write / d_rate
            dt = min(dt, d_dt)
        if r_left > 0.0:
            r_dt = r_left / remote_share
            dt = min(dt, r_dt)
        if not now + dt < INF:
            raise RuntimeError("decode step is stuck: nothing runs and compute waits")
        parts_s[wait_part if wait_part >= 0 else PHASE_PART[phase]] += dt
        if compute > 0.0:
            compute = 0.0 if c_dt <= dt else compute - c_rate * dt
        if side > 0.0:
            side = 0.0 if b_dt <= dt else side - b_rate * dt
        if h_on:
            h_busy_s += dt
            h_left = 0.0 if h_dt <= dt else h_left - h_rate * dt
            if first > 0.0:
                first = h_left
            else:
                prefetch = h_left
        if d_on:
            d_busy_s += dt
            write = 0.0 if d_dt <= dt else write - d_rate * dt
        if r_left > 0.0:
            r_busy_s += dt
            r_left = 0.0 if r_dt <= dt else r_left - remote_share * dt
            if r_first > 0.0:
                r_first = r_left
            else:
                r_prefetch = r_left
        now = wake if dt == wake - now else now + dt
    clock[NOW] = now
    clock[LEFT_SIDE], clock[LEFT_FIRST], clock[LEFT_PREFETCH], clock[LEFT_WRITE] = side, first, prefetch, write
    clock[LEFT_REMOTE_FIRST], clock[LEFT_REMOTE_PREFETCH] = r_first, r_prefetch
    parts_s[STEP], parts_s[H_BUSY], parts_s[D_BUSY], parts_s[R_BUSY] = now - start, h_busy_s, d_busy_s, r_busy_s
    counts[N_QKV], counts[N_SELECTED], counts[N_ATTENTION] = num_qkv, num_selected, num_attended
    counts[N_PLANNED], counts[B_PART] = num_planned, side_part
    counts[N_REMOTE_FIRST], counts[N_REMOTE_PREFETCH] = num_r_first, num_r_prefetched
    counts[N_FIRST], counts[N_PREFETCH], counts[N_WRITTEN] = num_first, num_prefetched, num_written
    elapsed_s: float = now - start
    return elapsed_s


@njit(cache=True)
def run_steps(num_steps: int, *step_arguments: Any) -> float:
    """All steps of a GPU that shares no link with another: `run_step(t, *step_arguments)` for every t, summed."""
    total_s = 0.0
    for t in range(num_steps):
        total_s += run_step(t, *step_arguments)
    return total_s
