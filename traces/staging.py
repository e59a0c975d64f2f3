"""Write a trace beside its place and move it there whole: a killed program leaves nothing that looks like a trace."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from traces.errors import InputError


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A path to write a file or folder at, which is moved to `target` at the end; at a fault all of it goes.

    It lies in a hidden folder beside `target`. Such folders that killed programs left are removed first: the one that
    writes holds a lock on its own. Missing parents of `target` are made, and removed again where nothing came of them.
    An existing file or empty folder at `target` is replaced. Raises InputError where that or the rest is impossible.
    """
    parent = target.absolute().parent
    made = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    prefix = f".{target.name}.unfinished-"
    try:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_left(parent, prefix)
            scratch = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
        except OSError as error:
            raise InputError(f"{target}: cannot be created: {error.strerror}") from error
        held = os.open(scratch, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield scratch / target.name
            try:
                os.replace(scratch / target.name, target)
            except OSError as error:
                raise InputError(f"{target}: cannot be written: {error.strerror}") from error
        finally:
            os.close(held)
            shutil.rmtree(scratch, ignore_errors=True)
    except BaseException:
        for folder in made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise


def _remove_left(parent: Path, prefix: str) -> None:
    for left in parent.iterdir():
        if not left.name.startswith(prefix):
            continue
        try:
            handle = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue  # another program writes it
        finally:
            os.close(handle)
