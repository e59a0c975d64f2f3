"""Statistics from a publication: its few figures, and for everything else assumptions that carry their reason."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import Field, ValidationError

from traces.errors import InputError
from traces.schema import Attributes, Count, ModelGeometry, Share
from traces.synth.levels import Nodes
from traces.synth.normal import FloatArray, above, both_above_fast, threshold_of
from traces.synth.statistics import DraftKinds, DraftState, HeadStatistics, LayerStatistics, TraceStatistics

FOLDER = Path(__file__).resolve().parent.parent / "data" / "recipes"
_LAGS = (1, 2, 4, 8, 16, 32, 64)
_SHARES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
_STRETCH = (0.2, 8.0)
_GRID = 1.0 - np.linspace(1.0, 0.0, 201) ** 2


class Published(Attributes):
    """Overlaps of sets of `set_size_blocks`."""

    set_size_blocks: Count
    previous_overlap: Share
    lookahead_overlap: Share
    """At distance 1."""


class OpenInput(Attributes):
    """What the publication leaves open and the result depends on."""

    churn: Share
    """Share of the `set_size_blocks` best that one step replaces."""
    set_size_blocks: Count
    reason: str = Field(min_length=1)


class Assumed(Attributes):
    """Shape of everything that was not published; scores in standard deviations of a block's noise."""

    level_spread: float = Field(gt=0)
    """Standard deviation of blocks' levels, taken as normal."""
    recent_level: float
    """Of the newest block, falling off exponentially with its age."""
    recent_tokens: float = Field(gt=0)
    sink_level: float
    correlation_decay: dict[Count, Share]
    """By lag: the noise's autocorrelation as a share of that at lag 1."""
    known_by_distance: tuple[Share, ...] = Field(min_length=1)
    """How much a draft knows at distance 1, 2, …, as a share of what it knows at distance 1."""
    level_correlation: Share
    sink_mass: Share
    open_mass: Share
    mass_ranks: tuple[Count, ...]
    octaves_by_rank: tuple[float, ...]
    exact_correlation: Share
    """Of a block's mass with its score."""
    reasons: tuple[str, ...] = Field(min_length=1)


class Recipe(Attributes):
    name: str = Field(min_length=1)
    source: str = Field(min_length=1)
    model: ModelGeometry
    block_size_tokens: Count
    context_tokens: Count
    """At which the figures are taken to hold."""
    published: Published
    open_input: OpenInput
    assumed: Assumed


