"""Layers and heads of a trace that stand for a model's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from simulator.mapping import resolve_mapping
from simulator.specs.experiment import MappingSpec
from traces.errors import InputError
from traces.memory import MemoryGroup, memory_group
from traces.schema import ModelGeometry


@dataclass
class Model:
    num_layers: int
    num_kv_heads: int
    name: str = "model"
    attention: str = "GQA"
    sliding: tuple[int, ...] = ()

    @property
    def full_attention_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if layer not in self.sliding)


@pytest.fixture(scope="module")
def group() -> MemoryGroup:
    """Six layers and three heads at 16 tokens a block; layers 0, 2 and 5 also at 8."""
    layers = {8: (0, 2, 5), 16: (0, 1, 2, 3, 4, 5)}
    rankings = {size: {"true": np.zeros((4, len(of), 3, 2), np.int32)} for size, of in layers.items()}
    geometry = ModelGeometry(name="traced", num_layers=6, num_query_heads=9, num_kv_heads=3, head_dim=64)
    return memory_group(100 + np.arange(4), rankings, layers=layers, model=geometry)


ALL = MappingSpec(layers="all")


def test_own_geometry_is_the_identity(group: MemoryGroup) -> None:
    mapping = resolve_mapping(Model(6, 3), group, 16, ALL)
    assert mapping.name == "identity"
    assert mapping.layer_of.tolist() == [0, 1, 2, 3, 4, 5]
    assert mapping.head_of.tolist() == [0, 1, 2]


def test_shared_layers_serve_every_block_size_alike(group: MemoryGroup) -> None:
    """Depths 1/12 … 11/12 against recorded 1/12, 5/12, 11/12: layer 1 is half-way, and takes the shallower."""
    wide, fine = (resolve_mapping(Model(6, 3), group, size, MappingSpec()) for size in (16, 8))
    assert wide.name == fine.name == "depth-cyclic"
    assert [(0, 1, 2, 3, 4, 5)[i] for i in wide.layer_of] == [0, 0, 2, 2, 5, 5]
    assert [(0, 2, 5)[i] for i in fine.layer_of] == [0, 0, 2, 2, 5, 5]


def test_other_geometry_goes_by_depth_and_cyclic_heads(group: MemoryGroup) -> None:
    mapping = resolve_mapping(Model(12, 8), group, 16, ALL)
    assert mapping.name == "depth-cyclic"
    assert mapping.layer_of.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert mapping.head_of.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert "12 layers of model from 6 recorded layers of 6" in mapping.description


def test_sliding_window_layers_are_left_out_and_keep_their_depth(group: MemoryGroup) -> None:
    mapping = resolve_mapping(Model(6, 3, sliding=(0, 1, 3, 4)), group, 16, ALL)
    assert mapping.layer_of.tolist() == [2, 5]


def test_depth_cyclic_can_be_asked_for_on_the_same_geometry(group: MemoryGroup) -> None:
    mapping = resolve_mapping(Model(6, 3), group, 16, MappingSpec(rule="depth-cyclic", layers="all"))
    assert mapping.name == "depth-cyclic"
    assert mapping.layer_of.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("model", "block_size", "spec", "message"),
    [
        (Model(12, 8), 16, MappingSpec(rule="identity", layers="all"), "12 layers and 8 KV heads, the trace 6 and 3"),
        (Model(6, 3), 16, MappingSpec(rule="identity"), "layers 1, 3, 4 are not among"),
        (Model(6, 1, attention="MLA"), 16, ALL, "MLA"),
        (Model(6, 3), 32, ALL, "32 is not recorded .* recorded: 8, 16"),
        (Model(2, 3, sliding=(0, 1)), 16, ALL, "no full-attention layer"),
    ],
)
def test_what_cannot_be_mapped_is_refused(
    group: MemoryGroup, model: Model, block_size: int, spec: MappingSpec, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        resolve_mapping(model, group, block_size, spec)
