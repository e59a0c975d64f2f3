"""Replay a policy on a recorded request: attention trace in, demand out. Exact and free of time.

Depends only on the trace, the policy and the mapping, so that its result is cached under their content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.cache import load_arrays, store_arrays
from simulator.demand import COUNT_FIELDS, REMOTE_FIELDS, SHARE_FIELDS, Demand
from simulator.fetch_cap import allowed_blocks
from simulator.iterations import steps_of
from simulator.mapping import Mapping
from simulator.predictors import PredictedRanking, predicted_ranking, selector_ranking
from simulator.replay_settings import ReplaySettings, blocks_per_step, resolve_settings
from simulator.selectors.table import SELECTORS
from simulator.specs.policy import PolicySpec
from traces.errors import TraceError
from traces.group import TraceGroup
from traces.mass import BlockMass, unit_mass

REPLAY_VERSION = 4
"""Raised with every change of a rule, so that no older result is taken from the cache."""

MASS_BITS = 44
"""Integer mass of a level is 2^44 · its mass: sums of 2^18 blocks stay below 2^63 and do not depend on their order."""


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """Kernel output per replayed head: counts int32 [kinds, G, S], mass int64 [G, S], coverage uint8 [G, S]."""

    counts: NDArray[np.int32]
    mass: NDArray[np.int64]
    coverage: NDArray[np.uint8]
    remote: NDArray[np.int32]
    """[3, G, S], `REMOTE_FIELDS`; zeros where host memory is not looked at."""


@dataclass(frozen=True, slots=True)
class ReplayedHeads:
    """Which trace heads are replayed and what serves each head of the model.

    layer, head: int32 [G] in the trace. scope_start: int32 [scopes + 1], heads that share a cap's credit.
    serves: int64 [L, H] of the model, index into G.
    """

    layer: NDArray[np.int32]
    head: NDArray[np.int32]
    scope_start: NDArray[np.int32]
    serves: NDArray[np.int64]


def replay(
    group: TraceGroup,
    policy: PolicySpec,
    mapping: Mapping,
    seed: int = 0,
    *,
    per_head: bool = False,
    use_cache: bool = True,
    host_keeps_new: bool = False,
) -> Demand:
    """Demand of `policy` on one recorded request, for the model of `mapping`.

    With verified drafts its rows are iterations. `host_keeps_new`: host residency `fetched` keeps new KV, too.

    `policy.kv_budget_tokens` must be an integer. `seed` matters only to the random predictor. `per_head` adds
    [S, L, H] arrays, which are not cached. Raises InputError for a policy that the trace cannot serve and TraceError
    for a ranking that lacks blocks it must have.
    """
    group, policy = steps_of(group, policy)
    settings = replace(resolve_settings(group, policy), host_keeps_new=host_keeps_new)
    key = {
        "kind": "demand",
        "replay_version": REPLAY_VERSION,
        "trace": group.content_hash,
        "group": group.name,
        "layer_of": mapping.layer_of.tolist(),
        "head_of": mapping.head_of.tolist(),
        "policy": asdict(settings),
        "seed": seed if settings.predictor == "random" else None,
    }
    cached = load_arrays(key) if use_cache and not per_head else None
    if cached is not None:
        arrays, meta = cached
        values: dict[str, Any] = {**arrays, **meta}
        return Demand(**values)
    demand = _replay(group, settings, mapping, seed, per_head)
    if use_cache:
        values = {field.name: getattr(demand, field.name) for field in fields(Demand) if field.name != "per_head"}
        arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
        store_arrays(key, arrays, {name: value for name, value in values.items() if name not in arrays})
    return demand


def replay_by_gpu(
    group: TraceGroup, policy: PolicySpec, mappings: Sequence[Mapping], seed: int = 0, host_keeps_new: bool = False
) -> tuple[Demand, ...]:
    """Demand of each GPU of a replica, given its heads; GPUs that hold the same heads share one object."""
    demands: dict[tuple[int, ...], Demand] = {}
    for mapping in mappings:
        heads = tuple(mapping.head_of)
        if heads not in demands:
            demands[heads] = replay(group, policy, mapping, seed, host_keeps_new=host_keeps_new)
    return tuple(demands[tuple(mapping.head_of)] for mapping in mappings)


def _replay(group: TraceGroup, settings: ReplaySettings, mapping: Mapping, seed: int, per_head: bool) -> Demand:
    num_blocks = blocks_per_step(group, settings.block_size_tokens)
    admission, corrected_share = 0, 0.0
    if settings.selector == "all":
        arrays = _read_everything(num_blocks, len(mapping.layer_of), len(mapping.head_of))
    else:
        heads = replayed_heads(mapping, settings.fetch_cap_scope)
        true_ids = selector_ranking(group, settings, num_blocks)
        predicted = predicted_ranking(group, settings, num_blocks, true_ids, seed)
        mass = group.mass(settings.block_size_tokens)
        misses = miss_arrays(group, settings)
        out = run_kernel(settings, num_blocks, true_ids, predicted, mass.levels, heads, misses)
        _require_full_rankings(group, settings, num_blocks, out, heads)
        arrays = _per_head_arrays(settings, num_blocks, out, mass, heads)
        resident = min(settings.capacity, true_ids.shape[-1], int(num_blocks[0]) - 1)
        if settings.miss_rule in ("stall", "correct"):
            steady = misses.repairs[settings.steady_start : settings.steady_stop]
            corrected_share = float(steady[:, mapping.layer_of][:, :, mapping.head_of].mean())
        admission = 0 if settings.residency == "everything" else resident * heads.serves.size
    summed = {name: array.sum(axis=2, dtype=array.dtype) for name, array in arrays.items()}
    return Demand(
        **summed,
        num_blocks=num_blocks,
        num_kv_heads=len(mapping.head_of),
        num_kept=settings.num_kept,
        num_slots=settings.num_slots,
        lookahead_k=settings.lookahead_k,
        admission_blocks=admission,
        corrected_share=corrected_share,
        steady_start=settings.steady_start,
        steady_stop=settings.steady_stop,
        tokens=group.tokens_per_step,
        per_head=arrays if per_head else None,
    )


def replayed_heads(mapping: Mapping, fetch_cap_scope: str) -> ReplayedHeads:
    """Replay what differs: each (trace layer, trace head) once, unless heads compete for one cap's credit."""
    num_layers, num_heads = len(mapping.layer_of), len(mapping.head_of)
    layers, layer_index = np.unique(mapping.layer_of, return_inverse=True)
    heads, head_index = np.unique(mapping.head_of, return_inverse=True)
    if fetch_cap_scope == "request":
        layers, layer_index = mapping.layer_of, np.arange(num_layers)
    if fetch_cap_scope != "head":
        heads, head_index = mapping.head_of, np.arange(num_heads)
    per_scope = {"head": 1, "layer": len(heads), "request": len(layers) * len(heads)}[fetch_cap_scope]
    total = len(layers) * len(heads)
    return ReplayedHeads(
        layer=np.repeat(layers, len(heads)).astype(np.int32),
        head=np.tile(heads, len(layers)).astype(np.int32),
        scope_start=np.arange(0, total + 1, per_scope, dtype=np.int32),
        serves=layer_index[:, None] * len(heads) + head_index[None, :],
    )