def recipe_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def load_recipe(name_or_path: str, churn: float | None = None) -> Recipe:
    """A shipped recipe or a YAML file, with the open input replaced where `churn` is given. Raises InputError."""
    path = FOLDER / f"{name_or_path}.yaml" if name_or_path in recipe_names() else Path(name_or_path)
    if path.suffix != ".yaml" or not path.is_file():
        near = difflib.get_close_matches(name_or_path, recipe_names(), n=3, cutoff=0.3) or list(recipe_names())
        raise InputError(f"recipe '{name_or_path}' is neither shipped nor a YAML file; shipped: {', '.join(near)}")
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        if churn is not None and isinstance(data, dict):
            data = {**data, "open_input": {**data.get("open_input", {}), "churn": churn, "reason": "given"}}
        return Recipe.model_validate(data)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def recipe_statistics(recipe: Recipe) -> TraceStatistics:
    """One layer with one head that has the published overlaps and the open churn, the same for all heads.

    Raises InputError where they cannot hold together: the sets would overlap as much without any correlation.
    """
    published, churn, assumed = recipe.published, recipe.open_input, recipe.assumed
    sizes = tuple(sorted({published.set_size_blocks, churn.set_size_blocks, 2 * churn.set_size_blocks}))
    nodes = _stretched(recipe, _nodes(recipe))
    thresholds = nodes.thresholds(np.array(sizes, dtype=np.float64))
    curves = {k: _overlaps(nodes, theta, k) for k, theta in zip(sizes, thresholds, strict=True)}
    previous = _lag_1(recipe, curves)
    known = sorted(previous)
    lag_1 = np.interp(np.log(sizes), np.log(known), [previous[k] for k in known])
    decay = np.interp(np.log(_LAGS), np.log(list(assumed.correlation_decay)), list(assumed.correlation_decay.values()))
    ahead = _solve(curves, published.set_size_blocks, published.lookahead_overlap, "lookahead_overlap")
    at_published = float(np.interp(published.set_size_blocks, sizes, lag_1))
    knows = (ahead - at_published) / (1.0 - at_published)
    if knows < 0:
        raise InputError(f"{recipe.name}: lookahead_overlap is below previous_overlap; such drafts are not modelled")
    drafts, kinds = [], []
    for distance, share in enumerate(assumed.known_by_distance, start=1):
        apart = lag_1 * np.interp(distance, _LAGS, decay)
        true = _at(curves, sizes, apart + knows * share * (1.0 - apart))
        drafts.append({"all": DraftState(with_true=true, with_before=_at(curves, sizes, lag_1))})
        kinds.append(DraftKinds(shares={"all": 1.0}))
    occupancy = np.stack([above(theta - nodes.levels) for theta in thresholds])
    ages = slice(1, 1 + nodes.num_ages)
    middle = occupancy[:, 1 + nodes.num_ages :]
    mean = (middle * nodes.weight[1 + nodes.num_ages :]).sum(axis=1) / nodes.weight[1 + nodes.num_ages :].sum()
    spread = assumed.level_spread**2
    neighbours = both_above_fast(
        threshold_of(mean), np.full(len(sizes), assumed.level_correlation * spread / (1 + spread))
    )
    blocks = -(-recipe.context_tokens // recipe.block_size_tokens)
    set_share = np.array(sizes) / blocks
    head = HeadStatistics(
        persistence=tuple(_row(np.interp(r * decay, _GRID, curves[k])) for k, r in zip(sizes, lag_1, strict=True)),
        sink=tuple(_row(row[:1]) for row in occupancy),
        recency=tuple(_row(row[ages]) for row in occupancy),
        popularity=tuple(_row(row) for row in middle),
        adjacency=_row(neighbours / mean),
        drafts=tuple(drafts),
        sink_mass=assumed.sink_mass,
        open_mass=assumed.open_mass,
        octaves_by_rank=assumed.octaves_by_rank,
        exact_overlap=_row(
            both_above_fast(threshold_of(set_share), np.full(len(sizes), assumed.exact_correlation)) / set_share
        ),
    )
    return TraceStatistics(
        name=recipe.name,
        kind="published",
        source=recipe.source,
        assumptions=(f"churn {churn.churn} at {churn.set_size_blocks} blocks: {churn.reason}", *assumed.reasons),
        model=recipe.model,
        block_size_tokens=recipe.block_size_tokens,
        context_tokens=recipe.context_tokens,
        num_steps=2 * _LAGS[-1],
        set_sizes=sizes,
        lags=_LAGS,
        mass_ranks=assumed.mass_ranks,
        popularity_groups=(tuple(nodes.weight[1 + nodes.num_ages :].tolist()),),
        draft_kinds=tuple(kinds),
        layers=(LayerStatistics(layer=0, heads=(head,)),),
    )


def _nodes(recipe: Recipe) -> Nodes:
    """One sink, the recent blocks by age, and the popularity curve at `_SHARES`."""
    assumed, size = recipe.assumed, recipe.block_size_tokens
    blocks = -(-recipe.context_tokens // size)
    num_ages = min(int(2 * assumed.recent_tokens / size), blocks // 4)
    age_tokens = np.arange(num_ages) * size
    middle = blocks - 2 - num_ages
    at = np.clip(_SHARES, 0.5 / middle, 1.0 - 0.5 / middle)
    edges = np.concatenate([[0.0], (at[1:] + at[:-1]) / 2, [1.0]])
    levels = assumed.level_spread * threshold_of(at)
    ages = assumed.recent_level * np.exp(-age_tokens / assumed.recent_tokens)
    weight = np.concatenate([np.ones(1 + num_ages), np.diff(edges) * middle])
    return Nodes(np.concatenate([[assumed.sink_level], ages, levels]), weight, 1, num_ages, (len(levels),))


def _stretched(recipe: Recipe, nodes: Nodes) -> Nodes:
    """Nodes whose levels above the threshold of the open input's set are spread or squeezed, until one noise gives
    both the published overlap and the open churn: the more apart the popular blocks, the steadier the small set."""
    size = recipe.open_input.set_size_blocks
    threshold = float(nodes.thresholds(np.array([size], dtype=np.float64))[0])
    sizes = np.array([recipe.published.set_size_blocks, size], dtype=np.float64)

    def stretched(factor: float) -> Nodes:
        excess = np.maximum(nodes.levels - threshold, 0.0)
        return replace(nodes, levels=nodes.levels + (factor - 1.0) * excess)

    def gap(factor: float) -> float:
        candidate = stretched(factor)
        thresholds = candidate.thresholds(sizes)
        goals = (recipe.published.previous_overlap, 1.0 - recipe.open_input.churn)
        first, second = (
            float(np.interp(goal, _overlaps(candidate, theta, int(k)), _GRID))
            for goal, theta, k in zip(goals, thresholds, sizes, strict=True)
        )
        return first - second

    low, high = _STRETCH
    if sizes[0] == sizes[1] or gap(low) <= 0:
        return nodes if sizes[0] == sizes[1] else stretched(low)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if gap(middle) > 0 else (low, middle)
    return stretched((low + high) / 2)


def _lag_1(recipe: Recipe, curves: dict[int, FloatArray]) -> dict[int, float]:
    """Correlation of the noise at lag 1 by set size, from the published overlap and the open churn."""
    published, churn = recipe.published, recipe.open_input
    return {
        published.set_size_blocks: _solve(
            curves, published.set_size_blocks, published.previous_overlap, "previous_overlap"
        ),
        churn.set_size_blocks: _solve(curves, churn.set_size_blocks, 1.0 - churn.churn, "churn"),
    }


def _overlaps(nodes: Nodes, threshold: float, size: int) -> FloatArray:
    """Overlap of two sets of `size` blocks at each correlation of `_GRID`."""
    both = both_above_fast((threshold - nodes.levels)[:, None], _GRID[None, :])
    curve: FloatArray = np.clip((both * nodes.weight[:, None]).sum(axis=0) / size, 0.0, 1.0)
    return np.maximum.accumulate(curve)


def _solve(curves: dict[int, FloatArray], size: int, overlap: float, key: str) -> float:
    """Correlation at which sets of `size` overlap by `overlap`."""
    curve = curves[size]
    if not curve[0] <= overlap <= 1.0:
        raise InputError(
            f"{key}: sets of {size} blocks cannot overlap by only {overlap:.3f}: with these levels they overlap by "
            f"{curve[0]:.3f} without any correlation of the noise"
        )
    return float(np.interp(overlap, curve, _GRID))


def _at(curves: dict[int, FloatArray], sizes: tuple[int, ...], correlations: FloatArray) -> tuple[float, ...]:
    return _row(np.array([np.interp(r, _GRID, curves[k]) for k, r in zip(sizes, correlations, strict=True)]))


def _row(values: FloatArray) -> tuple[float, ...]:
    return tuple(float(np.clip(value, 0.0, 1.0)) for value in values)
