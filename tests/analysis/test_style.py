from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from analysis.style import KNOWN_LOOKS, display_scale, number, spread, system_looks, value_text


@given(st.lists(st.floats(-0.5, 1.5), min_size=1, max_size=19), st.floats(0.01, 0.2))
def test_spread_keeps_order_distance_and_range(targets, gap):
    places = spread(targets, gap)
    fits = min(gap, 1 / max(1, len(targets) - 1))
    ordered = [places[i] for i in sorted(range(len(targets)), key=lambda i: targets[i])]
    assert all(b - a >= fits - 1e-9 for a, b in itertools.pairwise(ordered))
    assert min(places) >= -1e-9
    assert max(places) <= 1 + 1e-9


def test_targets_far_apart_stay_where_they_are():
    assert spread([0.1, 0.9, 0.5], 0.1) == [0.1, 0.9, 0.5]


def test_twenty_systems_get_distinct_looks_and_known_ones_keep_theirs():
    names = [*KNOWN_LOOKS, *(f"system-{i}" for i in range(14))]
    looks = system_looks(names)
    assert len({(look.color, look.marker, look.filled) for look in looks.values()}) == len(names)
    assert looks["oasiskv"] == KNOWN_LOOKS["oasiskv"]


def test_the_wait_differs_in_lightness_from_the_parts_beside_it():
    """Lightness survives every colour-vision deficiency; the wait carries a hatch besides."""
    from analysis.breakdown import PARTS, WAIT

    assert PARTS[WAIT][2]
    colors = [to_rgb(color) for _, color, _ in PARTS.values()]
    lightness = [0.2126 * r**2.2 + 0.7152 * g**2.2 + 0.0722 * b**2.2 for r, g, b in colors]
    assert all(abs(a - b) > 0.02 for a, b in itertools.pairwise(lightness[:6]))


@pytest.mark.parametrize(
    ("value", "text"),
    [(2083.4, "2,083"), (7.847, "7.85"), (0.0519, "0.0519"), (0.0, "0"), (math.nan, "–"), (12.34, "12.3")],
)
def test_numbers_for_people(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(16.0, "16"), (0.05, "0.05"), (4096, "4,096"), (None, "–"), ("far", "far")]
)
def test_parameters_read_as_typed(value, text):
    assert value_text(value) == text


def test_only_times_are_scaled_for_display():
    assert display_scale("tpot_mean_s") == 1e3
    assert display_scale("throughput_tokens_per_s") == 1
    assert display_scale("recall") == 1
