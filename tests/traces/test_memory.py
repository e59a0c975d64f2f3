"""Groups from arrays satisfy the interface of recorded ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from traces.check import check_rankings
from traces.errors import TraceError
from traces.memory import memory_group, memory_trace
from traces.reader import open_trace


def test_memory_group_of_a_recorded_one_reads_alike(trace_folder: Path) -> None:
    recorded = open_trace(trace_folder).group("reasoning")
    names = ("true", "draft1", "draft2")
    group = memory_group(
        recorded.kv_len,
        {size: {name: recorded.ranking(name, size) for name in names} for size in (4, 8)},
        {size: recorded.mass(size).dense() for size in (4, 8)},
        layers={4: (0, 2), 8: (0, 2)},
        model=recorded.model,
    )
    for size in (4, 8):
        assert group.layers(size) == recorded.layers(size)
        assert group.max_ranked_blocks(size) == recorded.max_ranked_blocks(size)
        for name in (*names, "exact"):
            np.testing.assert_array_equal(group.ranking(name, size), recorded.ranking(name, size))
        np.testing.assert_array_equal(group.mass(size).levels, recorded.mass(size).levels)
        np.testing.assert_array_equal(group.mass(size).scale, recorded.mass(size).scale)
        check_rankings(group, size)
    assert group.num_layers == recorded.num_layers


def small(ids: np.ndarray | None = None, **changes: object) -> dict[str, object]:
    default = np.tile(np.arange(3, dtype=np.int32), (2, 1, 1, 1))
    return {"kv_len": [32, 33], "rankings": {8: {"true": default if ids is None else ids}}, **changes}


def test_content_hash_follows_the_arrays() -> None:
    base = memory_group(**small())
    assert base.content_hash == memory_group(**small()).content_hash
    other = np.tile(np.array([0, 2, 1], np.int32), (2, 1, 1, 1))
    assert memory_group(**small(other)).content_hash != base.content_hash
    assert memory_group(**small(layers={8: (1,)})).content_hash != base.content_hash
    assert memory_trace([base]).group("memory") is base


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ([[[[0, 1, 4]]], [[[0, 1, 2]]]], r"true\[0, 0, 0, 2\]: id of a block that did not exist"),
        ([[[[0, 1, 2]]], [[[0, 1, 1]]]], r"true\[1, 0, 0, 1\]: a block is ranked twice"),
        ([[[[0, -1, 2]]], [[[0, 1, 2]]]], r"true\[0, 0, 0, 1\]: an id follows the padding"),
    ],
)
def test_bad_rankings_are_named(ids: list[object], problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        check_rankings(memory_group(**small(np.array(ids))), 8)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rankings": {8: {"exact": np.zeros((2, 1, 1, 3), int)}}}, "true: is missing"),
        ({"kv_len": [32, 33, 34]}, r"expected \[3, L, H, M\]"),
        ({"masses": {8: np.ones((2, 2, 1, 5))}}, "block_mass: shape is"),
        ({"layers": {8: (0, 1)}}, "1 layers, 2 named"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        memory_group(**small(**changes))


def test_mass_that_was_not_given_is_an_error() -> None:
    with pytest.raises(TraceError, match="block_mass: is not recorded"):
        memory_group(**small()).mass(8)
