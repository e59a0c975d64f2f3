"""`oasis-sim plot`: the pictures and the report of a finished run."""

from __future__ import annotations

from pathlib import Path

from oasis_sim.output import told_where_not_written


def plot(folder: str, out: str | None, formats: str) -> int:
    """Draw into `folder/plots` (or `out`) and print the path of each file written.

    `formats`: png, svg, pdf, with commas between them. Raises InputError for an unfinished run or an unknown format.
    """
    from analysis.report import plot_run

    with told_where_not_written(lambda: f"the points stay in {folder}"):
        written = plot_run(Path(folder), None if out is None else Path(out), formats.split(","))
    for path in written:
        print(path)
    return 0
