from __future__ import annotations

import pytest

from analysis.text_fit import legend_columns, text_width_in, tick_labels, wrapped


@pytest.mark.parametrize(
    ("count", "most", "columns"), [(4, 4, 4), (5, 4, 3), (9, 4, 3), (13, 4, 5), (17, 4, 3), (2, 5, 2)]
)
def test_legends_leave_no_entry_alone(count, most, columns):
    assert legend_columns(["name"] * count, 8.0, most, 8.0) == columns


def test_a_legend_stays_within_the_width():
    long = "a name that takes about two inches"
    assert 1.5 < text_width_in(long, 8.0) < 2.5
    assert legend_columns([long] * 8, 8.0, 8, 8.0) < 4
    assert legend_columns([long * 5] * 3, 8.0, 4, 8.0) == 1


def test_ticks_get_smaller_then_barer_then_fewer():
    caps = ["0.02", "0.05", "0.1", "0.2", "1"]
    assert tick_labels(caps, 3.0) == (caps, 8.0)
    assert tick_labels(caps, 1.25) == (caps, 6.5)
    assert tick_labels(caps, 1.1) == ([".02", ".05", ".1", ".2", "1"], 6.5)
    assert tick_labels(caps, 0.6) == ([".02", "", ".1", "", "1"], 6.5)
    assert tick_labels([], 1.0)[0] == []


def test_a_text_is_wrapped_to_its_width_and_words_stay_whole() -> None:
    text = "Gemma-3 multi-document, 15.75K"
    for width in (0.5, 0.8, 3.0):
        lines = wrapped(text, width, 6.5)
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")
        widest = max(text_width_in(word, 6.5) for word in ("Gemma-", "multi-", "document,"))
        assert max(text_width_in(line, 6.5) for line in lines) <= max(width, widest)
    assert wrapped(text, 3.0, 6.5) == [text]
