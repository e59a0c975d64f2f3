"""Verified drafts: the view by iterations against plain Python, replay on it, and what speculation gains and costs."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import draft_heads, iterations_reference
from simulator.catalog import load_hardware, load_model
from simulator.cost import draft_rows, logit_rows
from simulator.experiment import expand
from simulator.iterations import IterationGroup, iterations
from simulator.mapping import Mapping
from simulator.points import run_point
from simulator.replay import integer_mass, replay
from simulator.residency_reference import Rules, replay_reference
from simulator.specs.policy import PolicySpec
from tests.simulator.synthetic_trace import GEOMETRY, open_as_any, synthetic_group
from traces.errors import InputError
from traces.mass import quantise_mass
from traces.memory import MemoryGroup, memory_group, memory_trace

BLOCK_SIZE, KEPT, RANKED = 4, 6, 10
ONE = Mapping("identity", np.zeros(1, np.int32), np.zeros(1, np.int32), "")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OASIS_SIM_CACHE", str(tmp_path / "cache"))


def small_group(seed: int, acceptance: float, num_steps: int = 40, distances: int = 3) -> MemoryGroup:
    rng = np.random.default_rng(seed)
    kv_len = 61 + np.arange(num_steps)
    num_blocks = -(-kv_len // BLOCK_SIZE)
    scores = rng.random((num_steps, 1, 1, int(num_blocks.max()))).cumsum(axis=0)

    def ranked(values: np.ndarray, known_at: int) -> np.ndarray:
        existing = num_blocks[np.maximum(np.arange(num_steps) - known_at, 0)] - 1
        hidden = np.arange(values.shape[-1]) >= existing[:, None, None, None]
        ids = np.argsort(np.where(hidden, np.inf, -values), axis=-1, kind="stable")[..., :RANKED].astype(np.int32)
        ids[:known_at] = -1
        return ids

    drafts = {f"draft{j}": ranked(scores + j * rng.random(scores.shape), j) for j in range(1, distances + 1)}
    mass = rng.random(scores.shape)
    return memory_group(
        kv_len,
        {BLOCK_SIZE: {"true": ranked(scores, 0)} | drafts},
        {BLOCK_SIZE: mass},
        accepted=[rng.random(num_steps) < acceptance for _ in range(distances)],
    )


@given(st.integers(0, 10**6), st.integers(1, 4), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_iterations_agree_with_plain_python(seed, num_drafts, acceptance):
    right = np.random.default_rng(seed).random((num_drafts, 30)) < acceptance
    starts, emitted = iterations(list(right), 30)
    assert list(zip(starts.tolist(), emitted.tolist(), strict=True)) == iterations_reference.iterations(
        right.tolist(), 30
    )
    assert np.array_equal(np.diff(starts), emitted[:-1]), "each iteration starts where the last one ended"
    assert emitted.min() >= 1
    assert emitted.max() <= 1 + num_drafts


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_view_agrees_with_plain_python(num_drafts):
    group = small_group(num_drafts, 0.5)
    view = IterationGroup(group, num_drafts)
    true, exact = (group.ranking(name, BLOCK_SIZE)[:, 0, 0].tolist() for name in ("true", "exact"))
    drafts = [group.ranking(f"draft{j}", BLOCK_SIZE)[:, 0, 0].tolist() for j in range(1, num_drafts + 1)]
    dense = group.mass(BLOCK_SIZE).dense()[:, 0, 0].astype(np.float64)
    got = {name: view.ranking(name, BLOCK_SIZE)[:, 0, 0].tolist() for name in ("true", "exact", "draft1")}
    levels = view.mass(BLOCK_SIZE).levels[:, 0, 0]
    found = iterations_reference.iterations([group.accepted(j).tolist() for j in range(1, num_drafts + 1)], 40)
    before = None
    for i, (start, emitted) in enumerate(found):
        selectable = (int(group.kv_len[start]) - 1) // BLOCK_SIZE
        rows = [drafts[j - 1][start + j] for j in range(1, num_drafts + 1)]
        expected = {
            "true": iterations_reference.union([true[start], *rows], selectable, RANKED),
            "exact": iterations_reference.union([exact[start], *rows], selectable, RANKED),
            "draft1": [] if before is None else iterations_reference.union(before, selectable, RANKED),
        }
        for name, ids in expected.items():
            assert [block for block in got[name][i] if block >= 0] == ids, (name, i)
        mean = iterations_reference.mean_mass(dense[start : start + emitted].tolist(), selectable)
        padded = np.pad(mean, (0, levels.shape[-1] - len(mean)))
        assert np.abs(quantise_mass(padded).astype(int) - levels[i]).max() <= 1, "a level may round either way"
        before = rows
    assert view.tokens_per_step.tolist() == [emitted for _, emitted in found]


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({"predictor": "draft"}, {"lookahead_k": 1}),
        ({"predictor": "draft", "fetch_cap": 0.4, "miss_rule": "stall"}, {"lookahead_k": 1, "stall": True}),
        ({"predictor": "current", "miss_rule": "stall"}, {}),
        ({"predictor": "previous"}, {"lookahead_k": 1}),
    ],
)
def test_replay_by_iterations_agrees_with_the_plain_rules(changes, rules):
    """The cap and K hold per iteration, over the union of what its rows need."""
    group = small_group(7, 0.5)
    policy = PolicySpec(
        kv_budget_tokens=KEPT * BLOCK_SIZE, block_size_tokens=BLOCK_SIZE, lookahead_k=2, verify_drafts=True, **changes
    )
    demand = replay(group, policy, ONE, per_head=True)
    view = IterationGroup(group, 2)
    ranking = {name: view.ranking(name, BLOCK_SIZE)[:, 0, 0].tolist() for name in ("true", "draft1")}
    mass = integer_mass()[view.mass(BLOCK_SIZE).levels[:, 0, 0]]
    shift = {"current": 0, "draft": 0, "previous": 1}[changes["predictor"]]
    name = "draft1" if changes["predictor"] == "draft" else "true"
    expected = replay_reference(
        Rules(KEPT, KEPT, fetch_cap=Fraction(str(changes.get("fetch_cap", 1))), **rules),
        (-(-view.kv_len // BLOCK_SIZE)).tolist(),
        lambda t, _: ranking["true"][t],
        lambda t, _: ranking[name][t - shift],
        lambda t, _: ranking[name][t],
        lambda t, _: mass[t].tolist(),
        1,
    )
    assert demand.per_head is not None
    for kind in ("hit", "missed", "fetched", "evicted", "runs", "repaired"):
        assert demand.per_head[kind][:, 0, 0].tolist() == [row[0][kind] for row in expected], kind
    assert demand.tokens_by_row().tolist() == view.tokens_per_step.tolist()


def trace_with(acceptance: float):
    group = synthetic_group("short", 2048)
    rows = [np.full(group.num_positions, acceptance == 1.0)] * 4
    fixed = MemoryGroup(
        "short", GEOMETRY, group.kv_len, group._layers, group._ranked, group._masses, {}, rows
    )  # fmt: skip
    return memory_trace([fixed], "synthetic")


def point(monkeypatch, acceptance: float, **changes):
    open_as_any(monkeypatch, trace_with(acceptance))
    base = {"trace": "synthetic", "workload.batch_size": 16, "workload.output_tokens": 64}
    (only,) = expand({**base, **{key.replace("__", "."): value for key, value in changes.items()}}, {})
    row = run_point(only, use_cache=False)
    assert row["status"] == "ok", row["error"]
    return row


@pytest.mark.parametrize("system", ["dense", "quest", "retrieval", "oasiskv"])
def test_drafts_that_are_never_right_only_cost(monkeypatch, system):
    plain = point(monkeypatch, 0.0, system=system)
    verified = point(monkeypatch, 0.0, system=system, policy__verify_drafts=True)
    assert verified["tokens_per_iteration"] == 1
    assert verified["tpot_mean_s"] > plain["tpot_mean_s"]
    assert verified["draft_overhead_s"] > 0


@pytest.mark.parametrize("system", ["dense", "quest", "oasiskv"])
def test_one_right_draft_a_step_doubles_the_tokens(monkeypatch, system):
    verified = point(monkeypatch, 1.0, system=system, policy__verify_drafts=True)
    assert verified["tokens_per_iteration"] == 2
    assert verified["tpot_mean_s"] == pytest.approx(verified["iteration_s"] / 2)
    assert verified["throughput_tokens_per_s"] == pytest.approx(16 * 2 / verified["iteration_s"], rel=1e-2)
    parts = [value for name, value in verified.items() if name.startswith("t_")]
    assert sum(parts) == pytest.approx(verified["tpot_mean_s"], rel=1e-9)


def test_free_drafts_halve_the_time_of_a_token(monkeypatch):
    """Dense, prompt lookup at no cost: rows beside the real one cost next to nothing while weights and KV bind."""
    monkeypatch.setattr(draft_heads, "NGRAM_LOOKUP_S", 0.0)
    plain = point(monkeypatch, 1.0, system="dense")
    verified = point(monkeypatch, 1.0, system="dense", policy__verify_drafts=True, policy__draft_head="ngram")
    assert verified["tpot_mean_s"] == pytest.approx(plain["tpot_mean_s"] / 2, rel=0.04)
    assert verified["draft_overhead_s"] < 0.04 * plain["tpot_mean_s"]


def test_more_right_drafts_gain_more_and_longer_chains_cost_more(monkeypatch):
    rows = {
        k: point(monkeypatch, 1.0, system="quest", policy__verify_drafts=True, policy__lookahead_k=k) for k in (1, 3)
    }
    assert rows[3]["tokens_per_iteration"] == 4
    assert rows[3]["throughput_tokens_per_s"] > rows[1]["throughput_tokens_per_s"]
    assert rows[3]["draft_overhead_s"] > rows[1]["draft_overhead_s"]


def test_what_the_trace_lacks_is_named():
    group = small_group(1, 0.5, distances=2)
    with pytest.raises(InputError, match="draft3/accepted"):
        IterationGroup(group, 3)
    silent = memory_group(group.kv_len, {BLOCK_SIZE: {"true": group.ranking("true", BLOCK_SIZE)}}, {})
    with pytest.raises(InputError, match="does for none"):
        IterationGroup(silent, 1)


def test_verified_drafts_with_plans_by_position_are_refused(monkeypatch):
    with pytest.raises(InputError, match=r"policy\.lookahead_mode"):
        point(monkeypatch, 1.0, policy__verify_drafts=True, policy__lookahead_k=2, policy__lookahead_mode="union")


H100, QWEN, DEEPSEEK = load_hardware("h100-sxm"), load_model("Qwen3-8B"), load_model("DeepSeek-V3")


def drafting(head: str, k: int = 1, **changes) -> PolicySpec:
    return PolicySpec(draft_head=head, lookahead_k=k, **changes)


def test_weights_of_each_head():
    h, vocab = QWEN.hidden, QWEN.vocab
    assert draft_heads.head_bytes(QWEN, drafting("medusa", 3)) == 2 * 3 * h * (h + vocab)
    layer = QWEN.qkv_bytes + QWEN.o_bytes + QWEN.ffn_bytes
    assert draft_heads.head_bytes(QWEN, drafting("mtp")) == 4 * h * h + layer
    assert draft_heads.head_bytes(DEEPSEEK, drafting("mtp")) > DEEPSEEK.moe_layer_bytes
    for head in ("ngram", "lookahead-ngram"):
        assert draft_heads.head_bytes(QWEN, drafting(head)) == 0
        assert draft_heads.kv_bytes(QWEN, drafting(head), 4096) == 0
    assert draft_heads.kv_bytes(QWEN, drafting("mtp"), 4096) == QWEN.kv_bytes(4096) // QWEN.num_layers
    assert draft_heads.kv_bytes(QWEN, drafting("medusa"), 4096) == 0
    assert draft_heads.head_bytes(QWEN, drafting("mtp", predictor="previous")) == 0, "nothing drafts"


def test_seconds_of_each_head():
    def seconds(head: str, k: int = 1) -> float:
        return draft_heads.draft_s(H100, QWEN, drafting(head, k), 16, 8192)

    assert seconds("lookahead-ngram") == 0
    assert seconds("ngram", 4) == draft_heads.NGRAM_LOOKUP_S
    for head in ("eagle3", "medusa", "mtp"):
        read = draft_heads.head_bytes(QWEN, drafting(head)) + 16 * draft_heads.kv_bytes(QWEN, drafting(head), 8192)
        read += QWEN.lm_head_bytes if head == "mtp" else 0  # the model's own
        read_s = read / H100.gpu.hbm_bytes_per_s.value
        assert read_s < seconds(head) < 1.5 * read_s, head
        assert seconds(head, 2) > seconds(head), head
    assert seconds("mtp") > seconds("eagle3"), "the whole vocabulary instead of 32,000 tokens"


def test_rows_of_each_head():
    assert draft_rows(drafting("eagle3", 3)) == 3
    assert draft_rows(drafting("lookahead-ngram", 3)) == 90
    assert draft_rows(drafting("eagle3", 3, predictor="previous")) == 0
    assert logit_rows(drafting("eagle3", 3)) == 1
    assert logit_rows(drafting("eagle3", 3, verify_drafts=True)) == 4
    assert logit_rows(drafting("lookahead-ngram", 3)) == 91
