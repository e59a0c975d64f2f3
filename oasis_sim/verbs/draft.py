"""`oasis-sim draft train`: a draft head for a model, trained on text that the model generates."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oasis_sim.interruption import told_on_interruption
from oasis_sim.options import assigned
from traces.errors import EnvironmentMissing, InputError


def train(prompts: Sequence[str], out: str, options: Mapping[str, Any], assignments: Sequence[str], quiet: bool) -> int:
    """Train and write `out` with its JSON. Raises EnvironmentMissing without torch, InputError for a bad option."""
    target = Path(out)
    for path in (target, target.with_suffix(".json")):
        if path.exists():
            raise InputError(f"{path}: exists already; a training does not overwrite")
    try:
        from realhw import draft_train
    except ImportError as error:
        missing = error.name or str(error)
        raise EnvironmentMissing(f"draft train needs {missing}: pip install '.[gpu]' in a clone") from error
    from simulator.specs.validation import validated

    given = {name: value for name, value in options.items() if value is not None}
    given |= assigned(assignments, {*given, "prompts", "command"})
    command = shlex.join(["oasis-sim", *sys.argv[1:]])
    checked = validated(draft_train.TrainOptions, {**given, "prompts": tuple(prompts), "command": command})
    with told_on_interruption(lambda: "a training keeps nothing"):
        summary = draft_train.train(checked, target, progress=None if quiet else _report)
    shares = ", ".join(f"{100 * share:.1f} %" for share in summary["acceptance_by_distance"])
    print(f"{target}\nright guesses on {summary['held_out_positions']} held-out positions, by distance: {shares}")
    return 0


def _report(what: str, done: int, total: int) -> None:
    """One line per phase and per tenth of it, on stderr."""
    if total < 10 or done == total or done % (total // 10) == 0:
        print(f"{what}: {done} of {total}", file=sys.stderr)
