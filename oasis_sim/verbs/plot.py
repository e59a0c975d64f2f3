"""`oasis-sim plot`: the pictures and the report of a finished run."""

from __future__ import annotations

from pathlib import Path


def plot(folder: str, out: str | None, formats: str) -> int:
    """Draw into `folder/plots` (or `out`) and print the path of each file written.

    `formats`: png, svg, pdf, with commas between them. Raises InputError for an unfinished run or an unknown format.
    """
    from analysis.report import plot_run

    for path in plot_run(Path(folder), None if out is None else Path(out), formats.split(",")):
        print(path)
    return 0
