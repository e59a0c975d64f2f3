"""How a trace's layers and KV heads stand for those of the model that is simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from simulator.specs.experiment import MappingSpec
from traces.errors import InputError
from traces.group import TraceGroup


class SparseModel(Protocol):
    """What a mapping needs of `simulator.specs.model.ModelSpec`."""

    @property
    def name(self) -> str: ...
    @property
    def attention(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def full_attention_layers(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Mapping:
    """Which recorded layer and KV head serves each of the model's.

    layer_of: int32 [full-attention layers of the model], indices into the trace group's recorded layers at the block
    size. head_of: int32 [num_kv_heads], KV heads of the trace.
    """

    name: str
    layer_of: NDArray[np.int32]
    head_of: NDArray[np.int32]
    description: str


def resolve_mapping(model: SparseModel, group: TraceGroup, block_size_tokens: int, spec: MappingSpec) -> Mapping:
    """Map every full-attention layer and KV head of `model` to the trace.

    identity: each layer and head to itself. depth-cyclic: the layer whose relative depth (i + ½)/L is nearest, the
    shallower one on a tie, and head h to h modulo the trace's heads. Sliding-window layers need no mapping: their KV
    is short and stays in HBM.

    Raises InputError for an MLA model, a block size that is not recorded, and `identity` on another geometry.
    """
    if model.attention == "MLA":
        raise InputError(
            f"model {model.name!r} has MLA attention: its cache is one latent shared by all heads, and a trace of "
            "per-head blocks cannot stand for it; simulate it with a dense system"
        )
    require_block_size(group, block_size_tokens)
    recorded = group.layers(block_size_tokens)
    candidates = _candidate_layers(group, recorded, block_size_tokens, spec.layers)
    wanted = model.full_attention_layers
    if not wanted:
        raise InputError(f"model {model.name!r} has no full-attention layer: there is nothing to select in")
    obstacle = _identity_obstacle(model, group, candidates)
    if spec.rule == "identity" and obstacle:
        raise InputError(f"mapping 'identity' does not fit: {obstacle}; use mapping.rule=depth-cyclic or auto")
    if spec.rule != "depth-cyclic" and not obstacle:
        return Mapping(
            name="identity",
            layer_of=np.array([recorded.index(layer) for layer in wanted], dtype=np.int32),
            head_of=np.arange(model.num_kv_heads, dtype=np.int32),
            description=f"the trace's own geometry: {len(wanted)} layers, {model.num_kv_heads} KV heads",
        )
    depth = (np.array(wanted) + 0.5) / model.num_layers
    trace_depth = (np.array(candidates) + 0.5) / group.num_layers
    nearest = np.argmin(np.abs(depth[:, None] - trace_depth[None, :]), axis=1)
    return Mapping(
        name="depth-cyclic",
        layer_of=np.array([recorded.index(candidates[i]) for i in nearest], dtype=np.int32),
        head_of=np.arange(model.num_kv_heads, dtype=np.int32) % group.num_kv_heads,
        description=(
            f"{len(wanted)} layers of {model.name} from {len(candidates)} recorded layers of {group.num_layers} by "
            f"relative depth, {model.num_kv_heads} KV heads from {group.num_kv_heads} cyclically"
        ),
    )


def require_block_size(group: TraceGroup, block_size_tokens: int) -> None:
    """Raises InputError naming the recorded block sizes."""
    if block_size_tokens not in group.block_sizes:
        raise InputError(
            f"policy.block_size_tokens {block_size_tokens} is not recorded in trace group {group.name!r}; "
            f"recorded: {', '.join(map(str, group.block_sizes))}"
        )


def _candidate_layers(group: TraceGroup, recorded: tuple[int, ...], block_size_tokens: int, rule: str) -> list[int]:
    """Ascending model layers that may be drawn from."""
    layers = set(recorded)
    if rule == "shared":
        for size in group.block_sizes:
            layers &= set(group.layers(size))
    if not layers:
        raise InputError(
            f"trace group {group.name!r} has no layer recorded at every block size; use mapping.layers=all to draw "
            f"from those at {block_size_tokens} tokens"
        )
    return sorted(layers)


def _identity_obstacle(model: SparseModel, group: TraceGroup, candidates: list[int]) -> str:
    """Why the trace's layers and heads are not the model's own; empty if they are."""
    if (model.num_layers, model.num_kv_heads) != (group.num_layers, group.num_kv_heads):
        return (
            f"model {model.name!r} has {model.num_layers} layers and {model.num_kv_heads} KV heads, "
            f"the trace {group.num_layers} and {group.num_kv_heads}"
        )
    absent = sorted(set(model.full_attention_layers) - set(candidates))
    return f"layers {', '.join(map(str, absent))} are not among those drawn from" if absent else ""
