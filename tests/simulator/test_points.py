"""Whole points: breakdown, conservation, order of systems, monotonicity, determinism, bad input."""

from __future__ import annotations

import itertools
import json

import pytest

from simulator import catalog, systems
from simulator.metrics import BREAKDOWN, COLUMNS
from simulator.points import point_key, reference_recall, run_point, timeline_records
from tests.simulator.synthetic_trace import synthetic_point
from traces.errors import InputError

SYSTEMS = tuple(name for name, system in systems.SYSTEMS.items() if not system.serving)
TRANSPORTS = ("gather", "ce-batched", "ce-per-block", "ce-contiguous")
FRACTIONS = ("hidden_fraction", "hit_rate", "overlap", "recall", "recall_upper", "churn", "link_utilization")


pytestmark = pytest.mark.usefixtures("synthetic")


def run(**settings):
    return run_point(synthetic_point(**settings), use_cache=False)


@pytest.mark.parametrize(("system", "transport"), list(itertools.product(SYSTEMS, TRANSPORTS)))
def test_row_is_whole_and_its_breakdown_sums_to_tpot(system, transport):
    row = run(system=system, policy__transport=transport)
    assert row["status"] == "ok"
    assert set(COLUMNS) <= set(row)
    assert sum(row[name] for name in BREAKDOWN) == pytest.approx(row["tpot_mean_s"], abs=1e-9)
    assert all(row[name] is None or 0 <= row[name] <= 1 for name in FRACTIONS)
    assert row["exposed_transfer_s"] == row["t_exposed_wait_s"] <= row["tpot_mean_s"]
    assert row["tpot_p50_s"] <= row["tpot_p99_s"]


def test_throughput_is_batch_over_tpot():
    row = run(workload__batch_size=48)
    assert row["throughput_tokens_per_s"] == pytest.approx(48 / row["tpot_mean_s"], rel=1e-9)


def test_bytes_on_the_link_follow_from_churn():
    """h2d bytes per token = churn x K x heads x layers x block bytes (no repairs), up to which rows a batch drew."""
    row = run(policy__fetch_cap=1.0, workload__batch_size=200, workload__output_tokens=400)
    blocks = row["churn"] * row["policy.kv_budget_tokens"] / 16
    assert row["h2d_bytes_per_token"] == pytest.approx(blocks * 36 * 8 * 8192, rel=0.02)


def test_write_back_moves_every_new_token_once():
    row = run(workload__output_tokens=16 * 20, workload__batch_size=64)
    assert row["d2h_bytes_per_token"] == pytest.approx(147_456, rel=0.02)


def test_on_demand_is_dominated_by_the_transfer_and_lookahead_hides_it():
    common = {"policy__fetch_cap": 1.0, "policy__transport": "gather", "workload__batch_size": 16}
    demand, ahead = run(system="retrieval", **common), run(system="oasiskv", **common)
    assert demand["t_exposed_wait_s"] > 3 * demand["t_plan_s"]
    assert ahead["t_exposed_wait_s"] < 0.2 * demand["t_exposed_wait_s"]
    assert ahead["tpot_mean_s"] < demand["tpot_mean_s"]


def test_dense_stops_where_hbm_is_full():
    row = run(system="dense", workload__batch_size=500)
    assert row["status"] == "does_not_fit"
    assert "largest batch that fits is" in row["error"]
    assert run(system="dense", workload__batch_size=row["max_batch_size"])["bound"] == "capacity"


def test_the_link_binds_a_large_uncapped_batch():
    row = run(policy__fetch_cap=1.0, workload__batch_size=256)
    assert row["bound"] == "h2d"
    assert row["throughput_tokens_per_s"] <= row["h2d_ceiling_tokens_per_s"] * (1 + 1e-9)


def test_software_can_bind():
    assert run(engine__software_overhead_s=0.05)["bound"] == "software"


