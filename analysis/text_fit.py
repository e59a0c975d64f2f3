"""What fits beside each other: columns of a legend, labels of ticks."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

FONT = "DejaVu Sans"
TICK_SIZES_PT = (8.0, 6.5)
TICK_GAP_IN = 0.05
HANDLE_EMS, HANDLE_GAP_EMS, COLUMN_GAP_EMS = 1.8, 0.8, 1.6
"""Of a legend, in font sizes: the handle, its gap to the text, the gap between columns."""


def text_width_in(text: str, size_pt: float) -> float:
    """Width of one line of text in the pictures' font, inches."""
    font = FontProperties(family=FONT, size=size_pt)
    return float(TextPath((0, 0), text, prop=font).get_extents().width) / 72 if text.strip() else 0.0


def legend_columns(labels: Sequence[str], size_pt: float, most: int, width_in: float) -> int:
    """Columns of a legend that fit the width: no entry alone in the last row, then few rows, then a full last row.

    Up to `most`, or up to two more where each number up to it would leave an entry alone.
    """
    beside_in, gap_in = (ems * size_pt / 72 for ems in (HANDLE_EMS + HANDLE_GAP_EMS, COLUMN_GAP_EMS))
    widths = [text_width_in(text, size_pt) + beside_in + gap_in for text in labels]
    count = len(labels)

    def fits(columns: int) -> bool:
        rows, longer = divmod(count, columns)
        starts = [i * rows + min(i, longer) for i in range(columns + 1)]
        return sum(max(widths[a:b]) for a, b in itertools.pairwise(starts)) <= width_in + gap_in

    def rank(columns: int) -> tuple[bool, bool, int, int]:
        rows, last = -(-count // columns), count % columns or columns
        return last == 1 and rows > 1, columns > most, rows, -last

    return min((c for c in range(1, min(most + 2, count) + 1) if c == 1 or fits(c)), key=rank)


def tick_labels(labels: list[str], width_in: float) -> tuple[list[str], float]:
    """Labels of evenly spaced ticks that do not touch, and their size in points.

    Smaller ones where they would, then without the zero before a point, then fewer.
    """
    spacing = width_in / max(1, len(labels))

    def apart(texts: list[str], size: float) -> bool:
        widths = [(i, text_width_in(text, size)) for i, text in enumerate(texts) if text]
        return all((a + b) / 2 + TICK_GAP_IN <= (j - i) * spacing for (i, a), (j, b) in itertools.pairwise(widths))

    bare = [text[1:] if text.startswith("0.") else text for text in labels]
    tries = [(labels, size) for size in TICK_SIZES_PT]
    for every in range(1, max(2, len(labels))):
        tries.append(([text if i % every == 0 else "" for i, text in enumerate(bare)], TICK_SIZES_PT[-1]))
    return next((made for made in tries if apart(*made)), tries[-1])


def wrapped(text: str, width_in: float, size_pt: float) -> list[str]:
    """Lines of a text that are at most so wide, where its words are; broken at spaces and hyphens."""
    lines = [text]
    for count in range(len(text), 0, -1):
        lines = textwrap.wrap(text, count, break_long_words=False)
        if all(text_width_in(line, size_pt) <= width_in for line in lines):
            break
    return lines