def integer_mass() -> NDArray[np.int64]:
    """Integer mass of each of the 256 levels, so that sums are exact in any order."""
    return np.rint(unit_mass().astype(np.float64) * 2.0**MASS_BITS).astype(np.int64)


@dataclass(frozen=True, slots=True)
class MissArrays:
    """What decides about misses per step, layer and head of the trace, [S, L, H]; one element where nothing does."""

    repairs: NDArray[np.uint8]
    """1: what the real query selects and is absent is fetched first."""
    enough: NDArray[np.int64]
    """Integer mass below which a head reads every block."""


def miss_arrays(group: TraceGroup, settings: ReplaySettings) -> MissArrays:
    repairs = np.zeros((1, 1, 1), dtype=np.uint8)
    enough = np.zeros((1, 1, 1), dtype=np.int64)
    size = settings.block_size_tokens
    if settings.miss_rule == "stall":
        repairs = np.ones((group.num_positions, len(group.layers(size)), group.num_kv_heads), dtype=np.uint8)
    if settings.correction_cosine is not None:
        cosines = group.query_cos(size)
        assert cosines is not None
        repairs = ((cosines < settings.correction_cosine) | (settings.correction_cosine == 1.0)).astype(np.uint8)
    if settings.dense_below_recall is not None:
        totals = integer_mass()[group.mass(size).levels].sum(axis=-1)
        enough = np.ceil(settings.dense_below_recall * totals.astype(np.float64)).astype(np.int64)
    return MissArrays(repairs, enough)


