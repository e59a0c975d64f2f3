"""What is known of a request's attention by block: measured from a trace, or published figures and assumptions.

Everything is about sets: the K best blocks of a KV head at a step, for several K. YAML in, YAML out.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import yaml
from pydantic import Field, ValidationError, model_validator

from traces.errors import InputError
from traces.schema import Attributes, Count, ModelGeometry, Share

Row = tuple[Share, ...]
_GROUPS_PER_OCTAVE, _GROUPS_AT_LEAST = 3, 16
_GROUPS_TOLERANCE_BLOCKS = 0.01
"""Files hold rounded numbers."""
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class DraftState(Attributes):
    """Draft rows of one kind at one distance j, by K: how they overlap the real rankings around them."""

    with_true: Row
    """|draft ∩ true| / K, `true` of the position that the draft is for."""
    with_before: Row
    """|draft ∩ true| / K, `true` of the position before; rows after a right one left out, unless these are right."""
    with_next: Row = ()
    """|draft ∩ draft of the next position| / K, where that is of the same kind; empty where too few are."""
    after_right: Row = ()
    """|draft ∩ draft of the position before| / K, where that one is right and this one is not; likewise. A wrong guess
    often is a neighbour's token."""
    before_right: Row = ()
    """|draft ∩ draft of the next position| / K, where that one is right and this one is not; likewise."""


class HeadStatistics(Attributes):
    """One KV head of one layer. `Row`s run over `set_sizes`, inner tuples over what is named."""

    persistence: tuple[Row, ...] = Field(min_length=1)
    """By K, then by `lags`: share of the K best that are among the K best `lag` steps later. 1 − its first entry
    is the churn of the set."""
    sink: tuple[Row, ...]
    """By K, then by block 0, 1, …: share of steps in which the first blocks are among the K best."""
    recency: tuple[Row, ...]
    """By K, then by age: the same of the newest selectable block, of the one before it, ….; by age in blocks, so
    that it holds in tokens whatever the context."""
    adjacency: Row
    """P(block b + 1 among the K best, given that b is), over blocks that are neither first nor recent."""
    popularity: tuple[Row, ...]
    """By K, then by the groups of `popularity_groups`, one octave after the other: mean share of steps in which a
    block of that group is among the K best; the most popular blocks first, at each K by its own order."""
    drafts: tuple[dict[str, DraftState], ...] = ()
    """By distance − 1: overlaps by kind of row (see `DraftKinds`)."""
    sink_mass: Share = 0.0
    """Mean softmax mass of block 0."""
    open_mass: Share = 0.0
    """Mean softmax mass of the block that holds the newest token."""
    octaves_by_rank: tuple[float, ...] = ()
    """Mean log2 of mass, by rank at `mass_ranks`, relative to the largest, without the two blocks above."""
    exact_overlap: Row = ()
    """|true ∩ exact| / K: how far the score order is from the mass order."""
    exact_persistence: Row = ()
    """Share of the K best by mass that are among them one step later."""
    true_coverage: Row = ()
    """Softmax mass on the K best by score, the open block apart."""
    stale_loss: tuple[float, ...] = ()
    """By K: softmax mass that the K best by score hold more than the K best of the step before; steps in which a block
    fills left out."""
    exact_coverage: Row = ()
    """Softmax mass on the K best by mass, the open block apart."""
    rank_noise: float | None = None
    """Standard deviation of the step-to-step change of the normal score of a block's rank, among ranked blocks."""


class LayerStatistics(Attributes):
    layer: int = Field(ge=0)
    heads: tuple[HeadStatistics, ...] = Field(min_length=1)


class DraftKinds(Attributes):
    """How often rows of each kind occur at one distance: right, wrong and fallback (no guess: the issuing step's
    ranking stands in) where tokens say so, else all in one kind."""

    shares: dict[str, Share]
    repeats: Share = 0.0
    """P(the next row is right, given that this one is), at least its share."""


