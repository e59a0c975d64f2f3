"""Overlap and recall of predicted sets, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from traces.errors import InputError
from traces.memory import memory_group
from traces.overlap import overlap_rows


def test_rows_by_hand() -> None:
    """Blocks of 4, 17 tokens and more: four selectable blocks and the open one; K = 2, one layer, one head."""
    true = np.array([[0, 1], [0, 2], [2, 3]])[:, None, None]
    draft = np.array([[-1, -1], [2, 0], [2, 1]])[:, None, None]
    mass = np.array([[4, 2, 0, 0, 2], [4, 0, 2, 0, 2], [0, 0, 4, 2, 2]])[:, None, None] / 8
    group = memory_group([17, 18, 19], {4: {"true": true, "draft1": draft}}, {4: mass})
    rows = {(row["predictor"], row["distance"]): row for row in overlap_rows(group, 4, 2) if row["distance"] == 1}
    assert rows["previous", 1]["overlap"] == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert rows["draft", 1]["overlap"] == pytest.approx((2 / 2 + 1 / 2) / 2)
    assert rows["random", 1]["overlap"] == pytest.approx(2 / 4)
    assert rows["previous", 1]["recall"] == pytest.approx(((4 + 2) / 8 + (4 + 2) / 8) / 2, abs=1e-6)
    assert rows["draft", 1]["recall"] == pytest.approx((8 / 8 + (4 + 2) / 8) / 2, abs=1e-6)
    assert rows["draft", 1]["recall_true"] == pytest.approx(1, abs=1e-6)
    filled = memory_group(
        [20, 21], {4: {"true": true[:2]}}, {4: np.array([[4, 0, 0, 0, 4, 0], [0, 2, 0, 0, 4, 2]])[:, None, None] / 8}
    )
    row = next(row for row in overlap_rows(filled, 4, 2) if row["predictor"] == "previous")
    assert row["recall"] == pytest.approx((2 + 4 + 2) / 8, abs=1e-6), "block 4 filled after the prediction"
    with pytest.raises(InputError, match="5 blocks of 4 are not ranked"):
        list(overlap_rows(group, 4, 5))
