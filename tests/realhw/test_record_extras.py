"""What a recording holds on request, against attention written out: mean keys, the layer before, query similarity,
the prompt's mass; fewer layers and heads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from realhw.models import LoadedModel, geometry_of
from realhw.record import record
from tests.realhw.tiny_llama import (
    GROUP,
    HEAD_DIM,
    NUM_HEADS,
    NUM_LAYERS,
    check_ranking,
    eager_rows,
    options,
    quest_scores,
    rotated_query,
)
from traces.check import check_trace
from traces.errors import InputError
from traces.reader import FileGroup, open_trace

EXTRAS = ("mean", "prev_layer", "query_cos", "prefill_mass", "prompt_window_mass")
WINDOW = 12


@pytest.fixture(scope="module")
def recorded(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> FileGroup:
    path = tmp_path_factory.mktemp("extras") / "t.zarr"
    record(options(extras=EXTRAS, prompt_window_tokens=WINDOW, steps=20), path, loaded)
    check_trace(path)
    group = open_trace(path).group("request")
    assert isinstance(group, FileGroup)
    return group


@pytest.fixture(scope="module")
def eager(loaded: LoadedModel, recorded: FileGroup) -> Any:
    prompt = [int(word) for word in str(options().prompts[0].text).split()]
    return eager_rows(loaded, prompt[:-1] + recorded.array("tokens").tolist())


def test_the_rest_of_the_trace_does_not_change(loaded: LoadedModel, recorded: FileGroup, tmp_path: Path) -> None:
    plain = open_trace(record(options(steps=20), tmp_path / "t.zarr", loaded)).group("request")
    for size in plain.block_sizes:
        for name in plain.rankings(size):
            np.testing.assert_array_equal(plain.ranking(name, size), recorded.ranking(name, size))
        np.testing.assert_array_equal(plain.mass(size).levels, recorded.mass(size).levels)


@pytest.mark.parametrize("size", [4, 8])
def test_mean_keys_rank_blocks(recorded: FileGroup, eager: Any, size: int) -> None:
    queries, keys, _ = eager
    for t in (0, 7, 19):
        position = int(recorded.kv_len[t]) - 1
        blocks = -(-(position + 1) // size) - 1
        for index, layer in enumerate(recorded.layers(size)):
            scores = np.empty((NUM_HEADS, blocks))
            for head in range(NUM_HEADS):
                means = keys[layer][head, : blocks * size].view(blocks, size, -1).mean(dim=1)
                logits = queries[layer][head * GROUP : (head + 1) * GROUP, position] @ means.T
                scores[head] = logits.max(dim=0).values.numpy() * HEAD_DIM**-0.5 / math.log(2)
            check_ranking(recorded.ranking("mean", size)[t, index], scores)


def test_the_layer_before_gives_the_query(loaded: LoadedModel, recorded: FileGroup, eager: Any) -> None:
    _, keys, _ = eager
    prompt = [int(word) for word in str(options().prompts[0].text).split()]
    sequence = prompt[:-1] + recorded.array("tokens").tolist()
    assert recorded.layers(8) == tuple(range(NUM_LAYERS))
    assert (recorded.ranking("prev_layer", 8)[:, 0] == -1).all()
    differs = False
    for layer in range(1, NUM_LAYERS):
        queries = rotated_query(loaded, sequence, layer, layer - 1)
        for t in (0, 7, 19):
            position = int(recorded.kv_len[t]) - 1
            blocks = -(-(position + 1) // 8) - 1
            scores = quest_scores(queries[:, position], keys[layer][:, : position + 1], 8, blocks)
            check_ranking(recorded.ranking("prev_layer", 8)[t, layer], scores)
            differs |= bool((recorded.ranking("prev_layer", 8) != recorded.ranking("true", 8))[t, layer].any())
    assert differs


def test_query_similarity_from_the_last_token_of_the_prompt_on(recorded: FileGroup, eager: Any) -> None:
    queries, _, _ = eager
    found = recorded.query_cos(8)
    assert found is not None
    for t in (0, 1, 19):
        position = int(recorded.kv_len[t]) - 1
        for layer in range(NUM_LAYERS):
            pair = queries[layer][:, position - 1], queries[layer][:, position]
            expected = torch.cosine_similarity(*pair, dim=-1).view(NUM_HEADS, GROUP).mean(dim=1)
            np.testing.assert_allclose(found[t, layer], expected.numpy(), atol=1e-4)


@pytest.mark.parametrize(("name", "first"), [("prefill_mass", 0), ("prompt_window_mass", 44 - WINDOW)])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_mass_of_the_prompt(recorded: FileGroup, eager: Any, name: str, first: int, size: int) -> None:
    _, _, weights = eager
    found = getattr(recorded, name)(size)
    for index, layer in enumerate(recorded.layers(size)):
        rows = weights[layer][0, :, first:44, :44].mean(dim=1).view(NUM_HEADS, GROUP, -1).mean(dim=1).numpy()
        expected = np.add.reduceat(rows, np.arange(0, 44, size), axis=-1)
        np.testing.assert_allclose(found[index, :, : expected.shape[-1]], expected, rtol=0.1, atol=2e-3)


def test_slabs_of_the_prompt_add_up(
    loaded: LoadedModel, recorded: FileGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realhw.prompt_mass._SLAB_BYTES", 4 * NUM_HEADS * GROUP * 44 * 3)
    values = options(extras=EXTRAS, prompt_window_tokens=WINDOW, steps=1, prefill_chunk_tokens=44)
    one_chunk = open_trace(record(values, tmp_path / "t.zarr", loaded)).group("request")
    for name in ("prefill_mass", "prompt_window_mass"):
        np.testing.assert_allclose(getattr(one_chunk, name)(8), getattr(recorded, name)(8), rtol=0.1)


def test_layers_and_heads_can_be_chosen(loaded: LoadedModel, recorded: FileGroup, tmp_path: Path) -> None:
    few = options(extras=EXTRAS, prompt_window_tokens=WINDOW, steps=20, layers=(1,), extra_layers=(2,), kv_heads=(1,))
    path = record(few, tmp_path / "t.zarr", loaded)
    check_trace(path)
    group = open_trace(path).group("request")
    assert (group.layers(8), group.layers(4), group.num_kv_heads, group.model.num_kv_heads) == ((1,), (2,), 1, 2)
    for size, layer in ((8, 1), (4, 2)):
        row = recorded.layers(size).index(layer)
        for name in group.rankings(size):
            np.testing.assert_array_equal(group.ranking(name, size), recorded.ranking(name, size)[:, row : row + 1, 1:])
        np.testing.assert_array_equal(group.query_cos(size), recorded.query_cos(size)[:, row : row + 1, 1:])
        np.testing.assert_array_equal(group.prefill_mass(size), recorded.prefill_mass(size)[row : row + 1, 1:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (0, 3)}, "layers: layer 3 is not a full-attention layer of tiny; those are 0, 1, 2"),
        ({"layers": ()}, "layers: names no layer"),
        ({"kv_heads": (0, 2)}, "kv_heads: 2; the model has 0 to 1"),
        ({"block_sizes_tokens": (), "extra_block_sizes_tokens": ()}, "both empty"),
    ],
)
def test_what_is_not_there_is_refused(
    loaded: LoadedModel, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        record(options(**changes), tmp_path / "t.zarr", loaded)
    assert not (tmp_path / "t.zarr").exists()


def test_previous_layer_needs_a_known_architecture(loaded: LoadedModel, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=256, **ends)
    model = GPT2LMHeadModel(config).eval()
    other = LoadedModel(model, loaded.tokenizer, geometry_of(model, "tiny-gpt2"), "random")
    with pytest.raises(InputError, match=r"prev_layer: GPT2LMHeadModel has no model\.layers"):
        record(options(extras=("prev_layer",), extra_layers=(0,)), tmp_path / "t.zarr", other)
    assert not (tmp_path / "t.zarr").exists()
    path = record(options(extra_layers=(0,), steps=3), tmp_path / "u.zarr", other)
    assert check_trace(path)["model"]["num_kv_heads"] == 2