@pytest.mark.parametrize("metric", ["hbm_ceiling_tokens_per_s", "compute_ceiling_tokens_per_s"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_no_point_beats_a_ceiling(system, metric):
    row = run(system=system)
    assert row["throughput_tokens_per_s"] <= row[metric]


@pytest.mark.parametrize(("key", "slow", "fast"), [("placement__host_numa", "far", "local")])
@pytest.mark.parametrize("system", ["retrieval", "prefetch-previous", "oasiskv"])
def test_a_better_link_is_never_slower(system, key, slow, fast):
    rows = [run(system=system, **{key: value, "policy__fetch_cap": 1.0}) for value in (slow, fast)]
    assert rows[1]["tpot_mean_s"] <= rows[0]["tpot_mean_s"] * (1 + 1e-9)


def test_replicas_share_links_and_scale_otherwise():
    one, eight = (run(placement__num_gpus=n, policy__fetch_cap=0.02) for n in (1, 8))
    assert 7.9 < eight["throughput_tokens_per_s"] / one["throughput_tokens_per_s"] < 8.1


def test_replicas_contend_for_a_narrow_inter_socket_link(tmp_path):
    profile = catalog.load_hardware("h100-sxm").model_dump(mode="json")
    profile["host"]["inter_socket_bytes_per_s"]["value"] = 40e9
    narrow = tmp_path / "narrow.yaml"
    narrow.write_text(json.dumps(profile))
    common = {
        "placement__host_numa": "far",
        "policy__fetch_cap": 1.0,
        "hardware": str(narrow),
        "workload__batch_size": 96,
    }
    alone, eight = (run(placement__num_gpus=n, **common) for n in (1, 8))
    # Four GPUs read each way: 40 / 4 GB/s each, of the 24.4 less launches that one draws alone.
    assert eight["tpot_mean_s"] / alone["tpot_mean_s"] == pytest.approx(24.1 / 10, rel=0.1)


def test_same_seed_same_row_and_another_seed_another():
    assert run() == run()
    assert run(seed=1)["tpot_mean_s"] != run()["tpot_mean_s"]
    assert point_key(synthetic_point(seed=1)) != point_key(synthetic_point())


def test_cached_row_equals_the_computed(tmp_path, monkeypatch):
    monkeypatch.setenv("OASIS_SIM_CACHE", str(tmp_path))
    first, second = run_point(synthetic_point()), run_point(synthetic_point())
    assert first == second
    assert any(tmp_path.rglob("*.json"))


def test_reference_recall_is_that_of_uncapped_retrieval():
    assert reference_recall(synthetic_point()) == pytest.approx(run(system="retrieval")["recall"], abs=1e-12)


def test_too_short_a_run_is_refused():
    with pytest.raises(InputError, match="output_tokens 3 leaves no step"):
        run(workload__output_tokens=3, policy__lookahead_k=4)


@pytest.mark.parametrize("model", ["gpt-oss-20b", "Qwen3-30B-A3B", "Mistral-7B-v0.3", "SmolLM2-1.7B"])
def test_windows_experts_and_mha_are_simulated(model):
    row = run(model=model, workload__batch_size=8)
    assert row["status"] == "ok"
    assert row["throughput_tokens_per_s"] > 0


def test_a_model_of_windows_only_has_nothing_to_select_in():
    assert run(model="Mistral-7B-v0.1", system="dense", workload__batch_size=8)["status"] == "ok"
    with pytest.raises(InputError, match="no full-attention layer"):
        run(model="Mistral-7B-v0.1")


def test_mla_is_dense_only():
    assert run(model="DeepSeek-V3", system="dense", workload__batch_size=1)["status"] == "does_not_fit"
    with pytest.raises(InputError, match="MLA"):
        run(model="DeepSeek-V3", system="oasiskv")


def test_timeline_records_cover_the_step_and_never_overlap_on_an_engine():
    records = timeline_records(synthetic_point(policy__fetch_cap=1.0), num_steps=3)
    assert {r.engine for r in records} >= {"compute", "side stream", "H2D", "D2H"}
    for engine in {r.engine for r in records}:
        spans = sorted((r.start_s, r.end_s) for r in records if r.engine == engine)
        assert all(end <= start + 1e-12 for (_, end), (start, _) in itertools.pairwise(spans))
    compute = [r for r in records if r.engine == "compute"]
    assert sum(r.end_s - r.start_s for r in compute) == pytest.approx(max(r.end_s for r in compute))