class TraceStatistics(Attributes):
    """Statistics of one request at one block size."""

    name: str = Field(min_length=1)
    kind: Literal["measured", "published"]
    source: str = Field(min_length=1)
    """Trace and its content hash, or the publication."""
    assumptions: tuple[str, ...] = ()
    """What is neither measured nor published, with its reason."""
    model: ModelGeometry
    block_size_tokens: Count
    context_tokens: Count
    num_steps: Count
    set_sizes: tuple[Count, ...] = Field(min_length=1)
    """The K of every row, in blocks, ascending."""
    lags: tuple[Count, ...] = Field(min_length=1)
    mass_ranks: tuple[Count, ...] = ()
    popularity_groups: tuple[tuple[Annotated[float, Field(gt=0)], ...], ...] = Field(min_length=1)
    """Numbers of blocks in groups of like popularity, by octave of age (`age_octaves`) beyond `recency`, all blocks
    but the sinks. One octave only: age is taken as not to matter there."""
    draft_kinds: tuple[DraftKinds, ...] = ()
    layers: tuple[LayerStatistics, ...] = Field(min_length=1)

    @property
    def num_blocks(self) -> int:
        """Blocks at the first step, the open one included."""
        return -(-self.context_tokens // self.block_size_tokens)

    @model_validator(mode="after")
    def _rows_fit(self) -> TraceStatistics:
        sizes = len(self.set_sizes)
        if list(self.set_sizes) != sorted(set(self.set_sizes)) or self.set_sizes[-1] >= self.num_blocks:
            raise ValueError(f"set_sizes must ascend and stay below the {self.num_blocks} blocks of the context")
        for layer in self.layers:
            for index, head in enumerate(layer.heads):
                where = f"layer {layer.layer}, head {index}"
                rows = (head.persistence, head.sink, head.recency)
                if any(len(row) != sizes for row in rows) or any(len(r) != len(self.lags) for r in head.persistence):
                    raise ValueError(f"{where}: needs {sizes} rows, persistence of {len(self.lags)} lags each")
                recent = len(head.recency[0])
                between = self.num_blocks - 1 - recent - len(head.sink[0])
                groups = [number for octave in self.popularity_groups for number in octave]
                if abs(sum(groups) - between) > _GROUPS_TOLERANCE_BLOCKS:
                    raise ValueError(f"popularity_groups must hold the {between} blocks between sinks and recent ones")
                if any(len(row) != len(groups) for row in head.popularity):
                    raise ValueError(f"{where}: popularity needs rows of {len(groups)} groups")
                if len(head.drafts) != len(self.draft_kinds):
                    raise ValueError(f"{where}: {len(head.drafts)} draft distances, expected {len(self.draft_kinds)}")
                for kinds, states in zip(self.draft_kinds, head.drafts, strict=True):
                    if set(kinds.shares) != set(states):
                        raise ValueError(f"{where}: draft kinds {sorted(states)}, expected {sorted(kinds.shares)}")
                if len(head.octaves_by_rank) not in (0, len(self.mass_ranks)):
                    raise ValueError(f"{where}: octaves_by_rank needs {len(self.mass_ranks)} entries")
        return self


def popularity_groups(num_blocks: int) -> tuple[int, ...]:
    """Sizes of groups of `num_blocks` blocks sorted by popularity: a few per octave of rank, since the first blocks
    decide small sets, and none larger than a share of all, since all decide large ones."""
    octaves = np.geomspace(1.0, num_blocks, 1 + int(_GROUPS_PER_OCTAVE * np.log2(num_blocks)))
    evenly = np.linspace(0.0, num_blocks, 1 + min(_GROUPS_AT_LEAST, num_blocks))
    edges = np.unique(np.rint(np.concatenate([evenly, octaves])).astype(int))
    return tuple(np.diff(edges).tolist())


def age_octaves(num_recent: int, num_older: int) -> list[tuple[int, int]]:
    """Ages [first, last) in blocks of the `num_older` blocks older than the `num_recent` newest, by octave; a last
    octave less than half full goes with the one before."""
    edges = [num_recent]
    while edges[-1] * 2 < num_recent + num_older:
        edges.append(edges[-1] * 2)
    if len(edges) > 1 and num_recent + num_older - edges[-1] < edges[-1] // 2:
        edges.pop()
    edges.append(num_recent + num_older)
    return list(itertools.pairwise(edges))


def save_statistics(statistics: TraceStatistics, path: Path) -> None:
    """Write as YAML."""
    plain = _plain(statistics.model_dump(mode="json"))
    path.write_text(yaml.dump(plain, Dumper=_DUMPER, sort_keys=False, width=120))


def load_statistics(path: Path) -> TraceStatistics:
    """Read from YAML. Raises InputError naming file and key."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: {' '.join(str(error).split())}") from error
    return validated_statistics(data, str(path))


def validated_statistics(data: Any, where: str) -> TraceStatistics:
    try:
        return TraceStatistics.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise InputError(f"{where}: {key}{': ' if key else ''}{first['msg'].removeprefix('Value error, ')}") from error


def _plain(value: Any) -> Any:
    """Floats rounded to what sampling can resolve."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
