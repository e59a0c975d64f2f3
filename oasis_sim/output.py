"""What leaves the program: JSON, numbers for people, one-line errors and exit codes."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

EXIT_INPUT, EXIT_INTERNAL = 2, 70
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
PIPED_WIDTH = 100
"""Columns of a table when stdout is a file or a pipe."""


def print_json(document: Mapping[str, Any]) -> None:
    """One strict JSON document on stdout. Raises ValueError on NaN or infinity."""
    sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")


def console() -> Console:
    """Rich console on stdout: terminal width on a terminal, else `PIPED_WIDTH` columns without colour."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def print_rows(rows: Sequence[Mapping[str, Any]], hidden: Sequence[str] = ()) -> None:
    """Rows of the same keys as a table; `hidden` columns and columns of nulls are left out."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    names = [name for name in (rows[0] if rows else ()) if any(row[name] is not None for row in rows)]
    names = [name for name in names if name not in hidden]
    for name in names:
        numeric = all(isinstance(row[name], int | float) for row in rows if row[name] is not None)
        title = _TITLES.get(name, name.replace("_", " "))
        table.add_column(title, justify="right" if numeric else "left", no_wrap=name == "name", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(name, row[name]) for name in names))
    console().print(table)


_TITLES = {
    "num_layers": "layers",
    "num_q_heads": "q heads",
    "num_kv_heads": "kv heads",
    "hbm_bytes": "HBM",
    "hbm_bytes_per_s": "HBM GB/s",
    "bf16_flops": "bf16 TFLOP/s",
    "h2d_bytes_per_s": "H2D GB/s",
    "num_assumptions": "assumed",
    "num_figures": "figures",
    "context_tokens": "context",
    "num_positions": "steps",
    "file_bytes": "file",
}


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return ", ".join(f"{item:,}" if isinstance(item, int) else str(item) for item in value)
    if name == "hbm_bytes":
        return f"{value / 2**30:,.0f} GiB"
    if name.endswith("_bytes"):
        return gigabytes(value) if value >= 1e9 else megabytes(value)
    if name.endswith("_bytes_per_s"):
        return f"{value / 1e9:,.0f}"
    if name.endswith("_flops"):
        return f"{value / 1e12:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


@contextmanager
def told_where_not_written(kept: Callable[[], str]) -> Iterator[None]:
    """A file that cannot be written is named in one line that says what is kept, too."""
    from traces.errors import WriteError

    try:
        yield
    except WriteError as error:
        raise WriteError(f"{error}; {kept()}") from error


def report_error(error: Exception) -> int:
    """Print one line for an error on stderr and return the exit code that it stands for."""
    from traces.errors import OasisError

    if isinstance(error, OasisError):
        _error_line(str(error))
        return error.exit_code
    format_message = getattr(error, "format_message", None)
    if format_message is not None:  # the CLI library's own: unknown flag, missing argument
        context = getattr(error, "ctx", None)
        hint = f" (see: {context.command_path} --help)" if context is not None else ""
        _error_line(f"{format_message().rstrip('.')}{hint}")
        return EXIT_INPUT
    if isinstance(error, OSError) and error.filename is not None:
        _error_line(f"{error.filename}: {error.strerror}")
        return EXIT_INPUT
    if isinstance(error, OSError) and error.errno in DISK_FAULTS:
        _error_line(f"a file cannot be written: {os.strerror(error.errno)}")
        return EXIT_INPUT
    _error_line(f"internal: {type(error).__name__}: {error} ({_keep_traceback(error)})")
    return EXIT_INTERNAL


def _keep_traceback(error: Exception) -> str:
    text = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile("w", prefix="oasis-sim-", suffix=".traceback.txt", delete=False) as file:
            file.write(text)
    except OSError as fault:
        return f"its traceback could not be kept: {fault.strerror}"
    return f"traceback in {file.name}"


def _error_line(message: str) -> None:
    print("error:", " ".join(message.split()), file=sys.stderr)


def tell_without_effect(keys: Sequence[str]) -> None:
    """One line on stderr that names what was given in vain."""
    if keys:
        print(f"no effect on any point, so left out: {', '.join(keys)}", file=sys.stderr)


def milliseconds(value_s: float | None) -> str:
    return "–" if value_s is None else f"{value_s * 1e3:.2f} ms"


def share(value: float | None) -> str:
    return "–" if value is None else f"{value * 100:.1f} %"


def number(value: float | None, unit: str = "") -> str:
    """Three or four significant digits with thousands separated."""
    if value is None:
        return "–"
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"
    return f"{text} {unit}".rstrip()


def gigabytes(num_bytes: float | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / 1e9:,.2f} GB"


def megabytes(num_bytes: float | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / 1e6:,.2f} MB"
