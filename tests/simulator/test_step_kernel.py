"""The compiled step equals the SimPy reference and the closed forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import step_layout as at
from simulator.step_kernel import run_step
from simulator.step_layout import (
    D_BUSY,
    H_BUSY,
    NUM_DURATIONS,
    NUM_PARTS,
    NUM_STEP_COLUMNS,
    R_BUSY,
    STEP,
    StepRules,
    StepWork,
    new_state,
)
from simulator.step_reference import StepReference
from simulator.topology import ALONE, Share

US = 1e-6


def random_case(seed: int) -> tuple[StepRules, StepWork, np.ndarray, Share]:
    rng = np.random.default_rng(seed)
    steps, layers = int(rng.integers(2, 9)), int(rng.integers(1, 6))
    k = int(rng.integers(0, 4))
    same_step = k == 0 and bool(rng.integers(0, 2))
    stream_buffers = int(rng.integers(0, 4)) if same_step else 0
    on_demand = (k == 0 and not same_step) or (not stream_buffers and bool(rng.integers(0, 2)))
    urgent = k >= 2 and not on_demand and bool(rng.integers(0, 2))
    dur = np.zeros((steps, NUM_DURATIONS))
    for phase in (at.SOFTWARE, at.DRAFT, at.SAMPLING, at.QKV, at.FFN, at.ALLREDUCE, at.LM_HEAD, at.OTHER):
        dur[:, phase] = rng.uniform(0, 20 * US) * (rng.random() < 0.8)
    if on_demand:
        dur[:, at.SCORE : at.PLAN + 1] = rng.uniform(US, 20 * US, 3)
    if k or (same_step and not stream_buffers):
        dur[:, at.SIDE_SCORE : at.SIDE_PLAN + 1] = rng.uniform(US, 30 * US, 3)
        dur[:, at.JOIN] = rng.uniform(0, 10 * US)
    dur[:, at.HOP] = 0.0 if stream_buffers else rng.choice([0.0, 10 * US])
    shape = (steps, layers)
    selects = rng.random(layers) < 0.9

    def some(share: float, top: float) -> np.ndarray:
        return rng.uniform(0, top, shape) * (rng.random(shape) < share)

    nothing = np.zeros(shape)
    remote = bool(rng.integers(0, 2))
    lands_in_slots = remote and bool(rng.integers(0, 2))
    first_s = (some(0.7, 40 * US) if on_demand or urgent else nothing) * selects
    prefetch_s = (some(0.7, 80 * US) if k or same_step else nothing) * selects
    # What lands in slots does not go over the host link; what is staged may come from the host alone.
    on_link = 0.0 if lands_in_slots else 1.0
    from_remote = (some(2.0, 2.0) if lands_in_slots else some(0.7, 2.0)) if remote else nothing
    work = StepWork(
        durations_s=dur,
        attention_s=rng.uniform(5 * US, 40 * US, shape),
        scatter_s=some(0.5, 3 * US),
        selects=selects,
        first_s=first_s * on_link,
        prefetch_s=prefetch_s * on_link,
        write_s=some(0.3, 30 * US),
        waits_for_slots=(rng.random(shape) < 0.5) & (not same_step),
        remote_first_s=first_s * from_remote,
        remote_prefetch_s=prefetch_s * from_remote,
    )
    rates = np.ones((5, 5, 2, 2, 4)) if seed % 3 == 0 else rng.uniform(0.4, 1, (5, 5, 2, 2, 4))
    rates[0, ..., 0] = 1.0  # an idle kernel kind (software, all-reduce) is slowed by nothing
    rules = StepRules(layers, k, on_demand, urgent, True, remote, lands_in_slots, same_step, stream_buffers)
    return rules, work, rates, Share(float(rng.choice([1.0, 0.6])), float(rng.choice([1.0, 0.3])))


def play(rules: StepRules, work: StepWork, rates: np.ndarray, share: Share = ALONE):
    steps = work.durations_s.shape[0]
    state = new_state(rules.num_layers, rules.lookahead_k + 3)
    steps_s = np.zeros((steps, NUM_STEP_COLUMNS))
    for t in range(steps):
        run_step(
            t, *rules.flags, share.link, share.remote, work.durations_s, work.attention_s,
            work.scatter_s, work.selects, work.first_s, work.prefetch_s, work.write_s, work.waits_for_slots,
            work.remote_first_s, work.remote_prefetch_s, state.counts, state.clock, state.planned_at_s, rates, steps_s,
        )  # fmt: skip
    return steps_s[:, STEP], steps_s[:, :NUM_PARTS], (state, steps_s[:, [H_BUSY, D_BUSY, R_BUSY]].sum(axis=0))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_kernel_equals_simpy_reference(seed):
    rules, work, rates, share = random_case(seed)
    step_s, parts_s, (_, busy_s) = play(rules, work, rates, share)
    reference = StepReference(rules, work, rates, share).play()
    np.testing.assert_allclose(step_s, reference.step_s, rtol=0, atol=1e-9)
    np.testing.assert_allclose(parts_s, reference.parts_s, rtol=0, atol=1e-9)
    # The reference stops when compute does; engines that are still busy then have been busy as long.
    assert busy_s == pytest.approx(reference.engines.busy_s[2:], abs=2e-4)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_breakdown_sums_to_the_step(seed):
    rules, work, rates, share = random_case(seed)
    step_s, parts_s, _ = play(rules, work, rates, share)
    np.testing.assert_allclose(parts_s.sum(axis=1), step_s, rtol=0, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_faster_link_never_makes_the_run_slower_when_engines_do_not_slow_each_other(seed):
    rules, work, _, _ = random_case(seed)
    rates = np.ones((5, 5, 2, 2, 4))
    slow, fast = (play(rules, work, rates, Share(share, share))[0].sum() for share in (0.5, 1.0))
    assert fast <= slow + 1e-12


def plain(steps: int, layers: int, transfer_s: float, k: int = 1, slack: bool = False) -> tuple[StepRules, StepWork]:
    dur = np.zeros((steps, NUM_DURATIONS))
    dur[:, at.QKV], dur[:, at.FFN], dur[:, at.LM_HEAD] = 10 * US, 20 * US, 50 * US
    shape = (steps, layers)
    work = StepWork(
        durations_s=dur,
        attention_s=np.full(shape, 30 * US),
        scatter_s=np.zeros(shape),
        selects=np.ones(layers, dtype=np.bool_),
        first_s=np.zeros(shape),
        prefetch_s=np.full(shape, transfer_s),
        write_s=np.zeros(shape),
        waits_for_slots=np.full(shape, not slack),
        remote_first_s=np.zeros(shape),
        remote_prefetch_s=np.zeros(shape),
    )
    return StepRules(layers, k, on_demand=False, urgent=False, plan_waits=True), work


ONES = np.ones((5, 5, 2, 2, 4))


def test_hidden_transfers_cost_nothing():
    step_s, parts_s, _ = play(*plain(12, 8, 50 * US), ONES)
    assert step_s[4:] == pytest.approx(8 * 60 * US + 50 * US)
    assert parts_s[4:, at.T_EXPOSED].sum() == pytest.approx(0, abs=1e-12)


def test_a_link_bound_step_takes_exactly_the_link_time():
    step_s, parts_s, _ = play(*plain(40, 8, 100 * US), ONES)
    assert step_s[20:] == pytest.approx(8 * 100 * US)
    assert parts_s[20:, at.T_EXPOSED] == pytest.approx(8 * 100 * US - 8 * 60 * US - 50 * US)


def test_on_demand_exposes_every_transfer():
    _, work = plain(6, 4, 0.0)
    work.durations_s[:, at.SCORE : at.PLAN + 1] = 5 * US
    work.durations_s[:, at.HOP] = 7 * US
    on_demand = StepRules(4, 0, on_demand=True, urgent=False, plan_waits=True)
    work.first_s[:] = 40 * US
    step_s, parts_s, _ = play(on_demand, work, ONES)
    assert step_s == pytest.approx(4 * (10 + 15 + 7 + 40 + 30 + 20) * US + 50 * US)
    assert parts_s[:, at.T_EXPOSED] == pytest.approx(4 * 40 * US)
    assert parts_s[:, at.T_PLAN] == pytest.approx(4 * (10 + 7) * US)  # top-k, plan and the hop to the CPU


def streamed(transfer_s: float, buffers: int) -> tuple[np.ndarray, np.ndarray]:
    _, work = plain(12, 4, transfer_s, slack=True)
    rules = StepRules(4, 0, on_demand=False, urgent=False, plan_waits=True, same_step=True, stream_buffers=buffers)
    step_s, parts_s, _ = play(rules, work, ONES)
    return step_s, parts_s[:, at.T_EXPOSED]


def test_streamed_layers_overlap_with_the_layers_before():
    """QKV 10, attention 30, FFN 20 a layer, lm_head 50 a step; what is streamed has as many layers' time as buffers."""
    step_s, exposed_s = streamed(55 * US, buffers=2)
    assert step_s[2:] == pytest.approx(4 * 60 * US + 50 * US)
    assert exposed_s[2:] == pytest.approx(0)
    step_s, exposed_s = streamed(200 * US, buffers=2)
    assert step_s[4:] == pytest.approx(4 * 200 * US), "the link never rests"
    assert exposed_s[4:] == pytest.approx(4 * 200 * US - 290 * US)
    step_s, _ = streamed(200 * US, buffers=1)
    assert step_s[4:] == pytest.approx(4 * (200 + 30) * US), "one buffer: attention reads, then the next layer comes"


