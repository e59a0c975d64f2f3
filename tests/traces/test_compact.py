"""A compact copy holds the same sets, coarser masses, and says what it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.traces.tiny import record_of, trace_attributes, truth_of
from traces.check import check_trace
from traces.compact import pack_compact
from traces.errors import InputError, TraceError
from traces.mass import coarsen_levels, unit_mass
from traces.reader import FileGroup, open_trace
from traces.schema import BlockSizeAttributes, DrafterAttributes, GroupAttributes
from traces.writer import TraceWriter

NAMES = ("true", "draft1", "draft2", "mean")
BLOCKS = {4: BlockSizeAttributes(layers=(0, 1, 2), max_ranked_blocks=16, rankings=NAMES)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compact") / "t.zarr"
    attributes = GroupAttributes(
        context_tokens=95, steps_planned=99, blocks=BLOCKS, drafter=DrafterAttributes(name="n-gram", distances=2),
        query_cos=True,
    )  # fmt: skip
    with TraceWriter(folder, trace_attributes()) as writer:
        group = writer.group("reasoning", attributes)
        for t, truth in enumerate(truth_of(70, BLOCKS)):
            step = record_of(truth, BLOCKS)
            step.query_cos = np.full((3, 2), t / 100, np.float32) + np.arange(3, dtype=np.float32)[:, None] / 10
            group.append(step)
    return folder


def groups(source: Path, packed: Path) -> tuple[FileGroup, FileGroup]:
    full, small = (open_trace(path).group("reasoning") for path in (source, packed))
    assert isinstance(full, FileGroup)
    assert isinstance(small, FileGroup)
    return full, small


def test_sets_stay_and_masses_are_near(source: Path, tmp_path: Path) -> None:
    packed = pack_compact(source, tmp_path / "c.zip", block_size_tokens=4, layers=(2, 0), max_ranked_blocks=12)
    summary = check_trace(packed)
    assert "compact copy of content hash" in summary["provenance"]["notes"]
    full, small = groups(source, packed)
    assert small.layers(4) == (0, 2)
    assert small.rankings(4) == ("true", "draft1", "draft2", "exact")
    assert small.attributes.steps_planned == 70
    rows = [0, 2]
    np.testing.assert_array_equal(small.ranking("true", 4), full.ranking("true", 4)[:, rows, :, :12])
    for name in ("draft1", "draft2"):
        for count in (3, 6, 12):
            kept, expected = small.ranking(name, 4)[..., :count], full.ranking(name, 4)[:, rows, :, :count]
            np.testing.assert_array_equal(np.sort(kept), np.sort(expected))
    for name in ("tokens", "draft1/token", "draft2/accepted"):
        np.testing.assert_array_equal(small.array(name), full.array(name))
    np.testing.assert_array_equal(small.query_cos(4), full.query_cos(4)[:, rows])
    mass, expected = small.mass(4).dense(), full.mass(4).dense()[:, rows]
    np.testing.assert_allclose(mass.sum(axis=-1), 1, atol=1e-5)
    assert 0 < np.abs(mass - expected).max() < 0.02
    inside = np.take_along_axis(expected, small.ranking("true", 4), axis=-1).sum(axis=-1)
    np.testing.assert_allclose(inside + small.rest(4), 1, atol=0.02)


def test_defaults_take_what_there_is_and_more_can_be_kept(source: Path, tmp_path: Path) -> None:
    packed = pack_compact(source, tmp_path / "c.zip", block_size_tokens=4, max_ranked_blocks=16, keep=("mean",))
    full, small = groups(source, packed)
    assert small.layers(4) == (0, 1, 2)
    assert small.attributes.blocks[4].draft_sets == (4, 8)
    plain = pack_compact(source, tmp_path / "p.zip", block_size_tokens=4, max_ranked_blocks=16, draft_sets=())
    assert groups(source, plain)[1].attributes.blocks[4].draft_sets == ()
    assert check_trace(plain)["groups"]["reasoning"]["num_positions"] == 70
    np.testing.assert_array_equal(small.ranking("mean", 4), full.ranking("mean", 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size_tokens": 16}, "block size 16 is not recorded; recorded are 4"),
        ({"layers": (0, 5)}, r"layers: \[5\] is not recorded at 4 tokens"),
        ({"layers": ()}, r"layers: \[\] is not recorded"),
        ({"max_ranked_blocks": 17}, "max_ranked_blocks: 17; the trace ranks 16"),
        ({"draft_sets": (4, 12)}, r"draft_sets: \(4, 12\) must lie between 0 and max_ranked_blocks 12"),
        ({"keep": ("prev_layer",)}, "keep: ranking 'prev_layer' is not stored; there are true, draft1"),
    ],
)
def test_what_is_not_there_is_refused(source: Path, tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises((InputError, TraceError), match=message):
        pack_compact(source, tmp_path / "c.zip", **{"block_size_tokens": 4, "max_ranked_blocks": 12} | changes)
    assert not list(tmp_path.iterdir())


def test_an_existing_file_stays(source: Path, tmp_path: Path) -> None:
    (tmp_path / "c.zip").write_text("precious")
    with pytest.raises(InputError, match="exists already"):
        pack_compact(source, tmp_path / "c.zip", block_size_tokens=4, max_ranked_blocks=12)
    assert (tmp_path / "c.zip").read_text() == "precious"


def test_levels_are_coarser_the_smaller_the_mass() -> None:
    levels = np.arange(256, dtype=np.uint8)
    coarse = coarsen_levels(levels)
    assert coarse[255] == 255
    assert (np.diff(coarse.astype(int)) >= 0).all()
    assert (coarsen_levels(coarse) == coarse).all()
    np.testing.assert_array_equal(coarse[239:], levels[239:])
    assert not coarse[:143].any()
    octaves = np.abs(np.log2(unit_mass()[coarse[143:]] / unit_mass()[levels[143:]]))
    assert octaves.max() < 2
    assert octaves[191 - 143 :].max() == pytest.approx(0.25, abs=1e-3)
    for first, last in ((143, 166), (167, 190)):
        assert len(set(coarse[first : last + 1].tolist())) == 1
        mean = unit_mass()[first : last + 1].mean()
        assert unit_mass()[coarse[first]] == pytest.approx(mean, rel=0.1)


def test_a_faulty_set_is_named(source: Path, tmp_path: Path) -> None:
    import zipfile

    import zarr

    packed = pack_compact(source, tmp_path / "c.zip", block_size_tokens=4, max_ranked_blocks=12)
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(tmp_path / "c.zarr")
    arrays = zarr.open_group(tmp_path / "c.zarr", mode="r+")
    arrays["reasoning/p4/draft1/best3"][5, 1, 0] ^= 255
    with pytest.raises(TraceError, match=r"reasoning/p4/draft1/best3\[5, 1, 0\]: does not mark 3 members"):
        check_trace(tmp_path / "c.zarr")
