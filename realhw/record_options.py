"""What a recording holds: the options, and the layers, block sizes and attributes that follow from them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from realhw.drafters import Drafter, DrafterName, require_draft_model
from realhw.hook import Extra
from realhw.models import Dtype
from realhw.prompts import Prompt
from realhw.sparse_drafts import require_recordable
from simulator.draft_pass import residency_rules
from simulator.specs.base import Name, NonNegativeFloat, NonNegativeInt, PositiveInt, Spec
from simulator.specs.policy import PolicySpec
from traces.errors import InputError
from traces.schema import MAX_DRAFT_DISTANCE, BlockSizeAttributes, DrafterAttributes, GroupAttributes

NUM_SPREAD_LAYERS = 6
MAX_BUDGET_TOKENS = 2**20
"""A million tokens, the longest context that is simulated."""


class RecordOptions(Spec):
    """What to record. `oasis-sim record` builds it from its flags."""

    model: str
    """`smollm2-135m`, `gemma3-270m`, a .gguf file, a model folder or a Hugging Face name."""
    prompts: tuple[Prompt, ...] = Field(min_length=1)
    name: Name = "recorded"
    """Of the trace."""
    context_tokens: PositiveInt | None = None
    """KV length at the first step, the current token included. Null: the prompt's own length."""
    keep_first_tokens: NonNegativeInt = 32
    """When a prompt exceeds `context_tokens`: tokens kept at its start; what follows them is cut."""
    steps: PositiveInt = 128
    layers: tuple[NonNegativeInt, ...] | None = None
    """Recorded at `block_sizes_tokens`. Null: all with full attention."""
    kv_heads: tuple[NonNegativeInt, ...] | None = None
    """Null: all."""
    block_sizes_tokens: tuple[PositiveInt, ...] = (16,)
    """Recorded for `layers`, with the mass of every block."""
    extra_block_sizes_tokens: tuple[PositiveInt, ...] = ()
    """Recorded for `extra_layers` only."""
    extra_layers: tuple[NonNegativeInt, ...] | None = None
    """Null: six layers spread over the depth."""
    max_budget_tokens: Annotated[int, Field(gt=0, le=MAX_BUDGET_TOKENS, strict=True)] = 2048
    """M·P: the largest KV budget that the trace can replay."""
    score_levels_per_octave: PositiveInt = 16
    extras: tuple[Extra, ...] = ()
    """Recorded besides, in the same pass: mean (ranking by mean keys), prev_layer (InfiniGen), query_cos (FreeKV),
    prefill_mass (H2O), prompt_window_mass (SnapKV)."""
    prompt_window_tokens: PositiveInt = 32
    """Queries in SnapKV's window. Source of the default: SnapKV's published code."""
    sparse_policy: PolicySpec | None = None
    """Also record `draft{j}_sparse`: what the guesses predict when their pass attends to this policy's working set.
    Takes a second pass a step."""
    draft_distances: Annotated[int, Field(ge=0, le=MAX_DRAFT_DISTANCE, strict=True)] = 4
    drafter: DrafterName = "ngram"
    draft_model: str | None = None
    """Of drafter `model`: as `model`, same tokenizer; of `eagle3`: a packaged head, its file or its folder."""
    max_ngram_tokens: PositiveInt = 3
    min_ngram_tokens: PositiveInt = 1
    temperature: NonNegativeFloat = 0.0
    """0: greedy."""
    seed: NonNegativeInt = 0
    stop_at_eos: bool = False
    """False: decode `steps` tokens whatever the model says."""
    device: str = "cpu"
    dtype: Dtype = "float32"
    prefill_chunk_tokens: PositiveInt = 2048
    command: str | None = None
    """Stored in the trace."""
    licences: dict[str, str] = Field(default_factory=dict)
    """Of the prompts, stored in the trace."""
    notes: str | None = None

    @model_validator(mode="after")
    def _nothing_idle(self) -> RecordOptions:
        """An option that nothing would look at is a mistake."""
        require_draft_model(self.drafter, self.draft_model)
        if self.min_ngram_tokens > self.max_ngram_tokens:
            least, most = self.min_ngram_tokens, self.max_ngram_tokens
            raise ValueError(f"min_ngram_tokens {least} exceeds max_ngram_tokens {most}")
        if self.extra_layers is not None and self.block_sizes_tokens and not self.extra_block_sizes_tokens:
            raise ValueError("extra_layers are those of extra_block_sizes_tokens, of which there are none")
        if "prompt_window_tokens" in self.model_fields_set and "prompt_window_mass" not in self.extras:
            raise ValueError("prompt_window_tokens is of prompt_window_mass, which is not recorded")
        return self

    @property
    def sparse_size(self) -> int | None:
        """Block size of `sparse_policy`, at which `draft{j}_sparse` is recorded."""
        return None if self.sparse_policy is None else self.sparse_policy.block_size_tokens


