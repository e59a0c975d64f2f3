"""All pictures and Markdown tables of a folder that `oasis-sim trace overlap` wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from analysis import style
from analysis.overlap_frames import CAPS, MISSES, OVERLAP, load_caps, load_misses, load_overlap
from analysis.overlap_misses import draw_caps, draw_misses, draw_sparse
from analysis.overlap_plots import draw_block_sizes, draw_budgets, draw_distance, draw_guesses, draw_heads
from analysis.overlap_tables import write_tables
from traces.errors import InputError

TABLES = "tables.md"


def write_report(folder: Path, budget_tokens: int) -> list[Path]:
    """Draw into the folder; paths of the files written. A picture for which the traces lack rows is left out."""
    overlap, misses, caps = load_overlap(folder / OVERLAP), load_misses(folder / MISSES), load_caps(folder / CAPS)
    pictures: dict[str, Callable[[], Figure]] = {
        "distance": lambda: draw_distance(overlap, budget_tokens),
        "heads": lambda: draw_heads(overlap, budget_tokens),
        "guesses": lambda: draw_guesses(overlap, budget_tokens),
        "budgets": lambda: draw_budgets(overlap),
        "block-sizes": lambda: draw_block_sizes(overlap, budget_tokens),
        "misses": lambda: draw_misses(misses, budget_tokens),
        "caps": lambda: draw_caps(caps, budget_tokens),
        "sparse": lambda: draw_sparse(overlap, budget_tokens),
    }
    written = []
    for name, draw in pictures.items():
        path = folder / f"{name}.png"
        try:
            figure = draw()
        except InputError:
            path.unlink(missing_ok=True)
            continue
        with style.applied():
            figure.savefig(path)
        written.append(path)
    tables = folder / TABLES
    tables.write_text(write_tables(overlap, misses, caps, budget_tokens), encoding="utf-8")
    return [*written, tables]
