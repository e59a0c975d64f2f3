"""Overlaps and masses of a group whose answers are known by hand."""

from __future__ import annotations

import numpy as np
import pytest

from traces.errors import InputError
from traces.memory import MemoryGroup, memory_group
from traces.statistics import attention_statistics


def group() -> MemoryGroup:
    """Four selectable blocks of 8; at each step the set moves on by one block. Mass: 1/2, 1/4, 1/8, 1/16, 1/16."""
    true = np.array([[0, 1], [1, 2], [2, 3]], np.int32)[:, None, None, :]
    draft = np.array([[-1, -1], [1, 2], [0, 1]], np.int32)[:, None, None, :]
    mass = np.tile(np.array([8, 4, 2, 1, 1]) / 16, (3, 1, 1, 1))
    return memory_group([33, 34, 35], {8: {"true": true, "draft1": draft}}, {8: mass})


def test_overlaps_and_mass_by_hand() -> None:
    found = attention_statistics(group(), 8, 2)
    assert found.overlap == {"previous1": 0.5, "draft1": 0.5, "random": 0.5}
    assert found.mass_exact == pytest.approx((8 + 4 + 1) / 16, rel=1e-6)
    assert found.mass_true == pytest.approx(((8 + 4) + (4 + 2) + (2 + 1) + 3) / 48, rel=1e-6)


def test_more_blocks_than_recorded_are_refused() -> None:
    with pytest.raises(InputError, match="1 … 2 are possible"):
        attention_statistics(group(), 8, 3)
