"""Sparse against dense decode on a tiny random Llama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from realhw import quality
from realhw.dense_decode import dense_run
from realhw.eagle3 import Eagle3Config, Eagle3Head
from realhw.eagle3_drafter import Eagle3Drafter, captured
from realhw.lockstep_drafter import LockstepEagle3
from realhw.models import LoadedModel, geometry_of
from realhw.prompts import Prompt
from realhw.quality import measure_quality
from realhw.quality_decode import holds_answer
from realhw.quality_options import QualityOptions, policies_of
from realhw.quality_summary import KEYS, METRICS, bootstrap_intervals, summarise
from realhw.sparse_decode import rank_scores_on_device
from tests.realhw.tiny_llama import loaded_model
from tests.realhw.word_tokenizers import NumberTokenizer
from traces.codec import rank_scores
from traces.errors import InputError

CONTEXT, STEPS = 90, 8


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loaded_model(vocab_size=24, initializer_range=0.4)


def options(**changes: Any) -> QualityOptions:
    rng = np.random.default_rng(1)
    prompts = tuple(
        Prompt(name=f"p{i}", text=" ".join(str(t) for t in rng.integers(0, 24, size=CONTEXT))) for i in range(2)
    )
    values: dict[str, Any] = {
        "model": "tiny",
        "prompts": prompts,
        "steps": STEPS,
        "budgets_tokens": (16, 48),
        "block_sizes_tokens": (4, 8),
        "fetch_caps": (0.1, 1.0),
        "predictors": ("current", "previous", "draft1", "draft2", "oracle", "random"),
        "threads": 1,
        "bootstrap_samples": 50,
    }
    return QualityOptions.model_validate(values | changes)


@pytest.fixture(scope="module")
def rows(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return pq.read_table(measure_quality(options(), tmp_path_factory.mktemp("quality"), loaded)).to_pylist()


def pick(rows: list[dict[str, Any]], **values: Any) -> list[dict[str, Any]]:
    names = {"budget": "policy.kv_budget_tokens", "block": "policy.block_size_tokens", "cap": "policy.fetch_cap"}
    return [row for row in rows if all(row[names.get(k, k)] == v for k, v in values.items())]


def mean(rows: list[dict[str, Any]], metric: str) -> float:
    return float(np.mean([row[metric] for row in rows]))


def test_budget_of_the_whole_context_is_dense(loaded: LoadedModel, tmp_path: Path) -> None:
    settings = options(budgets_tokens=(128,), block_sizes_tokens=(8,), fetch_caps=(1.0,))
    for row in pq.read_table(measure_quality(settings, tmp_path, loaded)).to_pylist():
        assert abs(row["kl"]) < 1e-5
        assert row["agreement"] == 1
        assert row["recall"] == pytest.approx(1, abs=1e-5)
        assert row["hit_rate"] == 1
        assert row["h2d_bytes_per_token"] == 0
        assert row["perplexity_ratio"] == pytest.approx(1, abs=1e-4)


def dense_nll(loaded: LoadedModel, settings: QualityOptions, index: int) -> float:
    """Mean NLL of dense decode's tokens by transformers' own forward pass."""
    with torch.inference_mode():
        prompt = [int(word) for word in str(settings.prompts[index].text).split()]
        dense = dense_run(loaded, [prompt], settings, STEPS, 0)
        sequence = torch.cat([torch.tensor([prompt[:-1]]), dense.tokens], dim=1)
        log_p = loaded.model(sequence).logits[0].log_softmax(dim=-1)
    positions = torch.arange(CONTEXT, CONTEXT + STEPS)
    return -float(log_p[positions, sequence[0, positions + 1]].mean())


def test_dense_row_equals_the_model_itself(loaded: LoadedModel, tmp_path: Path) -> None:
    settings = options(block_sizes_tokens=(8,), predictors=("draft2",), budgets_tokens=(16,), fetch_caps=(1.0,))
    measure_quality(settings, tmp_path, loaded)
    for index, row in enumerate(pq.read_table(tmp_path / "prompts.parquet").to_pylist()):
        assert row["nll_dense"] == pytest.approx(dense_nll(loaded, settings, index), abs=1e-4)
        assert row["dense_agrees"] == 1


def test_layers_with_a_sliding_window_keep_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=256,
        initializer_range=0.4,
        attn_implementation="sdpa",
    )
    model = Gemma3ForCausalLM(config).eval()
    gemma = LoadedModel(model, NumberTokenizer(), geometry_of(model, "tiny"), "random")
    settings = options(block_sizes_tokens=(8,), predictors=("draft2",), budgets_tokens=(16, 128), fetch_caps=(1.0,))
    measure_quality(settings, tmp_path, gemma)
    for row in pq.read_table(tmp_path / "prompts.parquet").to_pylist():
        index = int(row["prompt"][1])
        assert row["nll_dense"] == pytest.approx(dense_nll(gemma, settings, index), abs=1e-4)
        whole = row["policy.kv_budget_tokens"] == 128
        assert (abs(row["kl"]) < 1e-5) == whole
        assert (row["recall"] == pytest.approx(1, abs=1e-5)) == whole


def test_prompts_side_by_side_are_as_each_alone(
    loaded: LoadedModel, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    alone = pq.read_table(measure_quality(options(prompts_per_batch=1), tmp_path, loaded)).to_pylist()
    assert len(alone) == len(rows)
    for row in rows:
        other = next(r for r in alone if all(r[key] == row[key] for key in KEYS))
        assert {k: v for k, v in other.items() if isinstance(v, float)} == pytest.approx(
            {k: v for k, v in row.items() if isinstance(v, float)}, rel=1e-5, abs=1e-5
        )


def test_less_budget_loses_more(rows: list[dict[str, Any]]) -> None:
    small, large = pick(rows, budget=16), pick(rows, budget=48)
    assert mean(small, "kl") > mean(large, "kl") > 0
    assert mean(small, "recall") < mean(large, "recall") < 1
    assert mean(small, "agreement") <= mean(large, "agreement")


def test_cap_moves_fewer_bytes(rows: list[dict[str, Any]]) -> None:
    capped, free = pick(rows, cap=0.1, predictor="random"), pick(rows, cap=1.0, predictor="random")
    assert 0 < mean(capped, "h2d_bytes_per_token") < 0.3 * mean(free, "h2d_bytes_per_token")


def test_on_demand_attends_to_all_it_selects(rows: list[dict[str, Any]]) -> None:
    """Recall on demand is the selector's own: no predictor without a cap exceeds it by more than stray blocks."""
    assert len(pick(rows, predictor="current")) == 4
    for block in (4, 8):
        for budget in (16, 48):
            current = pick(rows, predictor="current", block=block, budget=budget)[0]
            guess = pick(rows, predictor="random", block=block, budget=budget, cap=1.0)[0]
            assert current["recall"] > guess["recall"]
    guesses = pick(rows, predictor="random", cap=1.0)
    assert mean(pick(rows, predictor="current"), "kl") < mean(guesses, "kl")


