"""`oasis-sim plot`: the pictures and the report of a finished run."""

from __future__ import annotations

from pathlib import Path


def plot(folder: str) -> int:
    """Draw into `folder/plots` and print the path of each file written. Raises InputError for an unfinished run."""
    from analysis.report import plot_run

    for path in plot_run(Path(folder)):
        print(path)
    return 0
