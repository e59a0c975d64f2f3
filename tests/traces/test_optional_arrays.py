"""What a group may record besides rankings and mass: other rankings, query similarity, masses of the prompt, drafts as
sets; and what a trace says that lacks them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.traces.tiny import CONTEXT_TOKENS, group_attributes, pooled, record_of, trace_attributes, truth_of
from traces.check import check_trace
from traces.codec import rank_scores, rank_set
from traces.errors import InputError, TraceError
from traces.mass import quantise_mass
from traces.memory import memory_group
from traces.reader import FileGroup, open_trace
from traces.schema import BlockSizeAttributes, GroupAttributes, draft_distance, masked_rows
from traces.writer import TraceWriter

NAMES = ("true", "draft1", "draft2", "mean", "prev_layer")
BLOCKS = {
    4: BlockSizeAttributes(layers=(1, 2), max_ranked_blocks=12, rankings=NAMES),
    8: BlockSizeAttributes(layers=(2,), max_ranked_blocks=6, rankings=NAMES[:4], block_mass=False),
}
STEPS = 70
EXTRAS = {"query_cos": True, "prefill_mass": True, "prompt_window_tokens": 16}


def cosines(t: int) -> np.ndarray:
    return np.random.default_rng(t).uniform(-1, 1, (2, 2)).astype(np.float32)


def prompt_mass(name: str) -> np.ndarray:
    """Of tokens, [2 layers, 2 heads, context − 1]."""
    return np.random.default_rng(len(name)).dirichlet(np.full(CONTEXT_TOKENS - 1, 0.2), size=(2, 2))


def levels_of(name: str) -> np.ndarray:
    return quantise_mass(pooled(prompt_mass(name), 4))


def write(folder: Path, blocks: dict[int, BlockSizeAttributes] = BLOCKS, **changes: Any) -> Path:
    attributes = GroupAttributes.model_validate(group_attributes(STEPS, blocks).model_dump() | EXTRAS | changes)
    with TraceWriter(folder, trace_attributes()) as writer:
        group = writer.group("reasoning", attributes)
        if attributes.prefill_mass:
            group.write_prompt({(4, name): levels_of(name) for name in ("prefill_mass", "prompt_window_mass")})
        for t, truth in enumerate(truth_of(STEPS, blocks)):
            step = record_of(truth, blocks)
            step.query_cos = cosines(t)
            group.append(step)
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("optional") / "t.zarr")


def test_check_passes_and_rankings_are_listed(recorded: Path) -> None:
    assert check_trace(recorded)["groups"]["reasoning"]["prompt_window_tokens"] == 16
    assert open_trace(recorded).group("reasoning").rankings(4) == (*NAMES, "exact")


@pytest.mark.parametrize("name", ["mean", "prev_layer"])
def test_rankings_read_back(recorded: Path, name: str) -> None:
    group = open_trace(recorded).group("reasoning")
    for t, truth in enumerate(truth_of(STEPS, BLOCKS)):
        expected, _ = rank_scores(truth["scores"][4, name], 12, 16)
        np.testing.assert_array_equal(group.ranking(name, 4)[t], expected)


def test_query_cos_has_the_layers_of_the_block_size(recorded: Path) -> None:
    group = open_trace(recorded).group("reasoning")
    expected = np.stack([cosines(t) for t in range(STEPS)])
    found = group.query_cos(4)
    assert found is not None
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(group.query_cos(8), expected[:, 1:])


@pytest.mark.parametrize("name", ["prefill_mass", "prompt_window_mass"])
def test_masses_of_the_prompt_read_back_and_pool(recorded: Path, name: str) -> None:
    group = open_trace(recorded).group("reasoning")
    for size, layers in ((4, [0, 1]), (8, [1])):
        found = getattr(group, name)(size)
        expected = pooled(prompt_mass(name), size)[layers]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found.sum(axis=-1), 1, atol=1e-5)
        np.testing.assert_allclose(found, expected, rtol=0.2, atol=1e-3)


def test_traces_without_them_say_so(trace_folder: Path) -> None:
    group = open_trace(trace_folder).group("reasoning")
    for name in ("query_cos", "prefill_mass", "prompt_window_mass"):
        assert getattr(group, name)(4) is None
        with pytest.raises(TraceError, match="block size 32 is not recorded"):
            getattr(group, name)(32)
    with pytest.raises(TraceError, match="p4/mean: is not recorded; there are true"):
        group.ranking("mean", 4)


def test_each_of_them_enters_the_hash(recorded: Path, tmp_path: Path) -> None:
    hashes = {open_trace(recorded).content_hash}
    for number, change in enumerate(({"query_cos": False}, {"prefill_mass": False, "prompt_window_tokens": None})):
        hashes.add(open_trace(write(tmp_path / str(number), **change)).content_hash)
    assert len(hashes) == 3


def test_writer_wants_what_the_attributes_promise(tmp_path: Path) -> None:
    attributes = group_attributes(STEPS, BLOCKS).model_copy(update=EXTRAS)
    group = TraceWriter(tmp_path / "t.zarr", trace_attributes()).group("reasoning", attributes)
    step = record_of(next(truth_of(1, BLOCKS)), BLOCKS)
    with pytest.raises(InputError, match="before the first step"):
        group.append(step)
    with pytest.raises(InputError, match="lacks p4/prompt_window_mass"):
        group.write_prompt({(4, "prefill_mass"): levels_of("prefill_mass")})
    group.write_prompt({(4, name): levels_of(name) for name in ("prefill_mass", "prompt_window_mass")})
    group.append(step)
    with pytest.raises(InputError, match="a step lacks query_cos"):
        group.flush()


def test_faults_in_them_are_named(recorded: Path, tmp_path: Path) -> None:
    import zarr

    folder = write(tmp_path / "t.zarr")
    arrays = zarr.open_group(folder, mode="r+")
    arrays["reasoning/query_cos"][3, 1, 0] = np.nan
    with pytest.raises(TraceError, match=r"reasoning/query_cos\[3, 1, 0\]: is not a cosine"):
        check_trace(folder)
    arrays["reasoning/p4/prefill_mass"][0, 1, 0] = 0
    with pytest.raises(TraceError, match=r"p4/prefill_mass\[0, 1, 0\]: a row's largest level is not 255"):
        check_trace(folder)


def test_previous_layer_of_the_first_layer_must_be_empty(tmp_path: Path) -> None:
    blocks = {4: BlockSizeAttributes(layers=(0, 2), max_ranked_blocks=12, rankings=NAMES)}
    with pytest.raises(TraceError, match=r"p4/prev_layer\[0, 0, 0, 0\]: layer 0 has no layer before it"):
        check_trace(write(tmp_path / "t.zarr", blocks))


def test_drafts_as_nested_sets_keep_them_and_take_the_order_inside_from_true(tmp_path: Path) -> None:
    blocks = {4: BLOCKS[4].model_copy(update={"draft_sets": (3, 7)})}
    folder, whole = write(tmp_path / "t.zarr", blocks), write(tmp_path / "full.zarr", {4: BLOCKS[4]})
    check_trace(folder)
    sets, full = open_trace(folder).group("reasoning"), open_trace(whole).group("reasoning")
    assert isinstance(sets, FileGroup)
    true = full.ranking("true", 4)
    np.testing.assert_array_equal(sets.ranking("true", 4), true)
    for name in ("draft1", "draft2"):
        j = draft_distance(name)
        accepted = sets.array(f"{name}/accepted").astype(bool)
        assert accepted.any() == (j == 1)
        kept = sets.ranking(name, 4)
        for count in (3, 7, 12):
            np.testing.assert_array_equal(np.sort(kept[..., :count]), np.sort(full.ranking(name, 4)[..., :count]))
        for t in range(j, STEPS):
            reference = true[t] if accepted[t] else true[t - j]
            for at in np.ndindex(2, 2):
                order = reference[at].tolist()
                for tier in (slice(0, 3), slice(3, 7), slice(7, 12)):
                    inside = kept[t][at].tolist()[tier]
                    expected = sorted(inside, key=lambda b, o=order: (o.index(b) if b in o else len(o), b))
                    assert inside == expected


def test_rank_set_orders_by_tier_then_by_the_reference_then_by_id() -> None:
    ids = np.array([[1, 4, 6, 9, -1]], np.int32)
    reference, one_tier = np.array([[6, 2, 1, -1, -1]], np.int32), np.zeros((1, 5), np.int64)
    assert rank_set(ids, reference, one_tier).tolist() == [[6, 1, 4, 9, -1]]
    assert rank_set(ids, reference, np.array([[1, 1, 1, 0, 1]])).tolist() == [[9, 6, 1, 4, -1]]
    assert rank_set(ids, np.full((1, 5), -1, np.int32), one_tier).tolist() == [[1, 4, 6, 9, -1]]


def test_names_of_rankings() -> None:
    assert [masked_rows(n) for n in ("true", "draft3", "draft3_sparse", "mean", "prev_layer", "draft_truth")] == [
        0, 3, 3, 0, 0, 0,
    ]  # fmt: skip
    assert [draft_distance(n) for n in ("draft3", "draft3_sparse", "true")] == [3, 0, 0]


def test_sparse_drafts_need_their_policy() -> None:
    blocks = {4: BlockSizeAttributes(layers=(1,), max_ranked_blocks=12, rankings=("true", "draft1_sparse"))}
    with pytest.raises(ValueError, match="'draft1_sparse' is not one of"):
        group_attributes(STEPS, blocks)
    values = {**group_attributes(STEPS, BLOCKS).model_dump(), "blocks": blocks, "sparse_policy": {"fetch_cap": 0.05}}
    assert GroupAttributes.model_validate(values).sparse_policy == {"fetch_cap": 0.05}


def test_memory_groups_hold_them_as_a_file_would() -> None:
    true = np.zeros((5, 1, 2, 3), np.int32) + np.arange(3, dtype=np.int32)
    mass = np.random.default_rng(0).dirichlet(np.ones(5), size=(1, 2))
    group = memory_group(
        np.arange(20, 25),
        {4: {"true": true, "mean": true[..., ::-1], "prev_layer": true}},
        query_cos={4: np.full((5, 1, 2), 0.5)},
        prefill_mass={4: mass},
        prompt_window_mass={4: mass},
    )
    np.testing.assert_array_equal(group.ranking("mean", 4), true[..., ::-1])
    np.testing.assert_array_equal(group.query_cos(4), np.full((5, 1, 2), 0.5, np.float32))
    np.testing.assert_allclose(group.prefill_mass(4), mass, rtol=0.1)
    bare = memory_group(np.arange(20, 25), {4: {"true": true}})
    assert bare.query_cos(4) is None
    assert bare.prompt_window_mass(4) is None
    assert (
        bare.content_hash
        != memory_group(np.arange(20, 25), {4: {"true": true}}, query_cos={4: np.zeros((5, 1, 2))}).content_hash
    )
    with pytest.raises(TraceError, match=r"p4/prefill_mass: shape is \(1, 2, 4\), expected \(1, 2, 5\)"):
        memory_group(np.arange(20, 25), {4: {"true": true}}, prefill_mass={4: mass[..., :4]})
