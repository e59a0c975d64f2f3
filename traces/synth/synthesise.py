"""Write a trace of another geometry and context from statistics (the loop is `synthesise`)."""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from traces.codec import Ids, rank_scores
from traces.errors import InputError
from traces.schema import (
    MASS_LEVELS_PER_OCTAVE,
    BlockSizeAttributes,
    DrafterAttributes,
    GroupAttributes,
    ModelGeometry,
    Provenance,
    TraceAttributes,
)
from traces.staging import staged
from traces.synth.calibrate import fit_heads
from traces.synth.fit import HeadProcess
from traces.synth.kinds import draft_kinds
from traces.synth.process import LayerProcess
from traces.synth.runs import most_typical, num_draws, ranked_rows, scores_of_step
from traces.synth.statistics import TraceStatistics
from traces.writer import StepRecord, TraceWriter

MAX_CONTEXT_TOKENS = 1 << 20
LEVELS_PER_OCTAVE, OCTAVES_PER_UNIT = 16, 1.5
"""A unit of the process (one standard deviation of a block's noise) is stored as 1.5 octaves of score: an assumption
that moves no rank, and keeps the best M blocks within the 16 octaves that levels span."""
DENSE_MASS_BYTES = 64 << 20
"""Up to this size the mass of every block is stored, beyond it that of ranked blocks and the sum of the rest."""
ZSTD_LEVEL = 3
"""Written for use, not for shipping."""


