"""`oasis-sim record`: an attention trace of a real model decoding real prompts."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oasis_sim.interruption import told_on_interruption
from oasis_sim.options import assigned, whole_numbers
from traces.errors import EnvironmentMissing, InputError

NUMBERS = ("block_sizes_tokens", "extra_block_sizes_tokens", "layers", "kv_heads", "extra_layers")
NAMES = ("extras",)
"""Options that hold several values, given with commas."""


def record(prompts: str, out: str, options: Mapping[str, Any], assignments: Sequence[str], quiet: bool) -> int:
    """Record into the folder `out`. Raises EnvironmentMissing without torch, InputError for a bad option."""
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"--out {out}: exists already; a recording needs a new folder")
    if not target.absolute().parent.is_dir():
        raise InputError(f"--out {out}: the folder {target.absolute().parent} does not exist")
    from realhw.prompts import load_prompts

    loaded_prompts = load_prompts(prompts)  # before torch, whose import takes seconds
    os.environ.setdefault("TQDM_DISABLE", "1")  # the loader's own bars: progress is reported here
    try:
        from realhw.memory_limit import peak_memory_bytes
        from realhw.record import record as recorder
        from realhw.record_options import RecordOptions
    except ImportError as error:
        missing = error.name or str(error)
        raise EnvironmentMissing(f"record needs {missing}: pip install '.[gpu]' in a clone") from error
    from simulator.specs.validation import validated

    given = {name: value for name, value in options.items() if value is not None}
    given.setdefault("name", target.name.removesuffix(".zarr"))
    for name, value in assigned(assignments, taken=()).items():
        if name in given:
            raise InputError(f"--set {name}: is given by its own flag, too")
        given[name] = value
    for name in NUMBERS:
        if name in given:
            given[name] = whole_numbers(name, given[name])
    for name in NAMES:
        if name in given:
            given[name] = tuple(part.strip() for part in str(given[name]).split(","))
    if "sparse_policy" in given:
        given["sparse_policy"] = assigned(str(given["sparse_policy"]).split(","), taken=(), flag="--sparse-policy")
    for name in ("prompts", "command"):
        if name in given:
            raise InputError(f"--set {name}: is filled by the command line itself")
    command = shlex.join(["oasis-sim", *sys.argv[1:]])
    checked = validated(RecordOptions, {**given, "prompts": loaded_prompts, "command": command})
    try:
        with told_on_interruption(lambda: _kept(target)), _Progress(quiet) as progress:
            folder = recorder(checked, target, progress=progress)
    except BaseException:
        _remove_without_steps(target)
        raise
    print(f"{folder} (at most {peak_memory_bytes() / 1e9:.2f} GB of memory in use)")
    print(f"next: oasis-sim trace check {shlex.quote(str(folder))}")
    return 0


def _remove_without_steps(trace: Path) -> None:
    """A recording that failed before its first step leaves nothing that the next one would stumble over."""
    if not any(_steps(trace).values()):
        shutil.rmtree(trace, ignore_errors=True)


def _kept(trace: Path) -> str:
    kept = ", ".join(f"{steps} steps of {name}" for name, steps in sorted(_steps(trace).items()) if steps)
    return f"{kept} stay in {trace}" if kept else "nothing was recorded"


def _steps(trace: Path) -> dict[str, int]:
    """Steps written of each group."""
    groups = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in trace.glob("*/zarr.json")}
    return {name: int(group["attributes"]["group"]["steps_written"]) for name, group in groups.items()}


class _Progress:
    """What the recorder is doing, on stderr: a bar on a terminal, else one line per phase."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._quiet = quiet
        self._bar = Progress(
            console=Console(stderr=True), disable=quiet or not sys.stderr.isatty(), transient=True
        )  # default columns: description, bar, percentage, time left
        self._tasks: dict[str, Any] = {}
        self._last: tuple[str, int] | None = None

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != (self._last or ("", 0))[0]:
            for task in self._tasks.values():
                self._bar.update(task, visible=False)
            self._tasks[what] = self._bar.add_task(what, total=total)
            if not self._quiet and not sys.stderr.isatty():
                print(f"{what} ({total} steps)" if what == "decode" else what, file=sys.stderr)
        self._last = (what, done)
        self._bar.update(self._tasks[what], completed=done)