def test_a_plan_one_layer_ahead_hides_a_layer_of_transfer():
    """Planned when the layer before has its QKV: 5 of scoring, then 45 before attention of all layers but the first."""
    _, work = plain(6, 4, 0.0, slack=True)
    work.durations_s[:, at.SIDE_SCORE] = 5 * US
    rules = StepRules(4, 0, on_demand=False, urgent=False, plan_waits=True, same_step=True)
    for transfer_us, exposed_us in ((40, 40 + 0 * 3), (80, 80 + 20 + 20 + 20)):
        work.prefetch_s[:] = transfer_us * US
        _, parts_s, _ = play(rules, work, ONES)
        assert parts_s[1:, at.T_EXPOSED] == pytest.approx(exposed_us * US), transfer_us
        assert parts_s[1:, at.T_PLAN] == pytest.approx(5 * US)


def test_slots_still_read_delay_a_transfer_and_slack_does_not():
    # One layer whose attention is long: only with slack may the transfer run beside it.
    def last_step(slack: bool) -> float:
        rules, work = plain(20, 1, 70 * US, slack=slack)
        return float(play(rules, work, ONES)[0][-1])

    assert last_step(slack=True) == pytest.approx(110 * US)
    assert last_step(slack=False) > last_step(slack=True) - 1e-12
    rules, work = plain(20, 1, 90 * US, slack=False)
    # attention ends at 40 of the step, then 90 of transfer before attention of the next step at 10: 40 + 90 = 10 + step
    assert play(rules, work, ONES)[0][-1] == pytest.approx(120 * US)


