"""What is written is what is read: folder, zip, URL, in memory; killed and short recordings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

from tests.traces.tiny import (
    BLOCKS,
    CONTEXT_TOKENS,
    group_attributes,
    pooled,
    record_of,
    trace_attributes,
    truth_of,
)
from traces.check import check_trace
from traces.codec import rank_levels, rank_scores
from traces.errors import InputError, TraceError
from traces.mass import quantise_mass
from traces.pack import pack
from traces.reader import FileGroup, TraceGroup, open_trace
from traces.schema import BlockSizeAttributes
from traces.writer import TraceWriter


def assert_equal_groups(left: TraceGroup, right: TraceGroup, steps: int | None = None) -> None:
    assert left.block_sizes == right.block_sizes
    np.testing.assert_array_equal(left.kv_len, right.kv_len[:steps])
    for size in left.block_sizes:
        assert left.layers(size) == right.layers(size)
        assert left.rankings(size) == right.rankings(size)
        for name in left.rankings(size):
            np.testing.assert_array_equal(left.ranking(name, size), right.ranking(name, size)[:steps])
        dense = left.mass(size).dense()
        np.testing.assert_array_equal(dense, right.mass(size).dense()[:steps, ..., : dense.shape[-1]])


def test_reader_returns_what_was_written(trace_folder: Path) -> None:
    group = open_trace(trace_folder).group("reasoning")
    assert group.num_positions == 70
    assert group.block_sizes == (4, 5, 8)
    assert group.kv_len.dtype == np.int32
    assert group.rankings(4) == ("true", "draft1", "draft2", "exact")
    for t, truth in enumerate(truth_of(70)):
        for (size, name), scores in truth["scores"].items():
            expected, _ = rank_scores(scores, BLOCKS[size].max_ranked_blocks, 16)
            np.testing.assert_array_equal(group.ranking(name, size)[t], expected)
        for size in (4, 8):
            values = pooled(truth["token_mass"], size)[[0, 2]]
            dense = group.mass(size).dense()[t]
            np.testing.assert_allclose(dense[..., : values.shape[-1]], values, rtol=0.2, atol=1e-3)
            assert not dense[..., values.shape[-1] :].any()
            assert not group.mass(size).outside[t].any()


def test_rows_without_a_draft_are_masked(trace_folder: Path) -> None:
    group = open_trace(trace_folder).group("reasoning")
    for j in (1, 2):
        ids = group.ranking(f"draft{j}", 4)
        assert (ids[:j] == -1).all()
        assert (ids[j:, ..., 0] >= 0).all()
    np.testing.assert_array_equal(group.ranking("draft_truth", 4), group.ranking("true", 4))


def test_exact_is_the_mass_ranking_of_selectable_blocks(trace_folder: Path) -> None:
    group = open_trace(trace_folder).group("reasoning")
    for t, truth in enumerate(truth_of(70)):
        levels = quantise_mass(pooled(truth["token_mass"], 4)[[0, 2]])
        np.testing.assert_array_equal(group.ranking("exact", 4)[t], rank_levels(levels[..., :-1], None, 12)[0])
    for size in (4, 5, 8):
        open_block = (group.kv_len - 1) // size
        assert (group.ranking("exact", size) < open_block[:, None, None, None]).all()


def test_mass_of_ranked_blocks_only_leaves_the_rest_outside(trace_folder: Path) -> None:
    group = open_trace(trace_folder).group("reasoning")
    assert isinstance(group, FileGroup)
    mass, ids = group.mass(5), group.ranking("true", 5)
    inside = np.take_along_axis(mass.dense(), ids, axis=-1).sum(axis=-1)
    np.testing.assert_allclose(inside + group.rest(5), 1, atol=1e-5)
    np.testing.assert_allclose(mass.dense().sum(axis=-1) + mass.outside, 1, atol=1e-5)
    assert mass.outside.max() > 0.01


def test_zip_and_url_read_as_the_folder(trace_folder: Path) -> None:
    zipped = pack(trace_folder)
    assert zipped.name == "tiny.zarr.zip"
    folder = open_trace(trace_folder)
    for location in (zipped, f"file://{zipped}", f"file://{trace_folder}"):
        other = open_trace(location)
        assert other.content_hash == folder.content_hash
        assert_equal_groups(other.group("reasoning"), folder.group("reasoning"))


def test_check_passes_on_folder_and_zip(trace_folder: Path) -> None:
    summary = check_trace(trace_folder)
    assert check_trace(pack(trace_folder))["content_hash"] == summary["content_hash"]
    assert summary["groups"]["reasoning"]["block_sizes"][4]["max_budget_tokens"] == 48


def test_the_zarr_library_reads_the_arrays(trace_folder: Path) -> None:
    root = zarr.open_group(trace_folder, mode="r")
    group = open_trace(trace_folder).group("reasoning")
    assert isinstance(group, FileGroup)
    for name in group.array_names():
        np.testing.assert_array_equal(root[f"reasoning/{name}"][:70], group.array(name))


def test_content_hash_ignores_chunks_and_names_but_no_array(trace_folder: Path, tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "same.zarr", trace_attributes().model_copy(update={"name": "other"})) as writer:
        group = writer.group("reasoning", group_attributes(99))
        for truth in truth_of(70):
            group.append(record_of(truth))
    assert open_trace(tmp_path / "same.zarr").content_hash == open_trace(trace_folder).content_hash
    for change in ("token", "rest", "level"):
        with TraceWriter(tmp_path / f"{change}.zarr", trace_attributes()) as writer:
            group = writer.group("reasoning", group_attributes(70))
            for t, truth in enumerate(truth_of(70)):
                step = record_of(truth)
                if t == 66 and change == "token":
                    step.token += 1
                if t == 66 and change == "rest":
                    step.rest[8][0, 0] += 1e-3
                if t == 66 and change == "level":
                    step.rankings[8, "draft2"][1][1, 1, 0] = 254 - step.rankings[8, "draft2"][1][1, 1, 0]
                group.append(step)
        assert open_trace(tmp_path / f"{change}.zarr").content_hash != open_trace(trace_folder).content_hash


def test_killed_recording_is_a_valid_shorter_trace(trace_folder: Path, tmp_path: Path) -> None:
    script = (
        "import os, pathlib, tests.traces.tiny as tiny\n"
        "from traces.writer import TraceWriter\n"
        f"writer = TraceWriter(pathlib.Path({str(tmp_path / 'killed.zarr')!r}), tiny.trace_attributes())\n"
        "group = writer.group('reasoning', tiny.group_attributes(200))\n"
        "for t, truth in enumerate(tiny.truth_of(70)):\n"
        "    group.append(tiny.record_of(truth))\n"
        "os._exit(9)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == 9
    assert check_trace(tmp_path / "killed.zarr")["groups"]["reasoning"]["num_positions"] == 64
    killed, full = open_trace(tmp_path / "killed.zarr").group("reasoning"), open_trace(trace_folder).group("reasoning")
    assert_equal_groups(killed, full, steps=64)


def test_full_disk_keeps_the_chunks_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = TraceWriter(tmp_path / "t.zarr", trace_attributes()).group("reasoning", group_attributes(128))
    steps = [record_of(truth) for truth in truth_of(128)]
    for step in steps[:-1]:
        group.append(step)
    monkeypatch.setattr(zarr.Array, "__setitem__", full_disk)
    with pytest.raises(InputError, match=r"cannot be written: No space left on device; 64 steps are safe"):
        group.append(steps[-1])
    monkeypatch.undo()
    assert check_trace(tmp_path / "t.zarr")["groups"]["reasoning"]["num_positions"] == 64


def full_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_trace_killed_before_its_first_chunk_says_so(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.zarr", trace_attributes())
    writer.group("reasoning", group_attributes(70)).append(record_of(next(truth_of(1))))
    with pytest.raises(TraceError, match="no recorded steps"):
        open_trace(tmp_path / "t.zarr")


def test_chunks_split_by_layer_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traces.layout._CHUNK_TARGET_BYTES", 1500)
    with TraceWriter(tmp_path / "t.zarr", trace_attributes()) as writer:
        group = writer.group("reasoning", group_attributes(70))
        for truth in truth_of(70):
            group.append(record_of(truth))
    assert (tmp_path / "t.zarr/reasoning/p4/true/levels/c/1/1/0/0").exists()
    split = open_trace(tmp_path / "t.zarr").group("reasoning")
    for t, truth in enumerate(truth_of(70)):
        expected, _ = rank_scores(truth["scores"][4, "true"], 12, 16)
        np.testing.assert_array_equal(split.ranking("true", 4)[t], expected)


def test_context_shorter_than_the_ranking_is_padded(tmp_path: Path) -> None:
    blocks = {8: BlockSizeAttributes(layers=(0, 1, 2), max_ranked_blocks=40, rankings=("true", "draft1", "draft2"))}
    with TraceWriter(tmp_path / "t.zarr", trace_attributes()) as writer:
        group = writer.group("reasoning", group_attributes(5, blocks))
        for truth in truth_of(5, blocks):
            group.append(record_of(truth, blocks))
    check_trace(tmp_path / "t.zarr")
    ids = open_trace(tmp_path / "t.zarr").group("reasoning").ranking("true", 8)
    assert (
        (ids >= 0).sum(axis=-1) == np.array([-(-(CONTEXT_TOKENS + t) // 8) - 1 for t in range(5)])[:, None, None]
    ).all()


def test_writer_refuses_what_does_not_follow(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.zarr", trace_attributes())
    group = writer.group("reasoning", group_attributes(2))
    steps = [record_of(truth) for truth in truth_of(3)]
    with pytest.raises(TraceError, match=r"kv_len\[0\]: is 96, expected 95"):
        group.append(steps[1])
    group.append(steps[0])
    group.append(steps[1])
    with pytest.raises(TraceError, match="all 2 planned steps"):
        group.append(steps[2])
    with pytest.raises(InputError, match="exists already"):
        TraceWriter(tmp_path / "t.zarr", trace_attributes())
    with pytest.raises(InputError, match="group name"):
        writer.group("../elsewhere", group_attributes(2))


def test_unknown_names_list_the_recorded(trace_folder: Path) -> None:
    trace = open_trace(trace_folder)
    with pytest.raises(InputError, match="it has reasoning"):
        trace.group("nobody")
    with pytest.raises(TraceError, match="block size 32 is not recorded; recorded are 4, 5, 8"):
        trace.group("reasoning").ranking("true", 32)
    with pytest.raises(TraceError, match="draft3: is not recorded; there are true, draft1"):
        trace.group("reasoning").ranking("draft3", 4)
