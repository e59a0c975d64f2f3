"""One decode step of one GPU as a compiled fluid loop over four engines (C, B, H, D).

Between two events every active engine runs at the rate that `engine_rates` gives for the set of active ones. With
all rates 1 this is the max-plus recurrence over layers. `step_reference` is the same model as SimPy processes.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from simulator.step_layout import (
    ALLREDUCE,
    ATTENTION,
    B_PART,
    D_BUSY,
    END,
    FFN,
    H_BUSY,
    HOP,
    N_ATTENTION,
    N_FIRST,
    N_PLANNED,
    N_PREFETCH,
    N_QKV,
    N_SELECTED,
    N_WRITTEN,
    NOW,
    OTHER,
    PHASE_KIND,
    PHASE_PART,
    PLAN,
    QKV,
    R_FIRST,
    R_PREFETCH,
    R_SIDE,
    R_WRITE,
    SCATTER,
    SCORE,
    SIDE_PLAN,
    SIDE_SCORE,
    SIDE_TOPK,
    T_EXPOSED,
    T_PLAN,
    TOPK,
    WAIT,
)

INF = np.inf
_KIND_SCORE, _KIND_TOPK = 3, 4


@njit(cache=True)
def run_step(
    t,
    lookahead_k,
    on_demand,
    urgent,
    plan_waits,
    link_share,
    durations_s,
    attention_s,
    scatter_s,
    selects,
    first_s,
    prefetch_s,
    write_s,
    waits_for_slots,
    counts,
    clock,
    planned_at_s,
    rates,
    parts_s,
):
    """Advance one step and return its seconds.

    `link_share` in (0, 1] scales H. Adds each instant to `parts_s` [13]. Mutates `counts`, `clock`, `planned_at_s`.
    Shapes: `durations_s` [T, 19], `attention_s` … `waits_for_slots` [T, L], `selects` [L], `rates` [5, 5, 2, 2, 4].
    """
    num_layers = selects.shape[0]
    ring = planned_at_s.shape[1]
    dur = durations_s[t]
    now = clock[NOW]
    start = now
    side, first, prefetch, write = clock[R_SIDE], clock[R_FIRST], clock[R_PREFETCH], clock[R_WRITE]
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
                        if on_demand and counts[N_FIRST] <= g:
                            wait_part = T_EXPOSED
                            if now < planned_at_s[0, t % ring, layer] + dur[HOP]:
                                wait_part = T_PLAN
                        elif urgent and g >= num_layers and counts[N_FIRST] <= g - num_layers:
                            wait_part = T_EXPOSED
                            if counts[N_PLANNED] <= g - num_layers or (
                                now < planned_at_s[1, (t - 1) % ring, layer] + dur[HOP]
                            ):
                                wait_part = T_PLAN
                        elif lookahead_k > 0 and t >= lookahead_k and counts[N_PREFETCH] <= g - lookahead_k * num_layers:
                            wait_part = T_EXPOSED
                            if counts[N_PLANNED] <= g - lookahead_k * num_layers or (
                                now < planned_at_s[1, (t - lookahead_k) % ring, layer] + dur[HOP]
                            ):
                                wait_part = T_PLAN
                    if wait_part >= 0:
                        break
                elif phase == QKV:
                    counts[N_QKV] = g + 1
                elif phase == PLAN:
                    counts[N_SELECTED] = g + 1
                    planned_at_s[0, t % ring, layer] = now
                elif phase == ATTENTION:
                    counts[N_ATTENTION] = g + 1
                moved = True
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
                elif SCORE <= phase <= PLAN and not selects[layer]:
                    compute = 0.0
                elif phase == WAIT or phase == END:
                    compute = 0.0
                else:
                    compute = dur[phase]
            if phase == END:
                break
            # Side stream: score, top-k, plan of the next layer whose query exists.
            while True:
                if side < 0.0:
                    if counts[N_PLANNED] >= counts[N_QKV]:
                        break
                    counts[B_PART] = SIDE_SCORE
                    side = dur[SIDE_SCORE] if selects[counts[N_PLANNED] % num_layers] else 0.0
                if side > 0.0:
                    break
                moved = True
                if counts[B_PART] < SIDE_PLAN:
                    counts[B_PART] += 1
                    side = dur[counts[B_PART]] if selects[counts[N_PLANNED] % num_layers] else 0.0
                else:
                    done = counts[N_PLANNED]
                    planned_at_s[1, (done // num_layers) % ring, done % num_layers] = now
                    counts[N_PLANNED] = done + 1
                    side = -1.0
            # First queue: on demand (plan on C) or urgent (plan on B).
            while True:
                if first < 0.0:
                    h = counts[N_FIRST]
                    ht, hl = h // num_layers, h % num_layers
                    if on_demand:
                        if h >= counts[N_SELECTED]:
                            break
                        ready = planned_at_s[0, ht % ring, hl] + dur[HOP]
                    else:
                        if h >= counts[N_PLANNED] or (waits_for_slots[ht, hl] and h >= counts[N_ATTENTION]):
                            break
                        ready = planned_at_s[1, ht % ring, hl] + dur[HOP]
                    if first_s[ht, hl] > 0.0:
                        if ht >= 2 and counts[N_WRITTEN] <= h - 2 * num_layers:
                            break
                        if now < ready:
                            wake = min(wake, ready)
                            break
                    first = first_s[ht, hl]
                if first > 0.0:
                    break
                moved = True
                counts[N_FIRST] += 1
                first = -1.0
            # Prefetches.
            while lookahead_k > 0:
                if prefetch < 0.0:
                    h = counts[N_PREFETCH]
                    ht, hl = h // num_layers, h % num_layers
                    if h >= counts[N_PLANNED]:
                        break
                    if prefetch_s[ht, hl] > 0.0:
                        if waits_for_slots[ht, hl] and h >= counts[N_ATTENTION]:
                            break
                        if ht >= 2 and counts[N_WRITTEN] <= h - 2 * num_layers:
                            break
                        ready = planned_at_s[1, ht % ring, hl] + dur[HOP]
                        if now < ready:
                            wake = min(wake, ready)
                            break
                    prefetch = prefetch_s[ht, hl]
                if prefetch > 0.0:
                    break
                moved = True
                counts[N_PREFETCH] += 1
                prefetch = -1.0
            # Write-backs.
            while True:
                if write < 0.0:
                    h = counts[N_WRITTEN]
                    if h >= counts[N_QKV]:
                        break
                    write = write_s[h // num_layers, h % num_layers]
                if write > 0.0:
                    break
                moved = True
                counts[N_WRITTEN] += 1
                write = -1.0
        if phase == END:
            break
        # One interval of constant rates.
        c_kind = PHASE_KIND[phase]
        b_kind = 0
        if side > 0.0:
            b_kind = _KIND_SCORE if counts[B_PART] == SIDE_SCORE else _KIND_TOPK
        h_on = 1 if first > 0.0 or prefetch > 0.0 else 0
        d_on = 1 if write > 0.0 else 0
        rate = rates[c_kind, b_kind, h_on, d_on]
        h_rate = rate[2] * link_share
        dt = wake - now
        if compute > 0.0:
            dt = min(dt, compute / rate[0])
        if side > 0.0:
            dt = min(dt, side / rate[1])
        h_left = first if first > 0.0 else prefetch
        if h_on:
            dt = min(dt, h_left / h_rate)
        if d_on:
            dt = min(dt, write / rate[3])
        if dt == INF:
            raise RuntimeError("decode step is stuck: nothing runs and compute waits")
        parts_s[wait_part if wait_part >= 0 else PHASE_PART[phase]] += dt
        if compute > 0.0:
            compute = 0.0 if compute / rate[0] <= dt else compute - rate[0] * dt
        if side > 0.0:
            side = 0.0 if side / rate[1] <= dt else side - rate[1] * dt
        if h_on:
            clock[H_BUSY] += dt
            h_left = 0.0 if h_left / h_rate <= dt else h_left - h_rate * dt
            if first > 0.0:
                first = h_left
            else:
                prefetch = h_left
        if d_on:
            clock[D_BUSY] += dt
            write = 0.0 if write / rate[3] <= dt else write - rate[3] * dt
        now = wake if dt == wake - now else now + dt
    clock[NOW] = now
    clock[R_SIDE], clock[R_FIRST], clock[R_PREFETCH], clock[R_WRITE] = side, first, prefetch, write
    return now - start
