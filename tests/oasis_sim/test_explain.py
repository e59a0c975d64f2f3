"""How values of a row are written for people."""

from __future__ import annotations

import pytest

from oasis_sim.explain import value


@pytest.mark.parametrize(
    ("given", "text"),
    [(True, "yes"), (False, "no"), (1, "1"), (6144, "6,144"), (0.05, "0.05"), (None, "–"), ("far", "far")],
)
def test_values_are_written_by_kind(given, text):
    assert value({"policy.x": given}, "policy.x") == text
