from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.style import (
    KNOWN_LOOKS,
    LEGEND_ROW_IN,
    display_scale,
    frame_figure,
    number,
    spread,
    system_looks,
    value_text,
)
from simulator.systems import SYSTEMS


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


def test_every_system_has_a_colour_of_its_own_and_unknown_ones_a_pair_that_none_has():
    assert set(SYSTEMS) == set(KNOWN_LOOKS)
    names = [*KNOWN_LOOKS, *(f"system-{i}" for i in range(14))]
    looks = system_looks(names)
    assert len({(look.color, look.marker) for look in looks.values()}) == len(names)
    assert system_looks(["system-0", "oasiskv"]) == {n: looks[n] for n in ("system-0", "oasiskv")}


def test_colours_of_systems_can_be_told_apart():
    """CIELAB (D65) distances; about 2.3 is just noticeable, and bars carry no marker."""

    def lab(color):
        linear = np.array([c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)])
        to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
        x, y, z = np.cbrt(to_xyz @ linear / np.array([0.9505, 1.0, 1.089]))
        return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    colors = {name: lab(look.color) for name, look in KNOWN_LOOKS.items()}
    apart = {(a, b): np.linalg.norm(colors[a] - colors[b]) for a, b in itertools.combinations(colors, 2)}
    assert min(apart.values()) > 20, min(apart, key=apart.__getitem__)


def test_a_legend_leaves_no_entry_alone_and_grows_the_figure():
    handles = [Patch(label=f"part {i}") for i in range(9)]
    figure = Figure(figsize=(8, 4))
    figure.add_subplot()
    frame_figure(figure, "title", "subtitle", (), handles, 4)
    assert figure.legends[0]._ncols == 3
    assert figure.get_size_inches()[1] == pytest.approx(4 + 2 * LEGEND_ROW_IN)


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
