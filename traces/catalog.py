"""Traces that ship with oasis-sim, by name."""

from __future__ import annotations

import difflib
from pathlib import Path

from traces.errors import InputError

_FOLDER = Path(__file__).parent / "data"
_SUFFIX = ".zarr.zip"


def shipped_traces() -> dict[str, Path]:
    """Path of each shipped trace by name, sorted."""
    return {path.name.removesuffix(_SUFFIX): path for path in sorted(_FOLDER.glob(f"*{_SUFFIX}"))}


def resolve(name_or_path: str | Path) -> str:
    """Location of a shipped trace's name, of an existing file or folder, or of an fsspec URL.

    Raises InputError with the nearest names for anything else.
    """
    text = str(name_or_path)
    if "://" in text:
        return text
    shipped = shipped_traces()
    if text in shipped:
        return str(shipped[text])
    if Path(text).exists():
        return text
    near = difflib.get_close_matches(text, shipped, n=3, cutoff=0.3) or list(shipped)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise InputError(f"trace '{text}' is neither a shipped trace nor an existing file{hint}")
