"""Pull: what a request fetches of its prompt over the network, when, and what its host comes to hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simulator import catalog
from simulator.experiment import expand, resolve
from simulator.points import run_point
from simulator.serving import batch_kernel
from simulator.serving.batch_kernel import FETCHED, REMOTE_FETCHED, REMOTE_REPAIRED, REMOTE_URGENT, REPAIRED, URGENT
from simulator.serving.left_behind import LeftBehind, brought_blocks, keeps_all_fetched, with_tail
from simulator.serving.loop import serve_all
from simulator.serving.records import RequestLog
from simulator.serving.requests import make_workload
from simulator.serving.run import ReplicaBuilder

QWEN = catalog.load_model("Qwen3-8B")
BLOCK_BYTES, HEADS = QWEN.block_bytes(16), 36 * 8
BASE: dict[str, Any] = {
    "trace": "synthetic",
    "model": "Qwen3-8B",
    "policy.kv_budget_tokens": 512,
    "serving.disaggregation": "pull",
    "serving.num_requests": 8,
    "serving.prompt_tokens": 2_000,
    "serving.output_tokens": 30,
    "serving.arrivals": "poisson",
    "serving.rate_per_s": 0.005,
}


def experiment(**settings: Any) -> Any:
    (point,) = expand({**BASE, **{key.replace("__", "."): value for key, value in settings.items()}}, {})
    return point


def row(**settings: Any) -> dict[str, Any]:
    found = run_point(experiment(**settings), use_cache=False)
    assert found["status"] == "ok", found["error"]
    return found


def builder(**settings: Any) -> ReplicaBuilder:
    point = resolve(experiment(**settings))
    return ReplicaBuilder(point, point.spec.serving, RequestLog())


def test_first_fetches_are_those_that_a_set_has_not_seen():
    """Replay with a host that forgets nothing, against its own fetches: new ones add up to what was ever brought."""
    point = resolve(experiment(system="retrieval"))
    group = point.trace.group("short")
    everything = keeps_all_fetched(point.policy, int(group.kv_len[-1]))
    assert everything.host_cache_tokens >= group.kv_len[-1]
    rows = builder(system="retrieval").demand.group_rows[0]
    half = len(rows) // 2
    new, fetched = rows[:half, 0, REMOTE_FETCHED], rows[:half, 0, FETCHED]
    assert (new <= fetched).all()
    assert 0 < new.sum() < fetched.sum()
    # No head can find more new blocks than the prompt has beyond the first set: what decode wrote is on its host.
    assert new.sum() <= HEADS * (-(-int(group.kv_len[0]) // 16) - 33)
    assert new[: half // 4].sum() > new[-(half // 4) :].sum()


def test_later_rows_keep_the_share_of_new_blocks_of_the_last_quarter():
    rng = np.random.default_rng(0)
    rows = np.zeros((40, 2, 10, 3), np.int32)
    rows[:, :, FETCHED] = rng.integers(5, 50, (40, 2, 3))
    rows[:, :, URGENT] = rows[:, :, FETCHED] // 3
    rows[:, :, REPAIRED] = rng.integers(0, 5, (40, 2, 3))
    for new, of in ((REMOTE_URGENT, URGENT), (REMOTE_REPAIRED, REPAIRED)):
        rows[:, :, new] = rows[:, :, of] // 2
    rows[:, :, REMOTE_FETCHED] = rows[:, :, REMOTE_URGENT] + (rows[:, :, FETCHED] - rows[:, :, URGENT]) // 4
    both = with_tail(rows)
    first, tail = both[:40], both[40:]
    np.testing.assert_array_equal(first, rows)
    np.testing.assert_array_equal(tail[:, :, FETCHED], rows[:, :, FETCHED])
    assert (tail[:, :, REMOTE_FETCHED] - tail[:, :, REMOTE_URGENT] <= tail[:, :, FETCHED] - tail[:, :, URGENT]).all()
    assert (tail[:, :, REMOTE_FETCHED] >= tail[:, :, REMOTE_URGENT]).all()
    late = rows[30:].sum(axis=0, dtype=np.int64)
    share = late[:, REMOTE_REPAIRED] / late[:, REPAIRED]
    expected = share * rows.sum(axis=0, dtype=np.int64)[:, REPAIRED]
    np.testing.assert_allclose(tail.sum(axis=0)[:, REMOTE_REPAIRED], expected, atol=1)
    brought = brought_blocks(both, 100)
    new = both[:, :, [REMOTE_FETCHED, REMOTE_REPAIRED]].sum(axis=(2, 3))
    order = [*range(80), *range(40, 60)]
    plain = [max(sum(int(new[at, gpu]) for at in order[:steps]) for gpu in (0, 1)) for steps in range(101)]
    assert brought.tolist() == plain


def test_an_idle_request_pulls_what_its_steps_fetch_for_the_first_time():
    found = row()
    made = builder()
    rows = made.demand.group_rows[made.demand.group_of(make_one(2_000))]
    new = int(rows[:29, 0, [REMOTE_FETCHED, REMOTE_REPAIRED]].sum())
    assert new > 0
    pulled_bytes = found["network_bytes_per_request"] - found["admission_network_bytes"]
    assert pulled_bytes == new * BLOCK_BYTES
    assert found["remote_bytes_per_token"] == pytest.approx(new * BLOCK_BYTES / 30)
    whole = row(serving__disaggregation="first-set")
    assert found["admission_network_bytes"] == whole["admission_network_bytes"]
    assert found["network_bytes_per_request"] < whole["network_bytes_per_request"]
    assert found["tpot_p50_s"] >= whole["tpot_p50_s"]


def make_one(prompt_tokens: int):
    from simulator.serving.request_state import RequestState

    return RequestState(0, 0.0, prompt_tokens, 2)


def test_the_host_holds_the_first_set_what_was_pulled_and_what_was_written():
    found, made, name = row(), builder(), "host_bytes_per_request_peak"
    assert found[name] < row(serving__disaggregation="first-set")[name]
    rows = made.demand.group_rows[made.demand.group_of(make_one(2_000))]
    # 2,029 tokens are 127 blocks, two more than the prompt's 125: taken with what the next 16 steps may bring.
    held = HEADS * (32 + 1 + 2) + int(brought_blocks(rows, 48)[48])
    assert found[name] == held * BLOCK_BYTES
    # In the end everything has come, and not more.
    long = row(serving__output_tokens=4_000, policy__fetch_cap=1.0)
    assert long[name] == QWEN.kv_bytes(-(-5_999 // 16) * 16)
    full = row(serving__disaggregation="first-set", policy__fetch_cap=1.0)["network_bytes_per_request"]
    most_of_a_step = HEADS * 32 * BLOCK_BYTES
    assert full - most_of_a_step <= long["network_bytes_per_request"] <= full + most_of_a_step


def test_compiled_and_plain_agree_on_what_is_left_behind():
    rng = np.random.default_rng(1)
    gap, brought = rng.integers(0, 1_000, 40), np.cumsum(rng.integers(0, 80, (2, 20)), axis=1)
    left = LeftBehind(gap, gap, brought)
    for prompt, blocks, group in ((0, 0, 0), (5, 5, 1), (5, 9, 0), (39, 90, 1), (7, 6, 0)):
        assert left.bytes(group, prompt, blocks) == batch_kernel.behind(gap, brought, group, prompt, blocks)


def test_staging_is_held_until_the_request_is_done_and_prompts_wait_for_it(with_hardware):
    settings = {"serving__prompt_tokens": 6_000, "serving__rate_per_s": 50.0, "serving__output_tokens": 60}
    modes = {mode: row(**settings, serving__disaggregation=mode) for mode in ("first-set", "pull")}
    assert modes["pull"]["prefill_staging_bytes_peak"] > modes["first-set"]["prefill_staging_bytes_peak"]
    with_hardware(host__dram_bytes=3.2e9 / catalog.load_hardware("h100-sxm").host.dram_bytes.value)
    tight = row(**settings)
    assert tight["prefill_blocked_s"] > 0.0
    assert tight["batch_peak"] <= 3 < modes["pull"]["batch_peak"]
    # Decode hosts hold less of each request, so more of them fit.
    few = row(**settings, serving__disaggregation="full-push", serving__prefill_replicas=4)
    many = row(**settings, serving__prefill_replicas=4)
    assert many["batch_peak"] > few["batch_peak"]


def test_a_slow_network_slows_decoding_that_pulls(with_hardware):
    settings = {"system": "retrieval", "serving__output_tokens": 20, "serving__num_requests": 4}
    modes = ("full-push", "first-set", "pull")
    fast = {mode: row(**settings, serving__disaggregation=mode) for mode in modes}
    with_hardware(nic__bytes_per_s=0.01)
    slow = {mode: row(**settings, serving__disaggregation=mode) for mode in modes}
    first_s = {
        mode: slow[mode]["second_token_p50_s"] - slow[mode]["ttft_p50_s"] - slow[mode]["handover_p50_s"]
        for mode in modes
    }
    # A request's first step finds the same of its prompt, whether the rest is to follow or not.
    assert first_s["pull"] == pytest.approx(first_s["first-set"])
    assert first_s["pull"] > 5 * first_s["full-push"]
    assert slow["pull"]["e2e_p50_s"] > fast["pull"]["e2e_p50_s"]
    assert slow["pull"]["remote_utilization"] > fast["pull"]["remote_utilization"] > 0


def test_what_came_by_itself_is_not_pulled():
    settings = {"system": "retrieval", "serving__output_tokens": 100}
    pulled = {mode: row(**settings, serving__disaggregation=mode)["remote_bytes_per_token"]
              for mode in ("full-push", "first-set", "pull")}  # fmt: skip
    assert pulled["pull"] > 2 * pulled["first-set"] > 0 == pulled["full-push"]


@pytest.mark.parametrize("seed", range(10))
def test_the_share_that_is_still_there_is_pulled_in_whole_blocks(seed):
    rng = np.random.default_rng(seed)
    gpus, layers, alike = 2, 3, np.array([1, 3])
    rows = np.zeros((50, gpus, 10, layers), np.int32)
    rows[:, :, REMOTE_URGENT] = rng.integers(0, 4, (50, gpus, layers))
    rows[:, :, REMOTE_FETCHED] = rows[:, :, REMOTE_URGENT] + rng.integers(0, 9, (50, gpus, layers))
    rows[:, :, REMOTE_REPAIRED] = rng.integers(0, 3, (50, gpus, layers))
    new = rows[:, :, [REMOTE_FETCHED, REMOTE_REPAIRED]].sum(axis=(2, 3)) @ alike
    sums = np.zeros((gpus, 10, layers), np.int64)
    share, never = rng.uniform(0.1, 0.9), int(new.sum()) + 500
    pulled = np.array([int(share * never), never, 0, 0])
    for at in range(50):
        batch_kernel.pull(rows[at], alike, pulled, sums)
        assert pulled[1] == never - new[: at + 1].sum()
    both = sums[:, [REMOTE_FETCHED, REMOTE_REPAIRED]].sum(axis=(1, 2))
    assert both @ alike == pulled[3] == int(share * never) - pulled[0]
    # One share throughout: what is pulled leaves as many of the others behind.
    assert pulled[3] == pytest.approx(share * new.sum(), abs=30)
    assert (sums <= rows.sum(axis=0)).all()
    assert (sums[:, REMOTE_FETCHED] >= sums[:, REMOTE_URGENT]).all()
    whole = np.array([never, never, 0, 0])
    sums[:] = 0
    for row_of in rows:
        batch_kernel.pull(row_of, alike, whole, sums)
    np.testing.assert_array_equal(sums[:, REMOTE_FETCHED], rows.sum(axis=0)[:, REMOTE_FETCHED])
    assert whole.tolist() == [never - new.sum(), never - new.sum(), 0, new.sum()]


def test_a_saturated_network_bounds_what_first_sets_can_promise():
    """More requests than the network can carry whole: they decode before all has come, and pull what they miss."""
    settings = {
        "serving__prompt_tokens": 6_000, "serving__arrivals": "closed", "serving__num_requests": 60,
        "serving__prefill_replicas": 16, "serving__output_tokens": 300,
    }  # fmt: skip
    found = {mode: row(**settings, serving__disaggregation=mode) for mode in ("full-push", "first-set", "pull")}
    assert all(of["network_utilization"] <= 1.0 for of in found.values())
    assert found["first-set"]["network_bytes_per_request"] < found["full-push"]["network_bytes_per_request"]
    assert found["first-set"]["network_bytes_per_request"] > found["pull"]["network_bytes_per_request"]
    pulled = {mode: of["remote_bytes_per_token"] for mode, of in found.items()}
    assert pulled["pull"] > pulled["first-set"] > pulled["full-push"] == 0
    assert found["first-set"]["second_token_p50_s"] < found["full-push"]["second_token_p50_s"]


def test_preempted_requests_give_up_what_they_had_pulled():
    settings = {
        "serving__prompt_tokens": 6_000, "serving__rate_per_s": 50.0, "serving__output_tokens": 1_200,
        "serving__num_requests": 40, "serving__prefill_replicas": 8, "engine__hbm_utilization": 0.26,
    }  # fmt: skip
    point = resolve(experiment(**settings))
    log, serving = RequestLog(), point.spec.serving
    made = ReplicaBuilder(point, serving, log)
    requests = make_workload(serving, 0).requests()
    (decoding,), prefill = serve_all(requests, made.build, serving.router, log, made.build_prefill)
    assert decoding.scheduler.tally.num_preemptions > 0
    assert log.num_finished == 40
    for replica in (decoding, *prefill):
        assert (replica.scheduler.pools.used == 0).all()
    assert decoding.handover.tally.asked_bytes == decoding.handover.links[0].traffic.total_bytes