def test_a_right_draft_finds_more_than_a_random_ranking(rows: list[dict[str, Any]]) -> None:
    for budget in (16, 48):
        oracle = pick(rows, predictor="oracle", budget=budget, cap=1.0)
        chance = pick(rows, predictor="random", budget=budget, cap=1.0)
        assert mean(oracle, "hit_rate") > mean(chance, "hit_rate") + 0.1


def test_what_the_deadline_left_is_done_by_repeating(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = options(predictors=("previous",), steps=4, prompts_per_batch=1)
    whole = measure_quality(settings, tmp_path / "whole", loaded).read_bytes()
    ticks = iter(range(1000))
    with monkeypatch.context() as patched:
        patched.setattr(quality.time, "perf_counter", lambda: float(next(ticks)))
        with pytest.raises(InputError, match=r"deadline_s: 0\.5 s ended before"):
            measure_quality(settings.model_copy(update={"deadline_s": 0.5}), tmp_path / "parts", loaded)
        path = measure_quality(settings.model_copy(update={"deadline_s": 6.0}), tmp_path / "parts", loaded)
    done = pq.read_table(tmp_path / "parts" / "prompts.parquet").num_rows
    assert 0 < done < 4 * 4
    assert not json.loads((tmp_path / "parts" / "manifest.json").read_text())["complete"]
    assert measure_quality(settings, tmp_path / "parts", loaded).read_bytes() == whole
    assert path.read_bytes() == whole
    before = (tmp_path / "parts" / "prompts.parquet").stat().st_mtime_ns
    measure_quality(settings, tmp_path / "parts", loaded)
    assert (tmp_path / "parts" / "prompts.parquet").stat().st_mtime_ns == before
    with pytest.raises(InputError, match="holds results of another steps"):
        measure_quality(settings.model_copy(update={"steps": 3}), tmp_path / "parts", loaded)


def test_a_run_that_measured_nothing_binds_no_options(loaded: LoadedModel, tmp_path: Path) -> None:
    settings = options(predictors=("previous",), steps=4)
    with pytest.raises(InputError, match="ended before anything"):
        measure_quality(settings.model_copy(update={"deadline_s": 1e-9, "steps": 3}), tmp_path, loaded)
    measure_quality(settings, tmp_path, loaded)
    (tmp_path / "options.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"options\.json: which options .* cannot be read"):
        measure_quality(settings, tmp_path, loaded)


def test_results_that_are_not_as_written(loaded: LoadedModel, tmp_path: Path) -> None:
    settings = options(predictors=("previous",), steps=4)
    measure_quality(settings, tmp_path, loaded)
    content = (tmp_path / "prompts.parquet").read_bytes()
    (tmp_path / "prompts.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=r"prompts\.parquet: is not as it was written .*; remove it to measure again"):
        measure_quality(settings, tmp_path, loaded)


def test_what_is_not_finite_is_no_result(tmp_path: Path) -> None:
    broken = loaded_model(vocab_size=24, initializer_range=0.5)
    with torch.no_grad():
        broken.model.model.layers[1].self_attn.q_proj.weight.fill_(torch.nan)
    with pytest.raises(InputError, match="is not finite; nothing of it is kept"):
        measure_quality(options(predictors=("previous",)), tmp_path, broken)
    assert not (tmp_path / "prompts.parquet").exists()


@pytest.mark.parametrize("name", ["draft0", "draft²", "draft", "previous-layer", "eagle3", ""])
def test_predictors_that_are_none(name: str) -> None:
    with pytest.raises(InputError, match=r"predictors: .* is none of current, previous, oracle, random, draft1"):
        policies_of(options(predictors=(name,)), 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_model": "x"}, "draft_model 'x' is of drafter model or eagle3"),
        ({"drafter": "model"}, "drafter model needs draft_model"),
        ({"drafter": "random", "predictors": ("previous", "oracle")}, "drafter random has nothing to guess"),
    ],
)
def test_a_drafter_that_nothing_looks_at(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options(**changes)


def test_policies_decode_on_their_own_where_dense_finds_the_answers(loaded: LoadedModel, tmp_path: Path) -> None:
    """The answer is what dense decode says; a budget of the whole context says it, a random working set does not."""
    base = options()
    prompts = []
    for prompt, task in zip(base.prompts, ("easy", "hard"), strict=True):
        with torch.inference_mode():
            ids = [int(word) for word in str(prompt.text).split()]
            said = dense_run(loaded, [ids], base, 6, 0).tokens[0, 1:7].tolist()
        assert 0 not in said
        answer = " ".join(map(str, said if task == "easy" else [23] * 6))
        prompts.append(prompt.model_copy(update={"answer": answer, "task": task, "answer_tokens": 6}))
    settings = base.model_copy(
        update={"prompts": tuple(prompts), "block_sizes_tokens": (8,), "budgets_tokens": (8, 128), "fetch_caps": (1.0,)}
    )
    rows = pq.read_table(measure_quality(settings, tmp_path, loaded)).to_pylist()
    assert {row["task"] for row in rows} == {"all", "easy", "hard"}
    for row in rows:
        if row["task"] != "easy" or row["predictor"] == "oracle":
            assert row["exact_match"] is None
        elif row["policy.kv_budget_tokens"] == 128:
            assert (row["exact_match"], row["num_answers"]) == (1, 1)
        elif row["predictor"] == "random":
            assert row["exact_match"] == 0
    assert {row["exact_match_dense"] for row in rows if row["task"] == "hard"} == {0}


def test_an_answer_is_no_part_of_a_number() -> None:
    said = [5, 41, 7, 0, 9]
    assert holds_answer(NumberTokenizer(), said, "41 7")
    assert not holds_answer(NumberTokenizer(), said, "41 7 0")
    assert not holds_answer(NumberTokenizer(), said, "1 7")
    assert not holds_answer(NumberTokenizer(), said, "4")
    assert not holds_answer(NumberTokenizer(), said, "9")


def test_lockstep_head_guesses_as_each_alone(loaded: LoadedModel) -> None:
    torch.manual_seed(1)
    head = Eagle3Head(
        Eagle3Config(
            hidden_size=32,
            target_hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=48,
            vocab_size=24,
            feature_layers=(0, 1, 2),
        )
    ).eval()
    rng = np.random.default_rng(0)
    sequences = rng.integers(0, 24, size=(2, 20))
    with torch.inference_mode():
        lockstep = LockstepEagle3(loaded, head)
        ids = torch.tensor(sequences)
        with captured(loaded.model, (0, 1, 2)) as passes:
            loaded.model(ids)
        together = []
        for first, last in ((0, 12), (12, 13), (13, 16)):
            following = ids[:, first + 1 : last + 1]
            together.append(
                lockstep.expanded(2).guess(
                    passes[0][:, first:last].repeat_interleave(2, 0), following.repeat_interleave(2, 0), 3
                )[::2]
            )
            assert torch.equal(lockstep.guess(passes[0][:, first:last], following, 3), together[-1])
        for row, sequence in enumerate(sequences.tolist()):
            alone = Eagle3Drafter(loaded.model, head, "head")
            loaded.model(ids[row : row + 1])
            every = alone._passes[0]
            for index, (first, last) in enumerate(((0, 12), (12, 13), (13, 16))):
                alone._passes[:] = [every[:, first:last]]
                assert alone.guess(sequence[: last + 1], 3) == together[index][row].tolist()
            alone.close()


def test_ranking_on_the_device_equals_the_codec() -> None:
    rng = np.random.default_rng(2)
    scores = (rng.integers(-400, 400, size=(3, 5, 40)) / 32).astype(np.float32)
    for keep in (7, 40, 50):
        expected, _ = rank_scores(scores, keep, 16)
        np.testing.assert_array_equal(rank_scores_on_device(torch.from_numpy(scores), keep, 16).numpy(), expected)


def test_grid_has_no_duplicates_and_refuses_odd_budgets() -> None:
    assert len(policies_of(options(), 8)) == 2 + 5 * 2 * 2
    with pytest.raises(InputError, match="20 is no multiple of block size 8"):
        policies_of(options(budgets_tokens=(20,)), 8)


def test_interval_by_hand() -> None:
    """Two prompts with 1 and 3 steps: the mean weighs steps, resamples weigh prompts."""
    sums, counts = {"kl": np.array([4.0, 0.0])}, np.array([1.0, 3.0])
    found = bootstrap_intervals(sums, counts, {"kl": METRICS["kl"]}, np.array([[2.0, 0.0], [0.0, 2.0]]))
    assert found == pytest.approx({"kl": 1.0, "kl_low": 0.1, "kl_high": 3.9})


def test_exact_match_only_where_dense_is_good_enough() -> None:
    policy = {"predictor": "previous", "policy.fetch_cap": 1.0, "policy.kv_budget_tokens": 16}
    policy |= {"policy.block_size_tokens": 16, "policy.lookahead_k": 1}

    def row(dense: list[bool], own: list[bool]) -> dict[str, Any]:
        means = dict.fromkeys(("kl", "nll", "nll_dense", "agrees", "recall", "hit_rate", "h2d_bytes"), 0.5)
        prompts = [policy | means | {"prompt": f"p{i}", "task": "all", "num_steps": 2} for i in range(len(own))]
        named = [{"prompt": f"p{i}", "task": "all"} for i in range(len(own))]
        answers = [
            dict.fromkeys(policy) | {"predictor": "dense"} | n | {"found": f} for n, f in zip(named, dense, strict=True)
        ]
        answers += [policy | n | {"found": f} for n, f in zip(named, own, strict=True)]
        table = summarise(pa.Table.from_pylist(prompts), pa.Table.from_pylist(answers), 20, 0, 0.3)
        only: dict[str, Any] = table.to_pylist()[0]
        return only

    good = row([True, True, False, False], [True, False, False, False])
    assert (good["exact_match_dense"], good["exact_match"], good["num_answers"]) == (0.5, 0.25, 4)
    assert good["exact_match_low"] < 0.25 < good["exact_match_high"]
    poor = row([True, False, False, False], [True, True, True, True])
    assert (poor["exact_match_dense"], poor["exact_match"]) == (0.25, None)
