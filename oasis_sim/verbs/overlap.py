"""`oasis-sim trace overlap`: how well drafts and earlier queries find the blocks that attention selects."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from oasis_sim.interruption import told_on_interruption
from oasis_sim.options import whole_numbers
from oasis_sim.output import print_json
from traces.catalog import resolve
from traces.errors import InputError, refuse_file
from traces.overlap import GROUP_SCHEMA, Grid, most_blocks, open_groups, write_overlap, write_rows

OVERLAP, MISSES, CAPS = "overlap.parquet", "misses.parquet", "caps.parquet"


def overlap(
    names: Sequence[str],
    out: str,
    *,
    budgets: str | None,
    detail_budget: int,
    top_blocks: int,
    block_sizes: str | None,
    max_distance: int,
    seed: int,
    pictures: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Write three tables of the traces, and pictures and Markdown of them, into `out`; print each file's path."""
    given = {} if budgets is None else {"budgets_tokens": whole_numbers("--budgets", budgets)}
    sizes = None if block_sizes is None else whole_numbers("--block-sizes", block_sizes)
    grid = Grid(**given, top_blocks=top_blocks or None, block_sizes_tokens=sizes, max_distance=max_distance)
    if detail_budget < 1:
        raise InputError(f"--detail-budget {detail_budget}: must be positive")
    from simulator.verified_trace import open_verified

    for name in names:
        open_verified(resolve(name))
    from simulator.cap_table import least_steps

    for name, group in open_groups(names):
        if group.num_positions < least_steps(group):
            raise InputError(
                f"trace {name}: request {group.name!r} has {group.num_positions} steps; recall under fetch caps needs "
                f"{least_steps(group)}"
            )
    if not any(
        grid.with_budget(detail_budget).block_counts(g, size) for _, g in open_groups(names) for size in g.block_sizes
    ):
        most = max(size * most_blocks(group, size) for _, group in open_groups(names) for size in group.block_sizes)
        raise InputError(
            f"--detail-budget {detail_budget}: none of the traces ranks so much at every step; the most is {most}"
        )
    folder = Path(out)
    with told_on_interruption(lambda: _kept(folder)), _made(folder):
        rows, drawn = _write(names, folder, grid, detail_budget, seed, pictures, quiet)
    if as_json:
        print_json({"out": str(folder), "rows": rows, "pictures": [path.name for path in drawn]})
    else:
        for path in (*(folder / name for name in rows), *drawn):
            print(path)
    return 0


def _kept(folder: Path) -> str:
    tables = [name for name in (OVERLAP, MISSES, CAPS) if (folder / name).exists()]
    return f"{folder} keeps {', '.join(tables)}" if tables else f"nothing is in {folder}"


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder, which goes again where a fault or an interruption leaves it empty."""
    refuse_file(folder, "--out")
    new = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {folder}: cannot be made: {error.strerror}") from error
    try:
        yield
    except BaseException:
        for path in new:
            if not any(path.iterdir()):
                path.rmdir()
        raise


def _write(
    names: Sequence[str], folder: Path, grid: Grid, detail_budget: int, seed: int, pictures: bool, quiet: bool
) -> tuple[dict[str, int], list[Path]]:
    """Rows of each table, and the files of the report."""

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr)

    def replace(name: str, write: Callable[[Path], int]) -> int:
        """Write a file under another name first, so that an interrupted run leaves none torn."""
        with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as scratch:
            number = write(Path(scratch) / name)
            os.replace(Path(scratch) / name, folder / name)
        return number

    from traces.misses import write_misses

    say(f"overlap and recall of {len(names)} trace{'s' if len(names) > 1 else ''}")
    rows = {OVERLAP: replace(OVERLAP, lambda path: write_overlap(names, path, grid))}
    say(f"where predictions miss, at a budget of {detail_budget} tokens")
    rows[MISSES] = replace(MISSES, lambda path: write_misses(names, path, grid, detail_budget))
    say("recall under fetch caps")
    rows[CAPS] = replace(CAPS, lambda path: _write_caps(names, path, grid, detail_budget, seed))
    drawn: list[Path] = []
    if pictures:
        from analysis.overlap_report import write_report

        say("pictures")
        drawn = write_report(folder, detail_budget)
    return rows, drawn


def _write_caps(names: Sequence[str], path: Path, grid: Grid, budget_tokens: int, seed: int) -> int:
    import pyarrow as pa

    from simulator.cap_table import cap_rows

    schema = pa.schema(
        [
            *GROUP_SCHEMA,
            ("predictor", pa.string()), ("distance", pa.int32()), ("fetch_cap", pa.float64()), ("rules", pa.string()),
            *((name, pa.float64()) for name in ("hit_rate", "overlap", "recall", "recall_upper", "churn")),
        ]
    )  # fmt: skip
    return write_rows(
        names, path, schema, grid.with_budget(budget_tokens),
        lambda group, size, count: cap_rows(group, size, count * size, grid.max_distance, seed=seed),
    )  # fmt: skip