def require_sparse_drafts(options: RecordOptions, sizes: Collection[int]) -> None:
    """Raises InputError where drafts over the policy's working set cannot be recorded."""
    policy = options.sparse_policy
    if policy is None:
        return
    require_recordable(policy)
    if policy.block_size_tokens not in sizes:
        known = ", ".join(map(str, sizes))
        raise InputError(
            f"sparse_policy.block_size_tokens {policy.block_size_tokens} is not recorded; there are {known}"
        )
    if policy.lookahead_k > options.draft_distances:
        raise InputError(
            f"sparse_policy.lookahead_k {policy.lookahead_k} needs draft_distances of as many, got "
            f"{options.draft_distances}"
        )


def layers_by_block_size(options: RecordOptions, full_layers: Sequence[int], model: str) -> dict[int, tuple[int, ...]]:
    """Model layers recorded at each block size. Raises InputError for sizes or layers that cannot be recorded."""
    if not full_layers:
        raise InputError(f"{model}: every layer has a sliding window; nothing to record")
    layers = _known_layers("layers", options.layers, full_layers, model)
    spread = np.linspace(0, len(full_layers) - 1, min(NUM_SPREAD_LAYERS, len(full_layers))).round().astype(int)
    few = tuple(full_layers[i] for i in spread) if options.extra_layers is None else options.extra_layers
    both = sorted(set(options.block_sizes_tokens) & set(options.extra_block_sizes_tokens))
    if both:
        raise InputError(f"block size {both[0]} is asked for both all layers and some")
    sizes = dict.fromkeys(options.block_sizes_tokens, layers)
    extra = _known_layers("extra_layers", few, full_layers, model)
    sizes |= dict.fromkeys(options.extra_block_sizes_tokens, extra)
    if not sizes:
        raise InputError("block_sizes_tokens and extra_block_sizes_tokens are both empty; nothing to record")
    for size in sizes:
        if options.max_budget_tokens % size:
            raise InputError(f"max_budget_tokens {options.max_budget_tokens} is not a multiple of block size {size}")
    return dict(sorted(sizes.items()))


def _known_layers(key: str, wanted: Sequence[int] | None, full_layers: Sequence[int], model: str) -> tuple[int, ...]:
    unknown = sorted(set(wanted or ()) - set(full_layers))
    if unknown:
        known = ", ".join(map(str, full_layers))
        raise InputError(f"{key}: layer {unknown[0]} is not a full-attention layer of {model}; those are {known}")
    if wanted is not None and not wanted:
        raise InputError(f"{key}: names no layer")
    return tuple(sorted(set(full_layers if wanted is None else wanted)))


def selected_heads(options: RecordOptions, num_kv_heads: int) -> tuple[int, ...] | None:
    """Ascending KV heads to record; None: all. Raises InputError for one that the model lacks."""
    if options.kv_heads is None:
        return None
    beyond = [head for head in options.kv_heads if head >= num_kv_heads]
    if beyond or not options.kv_heads:
        raise InputError(f"kv_heads: {beyond[0] if beyond else 'none'}; the model has 0 to {num_kv_heads - 1}")
    return tuple(sorted(set(options.kv_heads)))


def group_attributes(
    options: RecordOptions,
    prompt: Prompt,
    tokens: Sequence[int],
    block_layers: Mapping[int, tuple[int, ...]],
    kv_heads: tuple[int, ...] | None,
    drafter: Drafter,
) -> GroupAttributes:
    """Of one request's group, before its first step."""
    names = ("true", *(f"draft{j}" for j in range(1, options.draft_distances + 1)))
    names += tuple(name for name in ("mean", "prev_layer") if name in options.extras)
    sparse = tuple(f"draft{j}_sparse" for j in range(1, options.draft_distances + 1))
    blocks: dict[int, BlockSizeAttributes] = {}
    for size, layers in block_layers.items():
        finer = any(size % other == 0 and set(layers) <= set(b.layers) for other, b in blocks.items())
        blocks[size] = BlockSizeAttributes(
            layers=layers,
            max_ranked_blocks=options.max_budget_tokens // size,
            rankings=names + (sparse if options.sparse_size == size else ()),
            block_mass=size in options.block_sizes_tokens or not finer,
        )
    guesser = None
    if options.draft_distances:
        guesser = DrafterAttributes(name=drafter.name, distances=options.draft_distances, settings=drafter.settings)
    return GroupAttributes(
        context_tokens=len(tokens),
        steps_planned=options.steps,
        score_levels_per_octave=options.score_levels_per_octave,
        blocks=blocks,
        kv_heads=kv_heads,
        drafter=guesser,
        prompt=prompt.description,
        prompt_sha256=hashlib.sha256(np.array(tokens, "<i4").tobytes()).hexdigest(),
        sampling={"temperature": options.temperature, "seed": options.seed},
        sparse_policy=None if options.sparse_policy is None else residency_rules(options.sparse_policy),
        query_cos="query_cos" in options.extras,
        prefill_mass="prefill_mass" in options.extras,
        prompt_window_tokens=options.prompt_window_tokens if "prompt_window_mass" in options.extras else None,
    )
