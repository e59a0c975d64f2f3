"""What a trace says about itself: the attributes of its root and of each group, validated on reading.

Everything but `name` and `provenance` is semantic: it enters the content hash.
"""

from __future__ import annotations

import itertools
import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

STEPS_PER_CHUNK = 64
MASS_LEVELS_PER_OCTAVE = 8
MAX_DRAFT_DISTANCE = 8

Count = Annotated[int, Field(gt=0, le=2**31 - 1)]
Share = Annotated[float, Field(ge=0, le=1)]


class Attributes(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )


class ModelGeometry(Attributes):
    """The recorded model, as far as attention sees it."""

    name: str = Field(min_length=1)
    num_layers: Annotated[int, Field(gt=0, le=4096)]
    num_query_heads: Annotated[int, Field(gt=0, le=4096)]
    num_kv_heads: Annotated[int, Field(gt=0, le=4096)]
    head_dim: Annotated[int, Field(gt=0, le=65536)]
    window_layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Layers that attend to the last `window_tokens` only: they select nothing and are not ranked."""
    window_tokens: Count | None = None


class Provenance(Attributes):
    """How the trace was made; not part of the content hash."""

    command: str | None = None
    device: str | None = None
    dtype: str | None = None
    attention: str | None = None
    """Implementation of the prefill's attention."""
    software: dict[str, str] = {}
    """Package versions."""
    weights: str | None = None
    """Where the weights come from."""
    licences: dict[str, str] = {}
    """Of text or tokens that the trace contains."""
    notes: str | None = None


class TraceAttributes(Attributes):
    format_version: Literal[1] = 1
    name: str = Field(min_length=1)
    model: ModelGeometry
    tokenizer: str | None = None
    score_reduction: Literal["max"] = "max"
    """How the scores of a query group become one: the maximum over its query heads."""
    mass_reduction: Literal["mean"] = "mean"
    """How the softmax mass of a query group becomes one: the mean over its query heads."""
    provenance: Provenance = Provenance()


class DrafterAttributes(Attributes):
    """Who guessed the tokens whose queries rank `draft{j}`."""

    name: str = Field(min_length=1)
    distances: Annotated[int, Field(gt=0, le=MAX_DRAFT_DISTANCE)]
    """Recorded distances are 1 … this."""
    settings: dict[str, int | float | str] = {}
    acceptance: tuple[Share, ...] | None = None
    """Share of all positions whose token was guessed rightly, at distance 1, 2, …; null until the recording ends."""
    fallback_share: tuple[Share, ...] | None = None
    """Share of positions without a guess at distance 1, 2, …: their rows are the previous step's ranking."""


class BlockSizeAttributes(Attributes):
    """What is recorded at one block size."""

    layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    """Model layers, ascending."""
    max_ranked_blocks: Count
    """M: rankings hold the best M selectable blocks of each KV head."""
    rankings: tuple[str, ...] = Field(min_length=1)
    """Stored rankings: true, exact (only where no mass is recorded to derive it from), draft1, …, draft1_sparse, …,
    mean (by the mean key of each block), prev_layer (with the query that the layer before lets expect)."""
    block_mass: bool = True
    """Whether the softmax mass of every block is stored here. Else it is summed from a finer block size that has
    it for these layers, or only the mass of ranked blocks is known."""
    draft_sets: tuple[Count, ...] | None = None
    """Null: drafts keep their levels. Else they are nested sets, of the best so many blocks (ascending) and of the best
    M. The order inside a set is that of `true` where the token was right (it is the same query), else that of `true` at
    the step that issued them."""
    mass_resolution: Literal["eighth-octave", "compact"] = "eighth-octave"
    """compact: `block_mass` is coarser the smaller it is (`traces.mass.coarsen_levels`)."""

    @model_validator(mode="after")
    def _layers_ascend(self) -> BlockSizeAttributes:
        if any(a >= b for a, b in itertools.pairwise(self.layers)):
            raise ValueError("layers must ascend without repeats")
        sizes = (*(self.draft_sets or ()), self.max_ranked_blocks)
        if any(a >= b for a, b in itertools.pairwise(sizes)):
            raise ValueError("draft_sets must ascend and stay below max_ranked_blocks")
        if "true" not in self.rankings:
            raise ValueError("rankings must contain 'true'")
        return self


