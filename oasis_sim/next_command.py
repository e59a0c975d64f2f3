"""The sweep around a point that was run: the command with all that the run was given, and one key with a list."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from oasis_sim.request import DEFAULT_SWEEP
from oasis_sim.settings import command_line_settings
from simulator.specs.experiment import ExperimentSpec
from traces.catalog import resolve
from traces.reader import open_trace

FETCH_CAPS, BATCH_SIZES = "0.02,0.05,0.1,1", "16,32,64,128"
"""Lists for a run whose file has one value of everything, of the default grids."""
OF_SERVED = (0.5, 1.0, 2.0)
"""Arrival rates of a serving run, as shares of what the run finished a second: all at once, that is what it can."""


def sweep_around(
    row: Mapping[str, Any],
    point: ExperimentSpec,
    file: str | None,
    flags: Mapping[str, Sequence[str]],
    assignments: Sequence[str],
) -> str:
    """Without a file and serving keys what is not given is swept as by default; else one key gets a list.

    The name of the run is left out: it names the folder that holds it.
    """
    chosen = {flag: list(texts) for flag, texts in flags.items()}
    keys = {key.strip(): text for key, _, text in (one.partition("=") for one in assignments)}
    keys.pop("name", None)
    if file is not None and point.name is not None:
        keys["name"] = "null"
    if point.serving is not None:
        if point.serving.requests is None:
            keys["serving.arrivals"] = "gamma" if point.serving.arrivals == "gamma" else "poisson"
        rates = (float(f"{share * row['requests_per_s']:.2g}") for share in OF_SERVED)
        keys["serving.rate_per_s"] = ",".join(f"{rate:g}" for rate in rates)
    elif file is not None:
        flag, key, values = "--fetch-cap", "policy.fetch_cap", FETCH_CAPS
        if row.get(key) is None:
            flag, key, values = "--batch-size", "workload.batch_size", BATCH_SIZES
        keys.pop(key, None)
        chosen[flag] = [values]
    else:
        given = command_line_settings(flags, assignments)
        if "policy.block_size_tokens" not in given and not _default_block_sizes() <= set(_recorded_block_sizes(row)):
            chosen["--block-size"] = [str(row["policy.block_size_tokens"])]
        if "system" not in given:
            chosen = {"--system": [row["system"]], **chosen}
    words = ["oasis-sim", "sweep", *([] if file is None else [file])]
    words += [word for flag, texts in chosen.items() for text in texts for word in (flag, text)]
    words += [word for key, text in keys.items() for word in ("--set", f"{key}={text}")]
    return shlex.join(words)


def _default_block_sizes() -> set[int]:
    return set(yaml.safe_load(DEFAULT_SWEEP.read_text(encoding="utf-8"))["policy"]["block_size_tokens"])


def _recorded_block_sizes(row: Mapping[str, Any]) -> tuple[int, ...]:
    return open_trace(resolve(row["trace"])).group(row["trace_group"]).block_sizes
