"""Drafts over a policy's working set: equal to a pass written out over the set that replay keeps; refused elsewhere."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from realhw.models import LoadedModel
from realhw.record import record
from simulator.mapping import Mapping
from simulator.replay import replay
from simulator.residency import Residency
from simulator.specs.policy import PolicySpec
from tests.realhw.tiny_llama import (
    GROUP,
    HEAD_DIM,
    NUM_HEADS,
    NUM_LAYERS,
    check_ranking,
    eager_rows,
    options,
    quest_scores,
    rotated,
)  # fmt: skip
from traces.check import check_trace
from traces.errors import InputError
from traces.reader import FileGroup, open_trace

POLICY = PolicySpec(kv_budget_tokens=24, block_size_tokens=8, fetch_cap=0.7, residency="slack", lookahead_k=2)
KEPT, STEPS = 3, 30


@pytest.fixture(scope="module")
def recorded(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> FileGroup:
    path = tmp_path_factory.mktemp("sparse") / "t.zarr"
    record(options(sparse_policy=POLICY, steps=STEPS, drafter="random"), path, loaded)
    check_trace(path)
    group = open_trace(path).group("request")
    assert isinstance(group, FileGroup)
    return group


def sequence_of(group: FileGroup) -> list[int]:
    prompt = [int(word) for word in str(options().prompts[0].text).split()]
    return prompt[:-1] + group.array("tokens").tolist()


def attended_sets(group: FileGroup) -> list[list[list[np.ndarray]]]:
    """Blocks that attention reads, by step, layer and head, of a Residency driven by the recorded drafts."""
    blocks = [-(-int(length) // 8) for length in group.kv_len]
    slots = KEPT + math.ceil(2 * 0.7 * KEPT - 1e-9)
    states = [Residency(1, KEPT, slots, blocks[-1] + 1) for _ in range(NUM_LAYERS * NUM_HEADS)]
    true, drafts = group.ranking("true", 8), group.ranking("draft2_sparse", 8)
    out: list[list[list[np.ndarray]]] = []
    for t in range(STEPS):
        allowed = math.floor((t + 1) * 2.1 + 1e-9) - math.floor(t * 2.1 + 1e-9)
        step = []
        for unit, state in enumerate(states):
            layer, head = divmod(unit, NUM_HEADS)
            if t == 0:
                state.admit(true[0, layer, head][None], blocks[0])
            else:
                state.begin(blocks[t])
            step.append(np.append(state.attended()[0], blocks[t] - 1))
            if t + 2 < STEPS:
                state.plan(drafts[t + 2, layer, head][None], t + 2, allowed, room=blocks[t + 2] - blocks[t])
        out.append([step[layer * NUM_HEADS : (layer + 1) * NUM_HEADS] for layer in range(NUM_LAYERS)])
    return out


def sparse_queries(
    loaded: LoadedModel, keys: Any, values: Any, tokens: list[int], kv_len: int, attended: list[list[np.ndarray]] | None
) -> list[torch.Tensor]:
    """Queries [Hq, R, D] per layer of rows kv_len − 1 … over dense keys before them, each head over its blocks."""
    model = loaded.model.model
    first = kv_len - 1
    with torch.inference_mode():
        hidden = model.embed_tokens(torch.tensor([tokens[first:]]))
        rows = hidden.shape[1]
        queries = []
        for layer, module in enumerate(model.layers):
            query, key, value = rotated(loaded.model, layer, hidden, first)
            queries.append(query)
            out = torch.empty(NUM_HEADS * GROUP, rows, HEAD_DIM, dtype=torch.double)
            for head in range(NUM_HEADS):
                seen = (
                    np.arange(first)
                    if attended is None
                    else np.arange(first)[np.isin(np.arange(first) // 8, attended[layer][head])]
                )
                all_keys = torch.cat([keys[layer][head, seen], key[head]])
                all_values = torch.cat([values[layer][head, seen], value[head]])
                for row in range(rows):
                    upto = len(seen) + row + 1
                    for q in range(head * GROUP, (head + 1) * GROUP):
                        weights = (all_keys[:upto] @ query[q, row] * HEAD_DIM**-0.5).softmax(dim=0)
                        out[q, row] = weights @ all_values[:upto]
            mixed = out.transpose(0, 1).reshape(1, rows, -1).to(hidden.dtype)
            hidden = hidden + module.self_attn.o_proj(mixed)
            hidden = hidden + module.mlp(module.post_attention_layernorm(hidden))
    return queries


def test_drafts_are_those_of_a_pass_over_the_set_that_replay_keeps(loaded: LoadedModel, recorded: FileGroup) -> None:
    sequence = sequence_of(recorded)
    _, keys, _ = eager_rows(loaded, sequence)
    with torch.inference_mode():
        states = loaded.model(torch.tensor([sequence]), output_hidden_states=True).hidden_states
        values = [rotated(loaded.model, layer, states[layer], 0)[2] for layer in range(NUM_LAYERS)]
    attended = attended_sets(recorded)
    differs = 0
    for t in (0, 5, 17, 26):
        kv_len = int(recorded.kv_len[t])
        guesses = [int(recorded.array(f"draft{j}/token")[t + j]) for j in (1, 2, 3)]
        queries = sparse_queries(loaded, keys, values, sequence[:kv_len] + guesses, kv_len, attended[t] if t else None)
        for j in (1, 2, 3):
            found = recorded.ranking(f"draft{j}_sparse", 8)[t + j]
            for layer in range(NUM_LAYERS):
                scores = quest_scores(queries[layer][:, j], keys[layer][:, :kv_len], 8, -(-kv_len // 8) - 1)
                check_ranking(found[layer], scores)
            differs += int((found != recorded.ranking(f"draft{j}", 8)[t + j]).sum())
    assert differs > 20


def test_dense_rows_do_not_change(loaded: LoadedModel, recorded: FileGroup, tmp_path: Path) -> None:
    plain = open_trace(record(options(steps=STEPS, drafter="random"), tmp_path / "t.zarr", loaded)).group("request")
    for name in plain.rankings(8):
        np.testing.assert_array_equal(plain.ranking(name, 8), recorded.ranking(name, 8))


def test_a_budget_of_everything_gives_the_dense_drafts(loaded: LoadedModel, tmp_path: Path) -> None:
    policy = POLICY.model_copy(update={"kv_budget_tokens": 160, "fetch_cap": 1.0})
    path = record(options(sparse_policy=policy, steps=10, max_budget_tokens=160), tmp_path / "t.zarr", loaded)
    group = open_trace(path).group("request")
    for j in (1, 2, 3):
        same = group.ranking(f"draft{j}_sparse", 8) == group.ranking(f"draft{j}", 8)
        assert same.mean() > 0.99


def test_only_the_recorded_policy_replays_them(recorded: FileGroup) -> None:
    mapping = Mapping("rows", np.arange(NUM_LAYERS, dtype=np.int32), np.arange(NUM_HEADS, dtype=np.int32), "")
    own = POLICY.model_copy(update={"draft_pass": "sparse"})
    sparse, dense = (replay(recorded, policy, mapping, use_cache=False) for policy in (own, POLICY))
    assert (sparse.overlap != dense.overlap).any()
    for key, value in (("fetch_cap", 0.5), ("kv_budget_tokens", 32), ("lookahead_k", 1), ("eviction", "lowest-score")):
        with pytest.raises(InputError, match=f"recorded under policy.{key} .*, not {value!r}"):
            replay(recorded, own.model_copy(update={key: value}), mapping, use_cache=False)


def test_a_trace_without_them_says_how_to_record_them(loaded: LoadedModel, tmp_path: Path) -> None:
    group = open_trace(record(options(steps=9), tmp_path / "t.zarr", loaded)).group("request")
    mapping = Mapping("rows", np.arange(NUM_LAYERS, dtype=np.int32), np.arange(NUM_HEADS, dtype=np.int32), "")
    with pytest.raises(InputError, match="no drafts over a working set; oasis-sim record --sparse-policy"):
        replay(group, POLICY.model_copy(update={"draft_pass": "sparse"}), mapping, use_cache=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"predictor": "previous"}, "sparse_policy.predictor 'previous': drafts are recorded under 'draft' only"),
        ({"miss_rule": "stall"}, "sparse_policy.miss_rule 'stall'"),
        ({"residency": "everything"}, "sparse_policy.residency 'everything'"),
        ({"kv_budget_tokens": 20}, "sparse_policy.kv_budget_tokens 20 is no positive multiple of block size 8"),
        ({"kv_budget_tokens": None}, "sparse_policy.kv_budget_tokens None"),
        ({"block_size_tokens": 12}, "sparse_policy.block_size_tokens 12 is not recorded; there are 4, 8, 16"),
        ({"lookahead_k": 4}, "sparse_policy.lookahead_k 4 needs draft_distances of as many, got 3"),
        ({"fetch_cap_scope": "layer"}, "sparse_policy.fetch_cap_scope"),
    ],
)
def test_policies_that_cannot_be_followed_are_refused(
    loaded: LoadedModel, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        record(options(sparse_policy=POLICY.model_copy(update=changes)), tmp_path / "t.zarr", loaded)
    assert not (tmp_path / "t.zarr").exists()