class GroupAttributes(Attributes):
    """One recorded request."""

    context_tokens: Count
    """KV length at the first decode step, the current token included."""
    steps_planned: Count
    steps_written: Annotated[int, Field(ge=0)] = 0
    """Valid rows; grows chunk by chunk, so that a killed recording is a valid shorter trace."""
    score_levels_per_octave: Count = 16
    """Resolution of ranking levels; a score is in log2 of softmax weight."""
    blocks: dict[Annotated[int, Field(gt=0, le=65536)], BlockSizeAttributes] = Field(min_length=1)
    """By block size in tokens."""
    kv_heads: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(default=None, min_length=1)
    """KV heads of the model that are recorded, ascending; null: all."""
    drafter: DrafterAttributes | None = None
    prompt: str | None = None
    """What the prompt consists of."""
    prompt_sha256: str | None = None
    """Of the prompt's token ids as little-endian int32."""
    sampling: dict[str, int | float | str] = {}
    """How the decoded tokens were chosen, with the seed."""
    query_cos: bool = False
    """Whether the similarity of each step's query to the step before is recorded."""
    prefill_mass: bool = False
    """Whether the mean mass of the prompt's queries is recorded, at the block sizes that store `block_mass`."""
    prompt_window_tokens: Count | None = None
    """The same of the last so many queries of the prompt; null: not recorded."""
    sparse_policy: dict[str, int | float | str] | None = None
    """Residency rules (keys of a simulated policy) under whose working set the drafts of `draft{j}_sparse` ran."""
    content_hash: str | None = None
    """sha256 over semantic attributes and decoded arrays of the rows written."""

    def num_kv_heads(self, model: ModelGeometry) -> int:
        """Recorded KV heads."""
        return model.num_kv_heads if self.kv_heads is None else len(self.kv_heads)

    @property
    def capacity_tokens(self) -> int:
        """KV length after the last planned step: it sizes the arrays."""
        return self.context_tokens + self.steps_planned - 1

    @model_validator(mode="after")
    def _rankings_known(self) -> GroupAttributes:
        distances = self.drafter.distances if self.drafter else 0
        known = {"true", "exact", "mean", "prev_layer", *(f"draft{j}" for j in range(1, distances + 1))}
        if self.sparse_policy is not None:
            known |= {f"draft{j}_sparse" for j in range(1, distances + 1)}
        for size, block in self.blocks.items():
            if "exact" in block.rankings and mass_source(self.blocks, size) is not None:
                raise ValueError(f"block size {size}: 'exact' follows from the recorded mass and must not be stored")
            for name in block.rankings:
                if name not in known:
                    raise ValueError(f"block size {size}: ranking '{name}' is not one of {', '.join(sorted(known))}")
        if self.steps_written > self.steps_planned:
            raise ValueError(f"steps_written {self.steps_written} exceeds steps_planned {self.steps_planned}")
        return self


def draft_distance(ranking: str) -> int:
    """j of `draft{j}`; 0 for any other ranking."""
    return masked_rows(ranking) if not ranking.endswith("_sparse") else 0


def masked_rows(ranking: str) -> int:
    """First rows that nobody could predict: j of `draft{j}` and `draft{j}_sparse`, else 0."""
    found = re.fullmatch(r"draft([0-9]+)(_sparse)?", ranking)
    return int(found[1]) if found else 0


def recorded_layers(blocks: dict[int, BlockSizeAttributes]) -> tuple[int, ...]:
    """Model layers recorded at any block size, ascending."""
    return tuple(sorted({layer for block in blocks.values() for layer in block.layers}))


def mass_source(blocks: dict[int, BlockSizeAttributes], block_size_tokens: int) -> int | None:
    """Coarsest recorded block size from whose `block_mass` that of `block_size_tokens` can be summed, or None."""
    wanted = blocks[block_size_tokens]
    sources = [
        size
        for size, block in blocks.items()
        if block.block_mass and block_size_tokens % size == 0 and set(wanted.layers) <= set(block.layers)
    ]
    return max(sources, default=None)
