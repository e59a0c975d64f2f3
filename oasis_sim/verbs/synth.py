"""`oasis-sim trace synth`: a trace of a geometry and context that nobody recorded."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any, TypeVar
from zipfile import is_zipfile

import yaml

from oasis_sim.interruption import told_on_interruption
from oasis_sim.output import print_json, print_rows
from traces.catalog import resolve
from traces.errors import InputError
from traces.reader import open_trace
from traces.schema import ModelGeometry
from traces.synth.comparison import compare
from traces.synth.kinds import with_acceptance
from traces.synth.measure import measure
from traces.synth.recipes import load_recipe, recipe_names, recipe_statistics
from traces.synth.statistics import TraceStatistics, save_statistics, validated_statistics
from traces.synth.synthesise import synthesise

MOST_MEASURED_ENTRIES = 1 << 28
"""Steps x layers x heads x blocks up to which the result is read back and measured."""
BYTES_PER_ELEMENT = 2
DEFAULT_STEPS = 128
FEWEST_MEASURED_STEPS = 17
Number = TypeVar("Number", int, float)


def synth(
    source: str,
    out: str,
    *,
    model: str | None,
    context: int | None,
    steps: int | None,
    seed: int,
    group: str | None,
    block_size: int,
    layers: str | None,
    budget: int | None,
    churn: float | None,
    acceptance: str | None,
    save: str | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Write the trace and print what it reached beside what was asked for."""
    if Path(out).exists() and (not Path(out).is_dir() or any(Path(out).iterdir())):
        raise InputError(f"--out {out}: exists already")
    if save is not None and (Path(save).is_dir() or not Path(save).absolute().parent.is_dir()):
        raise InputError(f"--save-statistics {save}: is a folder, or its folder does not exist")
    statistics = _statistics(source, group, block_size, churn)
    if acceptance is not None:
        statistics = with_acceptance(statistics, _numbers("--acceptance", acceptance, float))
    geometry, full_layers = _geometry(model, statistics)
    chosen = full_layers if layers is None else _numbers("--layers", layers, int)
    context_tokens = statistics.context_tokens if context is None else context
    num_steps = DEFAULT_STEPS if steps is None else steps
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), disable=quiet or not sys.stderr.isatty(), transient=True)
    with told_on_interruption(lambda: f"{out} is not written"), bar:
        task = bar.add_task("synthesising", total=None)
        folder = synthesise(
            statistics,
            geometry,
            context_tokens,
            num_steps,
            seed,
            Path(out),
            layers=chosen,
            max_budget_tokens=budget,
            command=shlex.join(["oasis-sim", *sys.argv[1:]]),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if save is not None:
        save_statistics(statistics, Path(save))
    with told_on_interruption(lambda: f"{folder} is whole, but not measured back"):
        rows = _achieved(statistics, folder, num_steps, len(chosen), geometry, context_tokens)
    if as_json:
        effect = _churn_effect(statistics, geometry, len(full_layers)) if statistics.kind == "published" else None
        print_json({"out": str(folder), "source": statistics.source, "churn_effect": effect, "rows": rows})
        return 0
    print(f"{folder}: synthesised, not recorded, from {statistics.source}")
    for text in statistics.assumptions:
        print(f"  assumed: {text}")
    if statistics.kind == "published":
        print(_effect_lines(_churn_effect(statistics, geometry, len(full_layers))))
    if rows:
        if context_tokens != statistics.context_tokens:
            print(f"targets hold at {statistics.context_tokens:,} tokens of context, achieved is at {context_tokens:,}")
        if len(chosen) < len(full_layers):
            print(
                f"targets are means over all layers of the source, achieved is the mean of the {len(chosen)} generated"
            )
        print_rows(rows)
    else:
        few = num_steps < FEWEST_MEASURED_STEPS
        print(f"not measured back: {f'fewer than {FEWEST_MEASURED_STEPS} steps' if few else 'too large'}")
    print(f"next: oasis-sim trace check {shlex.quote(str(folder))}")
    return 0


def _statistics(source: str, group: str | None, block_size: int, churn: float | None) -> TraceStatistics:
    """Of a recipe's name, a recipe or statistics file, or a trace."""
    if source in recipe_names() or Path(source).suffix == ".yaml":
        if group is not None:
            raise InputError("--group: names a request of a trace; a recipe has none")
        content = {} if source in recipe_names() else _mapping(source)
        if "set_sizes" in content:
            if churn is not None:
                raise InputError("--churn: the open input of a recipe; statistics have their churn measured")
            return validated_statistics(content, source)
        return recipe_statistics(load_recipe(source, churn))
    if churn is not None:
        raise InputError("--churn: the open input of a recipe; a trace has its churn measured")
    try:
        location = resolve(source)
    except InputError as error:
        raise InputError(f"{error}; recipes: {', '.join(recipe_names())}") from None
    if Path(location).is_file() and not is_zipfile(location):
        raise InputError(
            f"--from {source}: is neither a trace (a folder or .zarr.zip) nor a recipe or statistics (.yaml)"
        )
    from simulator.verified_trace import open_verified

    trace = open_verified(location)
    return measure(trace.group(group or trace.group_names[0]), block_size)


def _mapping(path: str) -> dict[str, Any]:
    """Of a YAML file. Raises InputError in one line."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise InputError(f"{path}: cannot be read as YAML: {reason}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected the keys of a recipe or of statistics")
    return content


def _geometry(model: str | None, statistics: TraceStatistics) -> tuple[ModelGeometry, tuple[int, ...]]:
    """Geometry and the layers that select: the full-attention ones of the source's model, or of `model`."""
    if model is None:
        windowed = set(statistics.model.window_layers)
        return statistics.model, tuple(i for i in range(statistics.model.num_layers) if i not in windowed)
    from simulator.catalog import load_model

    spec = load_model(model)
    if spec.mla is not None:
        raise InputError(f"--model {model}: MLA caches one latent for all heads; traces rank blocks per KV head")
    geometry = ModelGeometry(
        name=spec.name,
        num_layers=spec.num_layers,
        num_query_heads=spec.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
    )
    return geometry, spec.full_attention_layers


def _numbers(flag: str, text: str, kind: type[Number]) -> tuple[Number, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{flag}: expected {what} with commas between them, got {text!r}") from None


def _achieved(
    statistics: TraceStatistics,
    folder: Path,
    num_steps: int,
    num_layers: int,
    geometry: ModelGeometry,
    context_tokens: int,
) -> list[dict[str, Any]]:
    blocks = context_tokens // statistics.block_size_tokens
    if (
        num_steps * num_layers * geometry.num_kv_heads * blocks > MOST_MEASURED_ENTRIES
        or num_steps < FEWEST_MEASURED_STEPS
    ):
        return []
    trace = open_trace(folder)
    achieved = measure(trace.group(trace.group_names[0]), statistics.block_size_tokens, statistics.set_sizes)
    return [
        {
            "statistic": row.statistic,
            "blocks": row.set_size_blocks,
            "target": _rounded(row.target),
            "achieved": _rounded(row.achieved),
        }
        for row in compare(statistics, achieved)
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _churn_effect(statistics: TraceStatistics, geometry: ModelGeometry, num_layers: int) -> list[dict[str, Any]]:
    """Bytes that cross the link per token without a cap, at each set size: churn x K x block x layers x heads."""
    head = statistics.layers[0].heads[0]
    block_bytes = 2 * statistics.block_size_tokens * geometry.head_dim * BYTES_PER_ELEMENT
    return [
        {
            "set_size_blocks": size,
            "churn": round(1 - row[0], 4),
            "uncapped_bytes_per_token": round((1 - row[0]) * size * block_bytes * num_layers * geometry.num_kv_heads),
        }
        for size, row in zip(statistics.set_sizes, head.persistence, strict=True)
    ]


def _effect_lines(effect: list[dict[str, Any]]) -> str:
    return "\n".join(
        f"  churn {row['churn']:.3f} of the best {row['set_size_blocks']} blocks: "
        f"{row['uncapped_bytes_per_token'] / 1e6:.1f} MB a token cross the link without a cap (bf16)"
        for row in effect
    )
