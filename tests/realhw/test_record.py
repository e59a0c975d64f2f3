"""The recorder on tiny random models, against plain eager attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from realhw.hook import AttentionTap, RecordError
from realhw.models import LoadedModel, cache_keyword
from realhw.prompts import Prompt
from realhw.record import record
from tests.realhw.tiny_llama import (
    GROUP,
    NUM_HEADS,
    NUM_LAYERS,
    check_ranking,
    eager_rows,
    options,
    quest_scores,
)
from traces.check import check_trace
from traces.codec import rank_scores
from traces.errors import InputError
from traces.reader import FileGroup, open_trace

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def recorded(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(options(), tmp_path_factory.mktemp("recorded") / "tiny.zarr", loaded)


def test_recording_equals_eager_attention(loaded: LoadedModel, recorded: Path) -> None:
    group = open_trace(recorded).group("request")
    assert isinstance(group, FileGroup)
    prompt = [int(word) for word in str(options().prompts[0].text).split()]
    decoded = [int(token) for token in group.array("tokens")]
    sequence = prompt[:-1] + decoded
    assert decoded[0] == prompt[-1]
    assert group.kv_len.tolist() == list(range(45, 45 + 70))
    queries, keys, weights = eager_rows(loaded, sequence)
    for t in (0, 1, 37, 64, 69):
        position = int(group.kv_len[t]) - 1
        for size in (4, 8, 16):
            mass, num_blocks = group.mass(size).dense()[t], -(-(position + 1) // size)
            for index, layer in enumerate(group.layers(size)):
                row = weights[layer][0, :, position, : position + 1].view(NUM_HEADS, GROUP, -1).mean(dim=1)
                expected = np.add.reduceat(row.numpy(), np.arange(0, position + 1, size), axis=-1)
                np.testing.assert_allclose(mass[index, :, :num_blocks], expected, rtol=0.1, atol=1e-4)
                scores = quest_scores(queries[layer][:, position], keys[layer][:, : position + 1], size, num_blocks - 1)
                check_ranking(group.ranking("true", size)[t, index], scores)
                inside = np.take_along_axis(expected, np.maximum(group.ranking("true", size)[t, index], 0), axis=-1)
                inside = np.where(group.ranking("true", size)[t, index] >= 0, inside, 0)
                np.testing.assert_allclose(group.rest(size)[t, index], 1 - inside.sum(axis=-1), atol=1e-5)


def test_draft_rows_are_the_guess_run_after_the_real_prefix(loaded: LoadedModel, recorded: Path) -> None:
    group = open_trace(recorded).group("request")
    assert isinstance(group, FileGroup)
    prompt = [int(word) for word in str(options().prompts[0].text).split()]
    sequence = prompt[:-1] + [int(token) for token in group.array("tokens")]
    guesses = {j: group.array(f"draft{j}/token") for j in (1, 2, 3)}
    checked = 0
    for t in range(1, 60, 7):
        issued = [int(guesses[j][t + j]) for j in (1, 2, 3)]
        if min(issued) < 0:
            continue
        kv_len = int(group.kv_len[t])
        queries, keys, _ = eager_rows(loaded, sequence[:kv_len] + issued)
        for j in (1, 2, 3):
            num_blocks = -(-kv_len // 8) - 1
            for layer in range(NUM_LAYERS):
                scores = quest_scores(queries[layer][:, kv_len - 1 + j], keys[layer][:, :kv_len], 8, num_blocks)
                check_ranking(group.ranking(f"draft{j}", 8)[t + j, layer], scores)
                checked += 1
    assert checked >= 9


def test_right_guesses_give_the_true_ranking_of_the_blocks_that_existed(recorded: Path) -> None:
    group = open_trace(recorded).group("request")
    assert isinstance(group, FileGroup)
    accepted = np.flatnonzero(group.array("draft1/accepted"))
    same = [t for t in accepted if t >= 1 and (group.kv_len[t] - 1) // 8 == (group.kv_len[t - 1] - 1) // 8]
    assert same
    true, draft = group.ranking("true", 8), group.ranking("draft1", 8)
    overlap = np.mean([len(np.intersect1d(true[t, 1, 0], draft[t, 1, 0])) / 8 for t in same])
    assert overlap > 0.98


def test_recorded_trace_passes_the_check_and_states_acceptance(recorded: Path) -> None:
    report = check_trace(recorded)
    assert report["groups"]["request"]["num_positions"] == 70
    group = open_trace(recorded).group("request")
    assert isinstance(group, FileGroup)
    drafter = group.attributes.drafter
    assert drafter is not None
    assert drafter.acceptance is not None
    assert drafter.acceptance[0] == pytest.approx(group.array("draft1/accepted")[1:].mean(), abs=1e-6)


def test_no_guess_falls_back_to_the_previous_ranking(loaded: LoadedModel, tmp_path: Path) -> None:
    path = record(options(min_ngram_tokens=3, steps=12), tmp_path / "t.zarr", loaded)
    group = open_trace(path).group("request")
    assert isinstance(group, FileGroup)
    missing = np.flatnonzero(group.array("draft1/token")[1:] == -1) + 1
    assert missing.size
    for t in missing:
        np.testing.assert_array_equal(group.ranking("draft1", 8)[t], group.ranking("true", 8)[t - 1])
    assert group.attributes.drafter is not None
    assert group.attributes.drafter.fallback_share is not None
    assert group.attributes.drafter.fallback_share[0] == pytest.approx(missing.size / 11, abs=1e-6)


def test_same_seed_same_trace(loaded: LoadedModel, tmp_path: Path) -> None:
    seeds = {"first": 0, "again": 0, "other": 1}
    hashes = {
        name: open_trace(record(options(steps=10, seed=seed), tmp_path / name, loaded)).content_hash
        for name, seed in seeds.items()
    }
    assert hashes["first"] == hashes["again"] != hashes["other"]


def test_interrupted_recording_is_a_shorter_trace(loaded: LoadedModel, recorded: Path, tmp_path: Path) -> None:
    def kill(what: str, done: int, total: int) -> None:
        if done == 66:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(options(), tmp_path / "t.zarr", loaded, kill)
    assert check_trace(tmp_path / "t.zarr")["groups"]["request"]["num_positions"] == 66
    short, full = open_trace(tmp_path / "t.zarr").group("request"), open_trace(recorded).group("request")
    for name in ("true", "draft2"):
        np.testing.assert_array_equal(short.ranking(name, 8), full.ranking(name, 8)[:66])


def test_unseen_layers_are_named(loaded: LoadedModel) -> None:
    tap = AttentionTap(5, {8: (0,)})
    with torch.inference_mode(), tap.installed(loaded.model):
        cached = {cache_keyword(loaded.model): DynamicCache()}
        loaded.model(torch.arange(19)[None] % 20, **cached)
        tap.begin(20, 1)
        loaded.model(torch.tensor([[3]]), **cached)
        with pytest.raises(RecordError, match=r"2 of 5 layers was not seen \(layers 3-4\)"):
            tap.finish()
    assert loaded.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_tokens": 100}, "fewer than the context"),
        ({"steps": 250}, "the model has 256"),
        ({"block_sizes_tokens": (24,)}, "not a multiple of block size 24"),
        ({"extra_layers": (0, 7)}, "layer 7"),
        ({"extra_block_sizes_tokens": (8,)}, "both"),
        ({"prompts": (Prompt(text="3"),)}, "at least 2"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    loaded: LoadedModel, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        record(options(**changes), tmp_path / "t.zarr", loaded)
    assert not (tmp_path / "t.zarr").exists()


def test_rank_scores_is_the_definition_of_rank() -> None:
    scores = np.array([0.0, 1.0, 1.01, 0.5, -3.0])
    ids, levels = rank_scores(scores, 3, 16)
    assert ids.tolist() == [1, 2, 3]
    assert levels.tolist() == [8, 8, 0]