def synthesise(
    statistics: TraceStatistics,
    geometry: ModelGeometry,
    context_tokens: int,
    num_steps: int,
    seed: int,
    out: Path,
    *,
    layers: Sequence[int] | None = None,
    max_budget_tokens: int | None = None,
    command: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the trace folder `out` and return it. Same arguments, same content hash. It appears whole or not at all.

    layers: model layers to generate, default all; each takes the statistics of the layer at its relative depth and
    its KV heads those of the source's heads cyclically. max_budget_tokens: M · P, default the larger of context / 8
    and the largest set measured. progress: called with the steps of layers that are done, and all of them. Memory is
    that of one step of every layer plus 64 steps of ranked blocks and, where a layer has fewer than eight heads, its
    sets of all steps.

    How statistics extend to another context: levels are kept, so that sinks stay as strong and recent blocks as strong
    at the same age in tokens; the popularity curve is kept as a share of the blocks and its tails go on along their
    slope in the normal score; time constants are in steps; mass by rank is kept and falls on along its last slope,
    with constant shares of the sink and of the open block. All of these are assumptions.

    Raises InputError: a context that is too short, too long or would rank fewer blocks than the budget, or
    statistics without mass.
    """
    size = statistics.block_size_tokens
    widest = max(context_tokens // 8, statistics.set_sizes[-1] * size)
    budget = widest if max_budget_tokens is None else max_budget_tokens
    num_ranked = min(budget // size, -(-context_tokens // size) - 1)
    if seed < 0:
        raise InputError(f"seed {seed}: must not be negative")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: exists already")
    _check(statistics, geometry, context_tokens, num_steps, num_ranked, layers)
    chosen = tuple(layers) if layers is not None else tuple(range(geometry.num_layers))
    capacity = -(-(context_tokens + num_steps - 1) // size)
    dense = num_steps * len(chosen) * geometry.num_kv_heads * capacity <= DENSE_MASS_BYTES
    distances = len(statistics.draft_kinds)
    kinds = draft_kinds(statistics, num_steps, np.random.default_rng([seed, 1 << 20]))
    attributes = _attributes(
        statistics, geometry, chosen, context_tokens, num_steps, seed, num_ranked, dense, kinds, command
    )
    draws = num_draws(geometry.num_kv_heads)
    units = num_steps * len(chosen) * (1 + (draws if draws > 1 else 0))
    report = progress or (lambda done, total: None)
    drawn = itertools.count(num_steps, num_steps)
    processes = _processes(
        statistics, geometry, chosen, context_tokens, num_steps, kinds, seed, draws, lambda: report(next(drawn), units)
    )
    with staged(out) as unfinished, TraceWriter(unfinished, attributes[0], zstd_level=ZSTD_LEVEL, target=out) as writer:
        group = writer.group(attributes[2], attributes[1])
        for step in range(num_steps):
            kv_len = context_tokens + step
            records = [_layer_record(process, step, kinds, num_ranked, context_tokens, size) for process in processes]
            group.append(_step_record(records, step, kv_len, size, distances, kinds))
            report(units - (num_steps - step - 1) * len(chosen), units)
    return out


def _processes(
    statistics: TraceStatistics,
    geometry: ModelGeometry,
    layers: Sequence[int],
    context: int,
    num_steps: int,
    kinds: Sequence[NDArray[np.str_]],
    seed: int,
    draws: int,
    report: Callable[[], None],
) -> list[LayerProcess]:
    """Of each layer the most typical of its draws; `report` is called after each that was run for that."""
    size = statistics.block_size_tokens
    first_selectable, capacity = (context - 1) // size, -(-(context + num_steps - 1) // size)
    depth = np.array([(row.layer + 0.5) / statistics.model.num_layers for row in statistics.layers])
    sources = [int(np.argmin(np.abs(depth - (layer + 0.5) / geometry.num_layers))) for layer in layers]
    fitted = fit_heads(statistics, sources)
    ranks = np.array(statistics.mass_ranks, dtype=np.float64)
    sizes = [k for k in statistics.set_sizes if k < first_selectable - len(kinds)]
    processes = []
    for layer, source in zip(layers, sources, strict=True):
        heads = [fitted[source][head % len(fitted[source])] for head in range(geometry.num_kv_heads)]

        def drawn(draw: int, layer: int = layer, heads: Sequence[HeadProcess] = heads) -> LayerProcess:
            rng = np.random.default_rng([seed, layer, draw] if draw else [seed, layer])
            return LayerProcess(heads, capacity, first_selectable, ranks, len(kinds), rng)

        def rows(draw: int, drawn: Callable[[int], LayerProcess] = drawn) -> Ids:
            found = ranked_rows(drawn(draw), kinds, context, num_steps, size, sizes[-1])
            report()
            return found

        processes.append(drawn(most_typical(rows, draws if sizes else 1, sizes)))
    return processes


def _layer_record(
    process: LayerProcess,
    step: int,
    kinds: list[NDArray[np.str_]],
    num_ranked: int,
    context_tokens: int,
    size: int,
) -> tuple[dict[str, tuple[NDArray[np.int32], NDArray[np.uint8]]], NDArray[np.uint8], NDArray[np.float32]]:
    """Rankings [H, M], mass levels [H, n] and rest [H] of one layer at a step, to which its process advances."""
    ranked = {
        f"draft{j}" if j else "true": rank_scores(scores * np.float32(OCTAVES_PER_UNIT), num_ranked, LEVELS_PER_OCTAVE)
        for j, scores in scores_of_step(process, kinds, context_tokens, step, size)
    }
    octaves = process.log2_mass()
    below = MASS_LEVELS_PER_OCTAVE * (octaves - octaves.max(axis=-1, keepdims=True))
    levels = np.maximum(np.rint(255.0 + below), 0.0).astype(np.uint8)
    ids = ranked["true"][0]
    inside = np.exp2(np.take_along_axis(octaves, np.maximum(ids, 0).astype(np.int64), axis=-1)) * (ids >= 0)
    return ranked, levels, np.clip(1.0 - inside.sum(axis=-1, dtype=np.float64), 0.0, 1.0).astype(np.float32)


def _step_record(
    records: Sequence[
        tuple[dict[str, tuple[NDArray[np.int32], NDArray[np.uint8]]], NDArray[np.uint8], NDArray[np.float32]]
    ],
    step: int,
    kv_len: int,
    size: int,
    distances: int,
    kinds: list[NDArray[np.str_]],
) -> StepRecord:
    names = records[0][0]
    rankings = {
        (size, name): (np.stack([r[0][name][0] for r in records]), np.stack([r[0][name][1] for r in records]))
        for name in names
    }
    guesses = []
    for j in range(1, distances + 1):
        kind = str(kinds[j - 1][step]) if step >= j else "fallback"
        guesses.append({"right": 0, "wrong": 1}.get(kind))
    mass = {size: np.stack([r[1] for r in records])}
    return StepRecord(kv_len, 0, rankings, mass, {size: np.stack([r[2] for r in records])}, tuple(guesses))


def _check(
    statistics: TraceStatistics,
    geometry: ModelGeometry,
    context_tokens: int,
    num_steps: int,
    num_ranked: int,
    layers: Sequence[int] | None,
) -> None:
    size = statistics.block_size_tokens
    if not 8 * size <= context_tokens <= MAX_CONTEXT_TOKENS:
        raise InputError(f"context of {context_tokens} tokens: must be {8 * size} … {MAX_CONTEXT_TOKENS}")
    if num_steps <= len(statistics.draft_kinds):
        needed = len(statistics.draft_kinds) + 1
        raise InputError(f"{num_steps} steps: at least {needed} are needed for drafts {needed - 1} positions ahead")
    if num_ranked < 1:
        raise InputError(f"a budget below one block of {size} tokens ranks nothing")
    for layer in layers or ():
        if not 0 <= layer < geometry.num_layers:
            raise InputError(f"layer {layer} is not one of the {geometry.num_layers} layers of {geometry.name}")
    if layers is not None and list(layers) != sorted(set(layers)):
        raise InputError(f"layers {', '.join(map(str, layers))} must ascend without repeats")
    if not statistics.mass_ranks:
        raise InputError(f"statistics {statistics.name!r} have no softmax mass (mass_ranks), so recall is unknown")


def _attributes(
    statistics: TraceStatistics,
    geometry: ModelGeometry,
    layers: tuple[int, ...],
    context_tokens: int,
    num_steps: int,
    seed: int,
    num_ranked: int,
    dense: bool,
    kinds: list[NDArray[np.str_]],
    command: str | None,
) -> tuple[TraceAttributes, GroupAttributes, str]:
    """Attributes of the trace and of its request, and the request's name."""
    software = {name: importlib.metadata.version(name) for name in ("oasis-sim", "numpy", "zarr")}
    notes = [
        f"synthesised, not recorded: from {statistics.source} ({statistics.kind} at {statistics.context_tokens} tokens)"
    ]
    notes += [f"assumption: {text}" for text in statistics.assumptions]
    trace = TraceAttributes(
        name=f"synthesised-{statistics.name}",
        model=geometry,
        provenance=Provenance(command=command, attention="synthesised", software=software, notes="; ".join(notes)),
    )
    names = ("true", *(() if dense else ("exact",)), *(f"draft{j}" for j in range(1, len(kinds) + 1)))
    drafter = None
    if kinds:
        rows = [kind[j:] for j, kind in enumerate(kinds, start=1)]
        known = not any((row == "all").any() for row in rows)
        shares = {name: tuple(round(float((row == name).mean()), 6) for row in rows) for name in ("right", "fallback")}
        drafter = DrafterAttributes(
            name="synthesised" if known else "synthesised; which guesses were right is not modelled",
            distances=len(kinds),
            settings={"source": statistics.source},
            acceptance=shares["right"] if known else None,
            fallback_share=shares["fallback"] if known else None,
        )
    group = GroupAttributes(
        context_tokens=context_tokens,
        steps_planned=num_steps,
        score_levels_per_octave=LEVELS_PER_OCTAVE,
        blocks={
            statistics.block_size_tokens: BlockSizeAttributes(
                layers=layers, max_ranked_blocks=num_ranked, rankings=names, block_mass=dense
            )
        },
        drafter=drafter,
        prompt=f"none: synthesised from {statistics.source}",
        sampling={"synthesis_seed": seed},
    )
    return trace, group, "synthesised"
