"""The published table: its data, closed forms, evaluation, sensitivity and solving."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.catalog import load_hardware, load_model
from simulator.fetch_cap import allowed_blocks, exact_share
from simulator.policy_composition import resolve_policy
from simulator.replay_settings import blocks_per_step
from simulator.reproduce import sources
from simulator.reproduce.closed_forms import Setting, full_over_admission
from simulator.reproduce.evaluate import Evaluation
from simulator.reproduce.report import decode_step_rows, predicted_met, reproduce, row_document
from simulator.reproduce.sensitivity import effects, solve
from simulator.reproduce.table import Experiment, Recipe, Row, published
from simulator.residency import Residency
from simulator.specs.policy import PolicySpec
from simulator.specs.validation import validated
from traces.errors import InputError
from traces.group import TraceGroup
from traces.memory import memory_group
from traces.reader import open_trace


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OASIS_SIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def experiment(name: str) -> Experiment:
    return next(one for one in published() if one.name == name)


ADMISSION = "disaggregated-admission"
CLOSED = {
    "name": "x",
    "title": "x",
    "source": "x",
    "settings": {"model": "Qwen3-8B", "system": "oasiskv", "policy.kv_budget_tokens": 2048},
    "inputs": {"context": {"key": "workload.context_tokens", "value": 32768, "origin": "assumed", "reason": "x"}},
    "points": {"p": {}},
    "rows": [
        {
            "setting": "ratio",
            "published": 9.0,
            "unit": "times",
            "simulated": {"point": "p", "closed_form": "full_over_admission"},
        }
    ],
}


def closed(**row: object) -> Experiment:
    return validated(Experiment, {**CLOSED, "rows": [{**CLOSED["rows"][0], **row}]})


def test_admission_is_working_set_compressed_keys_and_draft_kv():
    """Qwen3-8B at 32K by hand: 4.5 GiB over 129 blocks (290.25 MiB), 1/16 of the KV (288 MiB), 1/36 (128 MiB)."""
    policy = resolve_policy("oasiskv", {"kv_budget_tokens": 2048}, 32768)
    by_hand = 4.5 * 1024 / (290.25 + 288 + 128)
    setting = Setting(load_model("Qwen3-8B"), policy, 32768)
    assert full_over_admission(setting) == pytest.approx(by_hand, rel=1e-12)


def test_a_context_within_the_budget_is_admitted_whole():
    policy = resolve_policy("oasiskv", {"kv_budget_tokens": 2048}, 1024)
    setting = Setting(load_model("Qwen3-8B"), policy, 1024)
    assert full_over_admission(setting) == pytest.approx(1 / (1 + 1 / 16 + 1 / 36))


def test_published_admission_range_is_predicted_within_ten_percent():
    result = reproduce(experiment(ADMISSION), {})
    ratios = [row for row in result.rows if row.row.setting.startswith("full KV")]
    assert [row.status for row in ratios] == ["met", "met"]
    assert all(abs(row.error or 1) < 0.1 for row in ratios)


def blocks_held(group: TraceGroup, policy: PolicySpec) -> float:
    """Mean over heads of the blocks that the decode side holds after the trace's last step, one by one.

    What admission and prefetches (one draft token, capped) brought, and what decode wrote; nothing is dropped.
    """
    assert policy.kv_budget_tokens is not None
    size = policy.block_size_tokens
    num_kept = policy.kv_budget_tokens // size
    num_blocks = blocks_per_step(group, size).astype(int).tolist()
    true, draft = group.ranking("true", size), group.ranking("draft1", size)
    allowed = allowed_blocks(exact_share(policy.fetch_cap), num_kept, len(num_blocks)).tolist()
    written = num_blocks[-1] - num_blocks[0]
    held = []
    for layer in range(true.shape[1]):
        for head in range(true.shape[2]):
            residency = Residency(1, num_kept, num_kept + (policy.slack_blocks or 0), num_blocks[-1])
            residency.admit(true[0, layer, head][None], num_blocks[0])
            brought = set(true[0, layer, head, :num_kept].tolist())
            for step in range(len(num_blocks) - 1):
                if step:
                    residency.begin(num_blocks[step])
                room = num_blocks[step + 1] - num_blocks[step]
                (plan,), _ = residency.plan(draft[step + 1, layer, head][None], step + 1, allowed[step], room)
                brought.update(plan.fetch_ids.tolist())
            held.append(sum(0 <= block < num_blocks[0] for block in brought) + written)
    return float(np.mean(held))


def test_blocks_held_are_those_that_were_sent_and_written():
    """Two heads of eight blocks of which two are kept: counted by hand."""
    num_steps, size = 5, 16
    kv_len = 8 * size + 1 + np.arange(num_steps)  # 9 blocks, the last one open
    true = np.zeros((num_steps, 1, 2, 2), np.int32)
    true[..., 0], true[..., 1] = 0, 1
    draft = true.copy()
    draft[2, 0, 0] = [0, 5]  # head 0 is sent block 5, then 6
    draft[3, 0, 0] = [0, 6]
    mass = np.ones((num_steps, 1, 2, 9))
    group = memory_group(kv_len, {size: {"true": true, "draft1": draft}}, {size: mass})
    policy = resolve_policy("oasiskv", {"kv_budget_tokens": 2 * size, "fetch_cap": 1.0}, 129)
    assert blocks_held(group, policy) == (4 + 2) / 2  # head 0: blocks 0, 1, 5, 6; head 1: 0, 1; no block filled


def test_decode_side_of_a_serving_run_holds_what_was_sent_and_what_it_wrote():
    one, context, steps = experiment("disaggregated-host-memory"), 8192, 300
    evaluation = Evaluation(one, {"context": context, "output tokens": steps})
    pulled, pushed = (evaluation.point(name) for name in ("pulled", "pushed"))
    assert one.recipe is not None
    recipe = one.recipe.model_copy(update={"steps": steps})
    trace = open_trace(str(sources.recipe_trace(recipe, 0.196, "Qwen3-8B", context)))
    policy = resolve_policy("oasiskv", {"kv_budget_tokens": 2048, "fetch_cap": 0.05}, context)
    block_bytes = load_model("Qwen3-8B").block_bytes(16) * 36 * 8
    held = blocks_held(trace.group(trace.group_names[0]), policy)
    assert pulled["host_bytes_per_request_peak"] == pytest.approx(block_bytes * held, rel=0.02)
    assert pushed["host_bytes_per_request_peak"] == block_bytes * -(-(context + steps - 1) // 16)


def test_a_served_point_is_the_setting_of_a_closed_one():
    one = experiment("disaggregated-throughput")
    few = {"requests": 20, "output tokens": 64, "prefill replicas": 4}
    here = Evaluation(one, few)
    dense, pulled = (here.point(name) for name in ("dense shorter", "pulled shorter"))
    assert dense["serving.prompt_tokens"] == pulled["serving.prompt_tokens"] == 32_768
    assert dense["serving.output_tokens"] == 64
    assert dense["serving.max_num_seqs"] == pulled["serving.max_num_seqs"] == here.largest_batch("dense shorter") == 12
    elsewhere = Evaluation(one, few, {
        "workload.context_tokens": 16_384, "workload.batch_size": 5, "serving.prefill_replicas": 2,
    })  # fmt: skip
    names = ("dense shorter", "pulled longer")
    assert [elsewhere.point(name)["serving.max_num_seqs"] for name in names] == [5, 5]
    assert elsewhere.point("dense shorter")["serving.prompt_tokens"] == 16_384
    assert elsewhere.point("dense shorter")["serving.prefill_replicas"] == 2


def test_headline_rows_with_what_was_derived_from_which():
    one = experiment("aime24-one-h100")
    assert one.recipe is not None
    # All layers and heads of the recipe are alike: fewer of them, for time.
    one = one.model_copy(update={"recipe": one.recipe.model_copy(update={"layers": (8,), "kv_heads": 4})})
    evaluation = Evaluation(one)
    by_setting = {row.setting: row for row in one.rows}
    errors = {}
    for setting in ("dense vLLM", "OasisKV, fetch ratio 0.05", "OasisKV, nearly uncapped"):
        value = evaluation.value(by_setting[setting])
        assert value is not None
        errors[setting] = value / by_setting[setting].published - 1
    assert abs(errors["dense vLLM"]) < 0.02, "the context no longer is what the row gives: reproduce --derive"
    assert abs(errors["OasisKV, nearly uncapped"]) < 0.02, "the churn no longer is what the row gives"
    assert abs(errors["OasisKV, fetch ratio 0.05"]) < 0.10
    assert by_setting["dense vLLM"].fitted
    assert not by_setting["OasisKV, fetch ratio 0.05"].fitted
    rows = {name: evaluation.point(name) for name in ("dense", "capped", "uncapped")}
    assert len({row["workload.batch_size"] for row in rows.values()}) == 1
    assert rows["dense"]["max_batch_size"] == rows["dense"]["workload.batch_size"]
    working_set = load_model("Qwen3-8B").working_set_bytes(128, 16)
    for name in ("capped", "uncapped"):
        moved = rows[name]["h2d_bytes_per_token"]
        assert moved == pytest.approx(rows[name]["churn"] * working_set, rel=0.05), "the bytes are the churn's"
        assert moved * rows[name]["throughput_tokens_per_s"] < 51e9, "no faster than the link"
    assert rows["capped"]["churn"] == pytest.approx(0.05, rel=0.01), "every head is at its cap"


def test_a_figure_is_predicted_only_where_no_input_was_derived_from_it():
    for one in published():
        derived = {row.derives for row in one.rows if row.derives}
        assert derived == {name for name, given in one.inputs.items() if given.origin == "derived"}
        assert one.num_free_inputs == sum(given.origin in ("assumed", "derived") for given in one.inputs.values())


def test_solve_finds_the_input_that_makes_a_row_true():
    one = closed(published=9.0, solve="context")
    found = solve(one, one.rows[0], "context")
    assert found is not None
    assert Evaluation(one, {"context": int(found)}).value(one.rows[0]) == pytest.approx(9.0, rel=0.005)


def test_solve_says_when_no_value_will_do():
    one = closed(published=12.0, solve="context")  # above 1 / (1/16 + 1/36) = 11.08, whatever the context
    assert solve(one, one.rows[0], "context") is None


def test_a_missed_row_names_what_it_would_need():
    one = closed(published=9.0, solve="context")
    (need,) = reproduce(one, {}).needs
    assert (need.setting, need.input) == ("ratio", "context")
    assert need.value == pytest.approx(94_000, rel=0.05)


def test_effects_are_relative_changes_and_refused_values_say_why():
    one = closed()
    base = {"ratio": Evaluation(one).value(one.rows[0])}
    less, more = effects(one, base, {})
    assert (less.value, more.value) == (24576, 40960)
    assert less.change < 0 < more.change
    assert more.simulated == pytest.approx(base["ratio"] * (1 + more.change))
    budget = {"key": "policy.kv_budget_tokens", "value": 2048, "origin": "assumed", "reason": "x", "vary": [2049]}
    odd = validated(Experiment, {**CLOSED, "inputs": {**CLOSED["inputs"], "budget": budget}})
    refused = list(effects(odd, base, {}))[-1]
    assert (refused.simulated, refused.change) == (None, None)
    assert "2049" in str(refused.problem)


def test_nothing_is_relative_to_zero():
    one = experiment("aime24-one-h100")
    evaluation = Evaluation(one)
    row = next(row for row in one.rows if row.simulated is not None and row.simulated.relative_to is not None)
    evaluation._rows.update({name: {row.simulated.column: 0.0} for name in one.points})
    with pytest.raises(InputError, match="is 0, so nothing is relative to it"):
        evaluation.value(row)


def test_another_setting_has_no_published_figure():
    result = reproduce(experiment(ADMISSION), {"workload.context_tokens": 65536})
    document = row_document(result.experiment, result.rows[0])
    assert {"setting", "published", "simulated", "error", "fitted"} <= set(document)
    assert document["published"] is None
    assert document["error"] is None
    assert document["simulated"] == result.rows[1].simulated, "both points are at the same context now"
    assert predicted_met(result.rows) == (0, 0)


def test_measured_decode_steps_are_rows_too():
    rows = decode_step_rows()
    assert len(rows) == 12
    assert sum(row["status"] == "met" for row in rows) >= 11
    for row in rows:
        assert row["error"] == pytest.approx(row["simulated"] / row["published"] - 1)


def test_profile_with_replaces_one_figure():
    path = sources.profile_with("h100-sxm", {"link.gather_bytes_per_s": 5.1e10})
    changed, shipped = load_hardware(path), load_hardware("h100-sxm")
    assert changed.link.gather_bytes_per_s.value == 5.1e10
    assert changed.link.gather_bytes_per_s.assumption
    assert changed.link.h2d_bytes_per_s == shipped.link.h2d_bytes_per_s
    assert changed.gpu == shipped.gpu
    assert sources.profile_with("h100-sxm", {}) == "h100-sxm"
    with pytest.raises(InputError, match=r"link\.gather_bytes_per_s"):
        sources.profile_with("h100-sxm", {"link.gather_byte_per_s": 1.0})


def test_recipe_trace_is_made_once_and_differs_by_what_decides_it(monkeypatch):
    made = []

    def make(statistics, geometry, context_tokens, num_steps, seed, out, *, layers):
        out.mkdir()
        made.append((statistics.assumptions[0], geometry.num_kv_heads, context_tokens, num_steps, layers))
        return out

    monkeypatch.setattr(sources.synthesis, "synthesise", make)
    recipe = Recipe(name="qwen3-8b-published", layers=(0, 40), steps=8, kv_heads=2)
    first = sources.recipe_trace(recipe, 0.2, "Qwen3-8B", 4096)
    assert sources.recipe_trace(recipe, 0.2, "Qwen3-8B", 4096) == first
    assert len(made) == 1
    assert made[0][1:] == (2, 4096, 8, [0, 4]), "layers modulo the model's 36"
    others = [
        sources.recipe_trace(recipe, 0.3, "Qwen3-8B", 4096),
        sources.recipe_trace(recipe, 0.2, "Qwen3-8B", 8192),
        sources.recipe_trace(recipe, 0.2, "Llama-3.1-70B", 4096),
        sources.recipe_trace(recipe.model_copy(update={"steps": 9}), 0.2, "Qwen3-8B", 4096),
    ]
    assert len({first, *others}) == 5
    assert "churn 0.3" in made[1][0]
    with pytest.raises(InputError, match="MLA"):
        sources.recipe_trace(recipe, 0.2, "DeepSeek-V3", 4096)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"simulated": None}, "either simulated or not_simulated"),
        ({"not_simulated": "no text"}, "either simulated or not_simulated"),
        ({"simulated": {"point": "q", "closed_form": "full_over_admission"}}, "unknown point 'q'"),
        ({"simulated": {"point": "p"}}, "either column or closed_form"),
        ({"derives": "context"}, "origin must be derived"),
        ({"solve": "churn"}, "unknown input 'churn'"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        closed(**change)


def test_row_is_fitted_by_derivation_or_construction():
    plain = {"setting": "s", "published": 1.0, "unit": "u", "simulated": {"point": "p", "column": "recall"}}
    assert not validated(Row, plain).fitted
    assert validated(Row, {**plain, "derives": "churn"}).fitted
    assert validated(Row, {**plain, "made_from": "the trace"}).fitted