def run_kernel(
    settings: ReplaySettings,
    num_blocks: NDArray[np.int32],
    true_ids: NDArray[np.int32],
    predicted: PredictedRanking,
    levels: NDArray[np.uint8],
    heads: ReplayedHeads,
    misses: MissArrays,
) -> HeadCounts:
    """Run the compiled batch loop over all replayed heads."""
    from simulator.host_cache import make_host_cache
    from simulator.replay_kernel import COUNTS, replay_heads
    from simulator.residency_kernel import make_state

    num_steps, num_replayed, per_scope = len(num_blocks), len(heads.layer), int(heads.scope_start[1])
    out = HeadCounts(
        counts=np.zeros((len(COUNTS), num_replayed, num_steps), dtype=np.int32),
        mass=np.zeros((num_replayed, num_steps), dtype=np.int64),
        coverage=np.zeros((num_replayed, num_steps), dtype=np.uint8),
        remote=np.zeros((len(REMOTE_FIELDS), num_replayed, num_steps), dtype=np.int32),
    )
    replay_heads(
        num_blocks,
        _read_only(true_ids),
        _read_only(predicted.ids),
        predicted.shift,
        _read_only(predicted.ids if predicted.near_ids is None else predicted.near_ids),
        _read_only(levels),
        integer_mass(),
        heads.layer,
        heads.head,
        heads.scope_start,
        allowed_blocks(Fraction(settings.fetch_cap), settings.num_kept * per_scope, num_steps),
        settings.num_kept,
        settings.capacity,
        settings.lookahead_k,
        settings.predictor == "previous-layer",
        settings.lookahead_mode == "refine",
        settings.miss_rule in ("stall", "correct"),
        misses.repairs,
        settings.miss_rule == "dense",
        misses.enough,
        settings.eviction == "lowest-score",
        *make_state(per_scope, settings.num_slots, int(num_blocks.max())),
        np.zeros(settings.num_slots, dtype=np.int64),
        out.counts,
        out.mass,
        out.coverage,
        settings.host_blocks,
        settings.host_keeps_new,
        *make_host_cache(per_scope, int(num_blocks.max())),
        out.remote,
    )
    return out


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A contiguous view without the right to write: one compiled kernel serves recorded and computed arrays."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _require_full_rankings(
    group: TraceGroup, settings: ReplaySettings, num_blocks: NDArray[np.int32], out: HeadCounts, heads: ReplayedHeads
) -> None:
    need = np.minimum(settings.num_kept, num_blocks)
    short = np.argwhere(out.counts[0] + out.counts[1] < need[None, :])
    if len(short):
        g, step = map(int, short[0])
        found = int(out.counts[0, g, step] + out.counts[1, g, step])
        raise TraceError(
            group.name,
            f"{SELECTORS[settings.selector].ranking or settings.selector} at {settings.block_size_tokens} tokens",
            f"ranks {found} selectable blocks, {int(need[step])} are needed",
            (step, int(heads.layer[g]), int(heads.head[g])),
        )


def _per_head_arrays(
    settings: ReplaySettings,
    num_blocks: NDArray[np.int32],
    out: HeadCounts,
    mass: BlockMass,
    heads: ReplayedHeads,
) -> dict[str, NDArray[np.int32 | np.float64]]:
    """Fields of Demand per head of the model, [S, L, H]."""
    from simulator.replay_kernel import COUNTS

    counts = dict(zip(COUNTS, out.counts, strict=True))
    if settings.host_blocks > 0:
        counts |= zip(REMOTE_FIELDS, out.remote, strict=True)
    if settings.residency == "everything":
        counts = {name: np.zeros_like(array) for name, array in counts.items()} | {
            "hit": counts["hit"] + counts["missed"],
            "overlap": counts["overlap"],
        }
    overlap = counts.pop("overlap") / np.minimum(settings.num_kept, num_blocks)
    recall, recall_upper = recall_bounds(out, mass, heads)
    rows = {**counts, "overlap": overlap, "recall": recall, "recall_upper": recall_upper}
    return {name: np.ascontiguousarray(np.moveaxis(array[heads.serves], 2, 0)) for name, array in rows.items()}


def recall_bounds(
    out: HeadCounts, mass: BlockMass, heads: ReplayedHeads
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(recall, recall_upper) float64 [G, S]: the share of softmax mass on attended blocks, at least and at most.

    Recorded levels sum to 1 − outside. Mass outside may lie on attended blocks only where attention reads a block
    without a recorded mass, and lies on them for certain where it reads every block.
    """
    from simulator.replay_kernel import total_mass

    totals = np.zeros(out.mass.shape, dtype=np.int64)
    total_mass(_read_only(mass.levels), integer_mass(), heads.layer, heads.head, totals)
    outside = mass.outside[:, heads.layer, heads.head].T.astype(np.float64)
    share = np.divide(out.mass, totals, out=np.zeros(out.mass.shape), where=totals > 0)
    recall = share * (1.0 - outside)
    upper = np.where(out.coverage & 1, np.minimum(recall + outside, 1.0), recall)
    whole = (out.coverage & 2) > 0
    return np.where(whole, 1.0, recall), np.where(whole, 1.0, upper)


def _read_everything(
    num_blocks: NDArray[np.int32], num_layers: int, num_heads: int
) -> dict[str, NDArray[np.int32 | np.float64]]:
    """Dense attention: every block is resident and read, nothing moves."""
    shape = (len(num_blocks), num_layers, num_heads)
    arrays: dict[str, NDArray[np.int32 | np.float64]] = {name: np.zeros(shape, dtype=np.int32) for name in COUNT_FIELDS}
    arrays["hit"] = np.broadcast_to(num_blocks[:, None, None], shape)
    return arrays | {name: np.ones(shape) for name in SHARE_FIELDS}
