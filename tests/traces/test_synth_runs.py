"""Several draws of a layer: how many, and which is the most typical."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from traces.codec import Ids
from traces.schema import ModelGeometry
from traces.synth.recipes import load_recipe, recipe_statistics
from traces.synth.runs import most_typical, num_draws
from traces.synth.synthesise import synthesise

STEPS, BLOCKS, SIZE = 40, 64, 8


def _rows(changed: int) -> Ids:
    """`true` and one draft [2, S, 1, K]: at each step the first `changed` of the K blocks are others than before."""
    best = np.tile(np.arange(SIZE, dtype=np.int32), (2, STEPS, 1, 1))
    best[:, 1::2, :, :changed] += BLOCKS // 2
    best[1, 0] = -1
    return best


def test_the_draw_nearest_to_the_mean_is_taken() -> None:
    for order in ([1, 3, 6], [6, 1, 3], [3, 6, 1]):
        assert order[most_typical(lambda draw, order=order: _rows(order[draw]), 3, (4, SIZE))] == 3  # type: ignore[misc]


def test_a_single_draw_is_not_run() -> None:
    assert most_typical(lambda draw: 1 // 0, 1, (SIZE,)) == 0  # type: ignore[arg-type, return-value]


def test_layers_of_few_heads_are_drawn_several_times() -> None:
    assert [num_draws(heads) for heads in (1, 2, 3, 4, 6, 8, 32)] == [8, 4, 3, 2, 1, 1, 1]


@pytest.mark.parametrize(("heads", "draws"), [(2, 4), (8, 0)])
def test_progress_counts_every_draw_and_ends_at_its_total(heads: int, draws: int, tmp_path: Path) -> None:
    statistics = recipe_statistics(load_recipe("qwen3-8b-published", None))
    geometry = ModelGeometry(name="few", num_layers=3, num_query_heads=8, num_kv_heads=heads, head_dim=64)
    told: list[tuple[int, int]] = []
    synthesise(statistics, geometry, 2048, 6, 0, tmp_path / "t", layers=(0, 2), progress=lambda *at: told.append(at))
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert {total for _, total in told} == {told[-1][0]} == {6 * 2 * (1 + draws)}
    assert len(told) == 2 * draws + 6
