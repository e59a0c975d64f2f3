"""`oasis-sim quality`: what a policy's sparsity costs a real model, beside the bytes it moves."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oasis_sim.interruption import told_on_interruption
from oasis_sim.options import assigned
from oasis_sim.output import console
from traces.errors import EnvironmentMissing, refuse_file

LISTS = ("fetch_caps", "budgets_tokens", "block_sizes_tokens", "predictors")
"""Options of the grid, given with commas."""


def quality(prompts: str, out: str, options: Mapping[str, Any], assignments: Sequence[str], quiet: bool) -> int:
    """Measure and print a row per policy. Raises EnvironmentMissing without torch, InputError for a bad option."""
    target = Path(out)
    refuse_file(target, "--out")
    from realhw.prompts import load_prompts

    loaded_prompts = load_prompts(prompts)  # before torch, whose import takes seconds
    try:
        from realhw.quality import measure_quality
        from realhw.quality_options import QualityOptions
    except ImportError as error:
        missing = error.name or str(error)
        raise EnvironmentMissing(f"quality needs {missing}: pip install '.[gpu]' in a clone") from error
    from simulator.specs.validation import validated

    given = {name: value for name, value in options.items() if value is not None}
    as_text = [f"{name}={given.pop(name)}" for name in LISTS if name in given]
    given |= assigned([*as_text, *assignments], {*given, "prompts", "command"}, LISTS)
    command = shlex.join(["oasis-sim", *sys.argv[1:]])
    checked = validated(QualityOptions, {**given, "prompts": loaded_prompts, "command": command})
    kept = f"finished prompts stay in {target}; repeat the command to go on"
    with told_on_interruption(lambda: kept):
        path = measure_quality(checked, target, progress=None if quiet else _report)
    _print_table(path)
    print(f"{path}\nplots: python -m analysis.quality_plots {shlex.quote(str(target))}")
    return 0


def _print_table(path: Path) -> None:
    import pyarrow.parquet as pq
    from rich.table import Table

    table = Table("predictor", "budget", "block", "cap", "recall", "KL (nats)", "ppl ratio", "agreement", "MB/token")
    for row in pq.read_table(path, filters=[("task", "=", "all")]).to_pylist():
        table.add_row(
            row["predictor"],
            f"{row['policy.kv_budget_tokens']:,}",
            str(row["policy.block_size_tokens"]),
            f"{row['policy.fetch_cap']:g}",
            f"{row['recall']:.3f}",
            f"{row['kl']:.4f}",
            f"{row['perplexity_ratio']:.3f}",
            f"{row['agreement']:.3f}",
            f"{row['h2d_bytes_per_token'] / 1e6:.3f}",
        )
    console().print(table)


def _report(what: str, done: int, total: int) -> None:
    print(f"{what} ({done} of {total} prompts done)" if total > 1 else what, file=sys.stderr)
