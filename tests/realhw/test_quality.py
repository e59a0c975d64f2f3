"""Sparse against dense decode on a tiny random Llama."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from realhw.models import LoadedModel, geometry_of
from realhw.prompts import Prompt
from realhw.quality import QualityOptions, dense_run, measure_quality, policies_of
from realhw.quality_summary import METRICS, bootstrap_interval, summarise
from realhw.sparse_decode import rank_scores_on_device
from traces.codec import rank_scores
from traces.errors import InputError

CONTEXT, STEPS = 90, 8


class WordTokenizer:
    """One token per whitespace-separated number."""

    chat_template = None
    eos_token_id = 0

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.4,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    return LoadedModel(model, WordTokenizer(), geometry_of(model, "tiny"), "random")


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


def test_dense_row_equals_the_model_itself(loaded: LoadedModel, tmp_path: Path) -> None:
    """NLL of the dense row is that of transformers' own forward pass over the same tokens."""
    settings = options(block_sizes_tokens=(8,), predictors=("draft2",), budgets_tokens=(16,), fetch_caps=(1.0,))
    measure_quality(settings, tmp_path, loaded)
    steps = pq.read_table(tmp_path / "steps-p0.parquet").to_pylist()
    with torch.inference_mode():
        dense = dense_run(loaded, settings.prompts[0], settings)
        prompt = [int(word) for word in str(settings.prompts[0].text).split()]
        sequence = torch.tensor([prompt[:-1] + dense.tokens])
        log_p = loaded.model(sequence).logits[0].log_softmax(dim=-1)
    for row in steps:
        position = CONTEXT - 1 + row["step"]
        assert row["nll_dense"] == pytest.approx(-float(log_p[position, dense.tokens[row["step"] + 1]]), abs=1e-4)


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


def test_a_finished_prompt_is_not_repeated(loaded: LoadedModel, tmp_path: Path) -> None:
    settings = options(predictors=("previous",), block_sizes_tokens=(8,), steps=4)
    measure_quality(settings, tmp_path, loaded)
    before = (tmp_path / "steps-p0.parquet").stat().st_mtime_ns
    first = (tmp_path / "quality.parquet").read_bytes()
    measure_quality(settings, tmp_path, loaded)
    assert (tmp_path / "steps-p0.parquet").stat().st_mtime_ns == before
    assert (tmp_path / "quality.parquet").read_bytes() == first


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
    draws = np.array([[0, 0], [1, 1]])
    assert bootstrap_interval(sums, counts, METRICS["kl"], draws) == pytest.approx((1.0, 0.1, 3.9))


def test_exact_match_only_where_dense_is_good_enough() -> None:
    def table(found: list[bool], agrees: list[bool]) -> dict[str, Any]:
        count = len(found)
        columns: dict[str, Any] = {name: [0.5] * count for name in ("kl", "nll", "nll_dense", "recall", "hit_rate")}
        columns |= {"predictor": ["previous"] * count, "policy.fetch_cap": [1.0] * count, "h2d_bytes": [64] * count}
        columns |= {name: [16] * count for name in ("policy.kv_budget_tokens", "policy.block_size_tokens")}
        columns |= {"policy.lookahead_k": [1] * count, "prompt": [f"p{i}" for i in range(count)], "agrees": agrees}
        row: dict[str, Any] = summarise(pa.table(columns | {"dense_found_answer": found}), 20, 0, 0.3).to_pylist()[0]
        return row

    good = table([True, True, False, False], [True, False, True, True])
    assert (good["exact_match_dense"], good["exact_match"]) == (0.5, 0.25)
    poor = table([True, False, False, False], [True, True, True, True])
    assert (poor["exact_match_dense"], poor["exact_match"]) == (0.25, None)
