"""Ctrl-C and SIGTERM end every verb alike: what is open is closed, one line on stderr, exit code 130 or 143."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

EXIT_INTERRUPTED = 128 + signal.SIGINT
SIGNALS = (signal.SIGINT, signal.SIGTERM)
REPEAT_S = 2.0
"""Further signals within this time are the same one: a second Ctrl-C must not cut the clean-up of the first."""


class _State:
    """Of the process, as signals are."""

    signal: int | None = None
    at_s: float = 0.0
    told: bool = False


_state = _State()


def _raise(number: int, _: FrameType | None) -> None:
    now_s = time.monotonic()
    if _state.signal is not None and now_s - _state.at_s < REPEAT_S:
        return
    _state.signal, _state.at_s = number, now_s
    raise KeyboardInterrupt


@contextmanager
def listening() -> Iterator[None]:
    """Inside, both signals raise KeyboardInterrupt; a signal that the caller's shell ignores stays ignored."""
    _state.signal, _state.told = None, False
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {n: signal.getsignal(n) for n in SIGNALS if signal.getsignal(n) not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            # Once interrupted, nothing may cut the interpreter's own way out.
            signal.signal(number, handler if _state.signal is None else signal.SIG_IGN)


@contextmanager
def told_on_interruption(kept: Callable[[], str]) -> Iterator[None]:
    """An interruption inside says in its line what is kept; it ends the program all the same."""
    try:
        yield
    except KeyboardInterrupt:
        if not _state.told:
            _state.told = True
            print(f"interrupted: {kept()}", file=sys.stderr)
        raise


def exit_code_of_interruption() -> int:
    """The code to end with, after a line where none has been printed yet."""
    if not _state.told:
        _state.told = True
        print("interrupted", file=sys.stderr)
    return 128 + (_state.signal or signal.SIGINT)


def points_kept(num_points: int, of: int, path: Path) -> str:
    return f"{num_points} of {of} points stay in {path}; repeat the command to go on"