def test_more_lookahead_gives_a_late_transfer_more_time():
    step_1 = play(*plain(30, 1, 90 * US, k=1), ONES)[0][-1]
    step_2 = play(*plain(30, 1, 90 * US, k=2), ONES)[0][-1]
    assert step_1 == pytest.approx(120 * US)  # starts after attention, must end before the next one
    assert step_2 == pytest.approx(110 * US)  # a step of slack: compute alone binds


def test_duplex_slows_both_directions():
    rules, work = plain(40, 4, 100 * US)
    rates = ONES.copy()
    rates[:, :, 1, 1, 2:] = 0.5
    work.write_s[:] = 30 * US
    assert play(rules, work, rates)[0][-1] > play(rules, work, ONES)[0][-1]


def test_a_write_back_in_flight_holds_the_fetch_two_steps_later():
    rules, work = plain(30, 1, 10 * US)
    work.write_s[:] = 200 * US
    step_s, _, _ = play(rules, work, ONES)
    assert step_s[-1] == pytest.approx(200 * US)


def remote_chain(remote_s: float, link_s: float, **rules: bool) -> float:
    """Last step of a long run whose every prefetch passes R, then H2D; 8 layers, slack."""
    base, work = plain(40, 8, link_s, slack=True)
    work.remote_prefetch_s[:] = remote_s
    return float(play(replace(base, remote=True, **rules), work, ONES)[0][-1])


@pytest.mark.parametrize(("remote_s", "link_s"), [(100 * US, 30 * US), (30 * US, 100 * US), (90 * US, 90 * US)])
def test_the_slower_of_two_stages_binds(remote_s, link_s):
    assert remote_chain(remote_s, link_s) == pytest.approx(8 * max(remote_s, link_s))


def test_both_stages_hidden_cost_nothing():
    assert remote_chain(50 * US, 50 * US) == pytest.approx(8 * 60 * US + 50 * US)


def test_on_demand_pays_both_stages_one_after_the_other():
    base, work = plain(6, 4, 0.0)
    work.durations_s[:, at.SCORE : at.PLAN + 1] = 5 * US
    work.first_s[:], work.remote_first_s[:] = 40 * US, 70 * US
    on_demand = replace(base, lookahead_k=0, on_demand=True, remote=True)
    _, parts_s, _ = play(on_demand, work, ONES)
    assert parts_s[:, at.T_EXPOSED] == pytest.approx(4 * 110 * US)
    work.first_s[:] = 0.0
    _, parts_s, _ = play(replace(on_demand, lands_in_slots=True), work, ONES)
    assert parts_s[:, at.T_EXPOSED] == pytest.approx(4 * 70 * US)


def test_what_lands_in_slots_waits_for_their_readers():
    def last_step(**rules: bool) -> float:
        base, work = plain(20, 1, 0.0, slack=False)
        work.remote_prefetch_s[:] = 90 * US
        return float(play(replace(base, remote=True, **rules), work, ONES)[0][-1])

    assert last_step(lands_in_slots=True) == pytest.approx(120 * US)  # after attention, as H2D (above)
    assert last_step() == pytest.approx(110 * US)  # into host memory at any time: compute binds


def test_no_prefetch_is_lost():
    rules, work = plain(40, 3, 100 * US)
    _, _, (state, _) = play(rules, work, ONES)
    issued = 40 * 3
    assert issued - rules.num_layers <= state.counts[at.N_PREFETCH] <= issued
