"""Which arrays a group holds, with dtype and the shape of one step's row. Writer, reader and check share it."""

from __future__ import annotations

from dataclasses import dataclass

from traces.schema import STEPS_PER_CHUNK, GroupAttributes, ModelGeometry, masked_rows, mass_source, recorded_layers

_CHUNK_TARGET_BYTES = 8 << 20
MAX_CHUNK_BYTES = 1 << 30
MAX_ARRAY_BYTES = 8 << 30
"""Mass of every block of 128 steps at a million tokens, 36 layers and 8 heads is 2.4 GB."""


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """One array: shape is [steps, *row]; chunks are 64 steps by some layers by everything else.

    per_step: False for what is known once, before the first step: shape [1, *row].
    """

    dtype: str
    row: tuple[int, ...]
    per_step: bool = True

    @property
    def row_bytes(self) -> int:
        size = {"uint8": 1, "int32": 4, "float32": 4}[self.dtype]
        for extent in self.row:
            size *= extent
        return size

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        return (STEPS_PER_CHUNK if self.per_step else 1, *self.chunk_row)

    @property
    def chunk_row(self) -> tuple[int, ...]:
        """Shape of a chunk's row: whole unless that is too large, then fewer layers (axis 0 of the row)."""
        if not self.row:
            return ()
        layers = max(1, min(self.row[0], _CHUNK_TARGET_BYTES * self.row[0] // (STEPS_PER_CHUNK * self.row_bytes)))
        return (layers, *self.row[1:])


def num_blocks(kv_len: int, block_size_tokens: int) -> int:
    return -(-kv_len // block_size_tokens)


def prompt_masses(group: GroupAttributes) -> tuple[str, ...]:
    """Recorded masses of the prompt's queries."""
    recorded = {"prefill_mass": group.prefill_mass, "prompt_window_mass": group.prompt_window_tokens is not None}
    return tuple(name for name, present in recorded.items() if present)


def array_layouts(model: ModelGeometry, group: GroupAttributes) -> dict[str, ArrayLayout]:
    """Every array of a group by its path inside the group."""
    layouts = {"kv_len": ArrayLayout("int32", ()), "tokens": ArrayLayout("int32", ())}
    for j in range(1, (group.drafter.distances if group.drafter else 0) + 1):
        layouts[f"draft{j}/token"] = ArrayLayout("int32", ())
        layouts[f"draft{j}/accepted"] = ArrayLayout("uint8", ())
    if group.query_cos:
        layouts["query_cos"] = ArrayLayout("float32", (len(recorded_layers(group.blocks)), group.num_kv_heads(model)))
    for size, block in sorted(group.blocks.items()):
        heads = (len(block.layers), group.num_kv_heads(model))
        blocks = num_blocks(group.capacity_tokens, size)
        bitmap, ranked = (*heads, -(-blocks // 8)), (*heads, block.max_ranked_blocks)
        members_only = mass_source(group.blocks, size) is None
        for name in block.rankings:
            layouts[f"p{size}/{name}/members"] = ArrayLayout("uint8", bitmap)
            if masked_rows(name) and block.draft_sets is not None:
                bits = ArrayLayout("uint8", (*heads, -(-block.max_ranked_blocks // 8)))
                layouts |= {f"p{size}/{name}/best{k}": bits for k in block.draft_sets}
            elif name != "exact":
                layouts[f"p{size}/{name}/levels"] = ArrayLayout("uint8", ranked)
            if name in ("true", "exact") and members_only:
                layouts[f"p{size}/{name}/mass"] = ArrayLayout("uint8", ranked)
        layouts[f"p{size}/true/rest"] = ArrayLayout("float32", heads)
        if block.block_mass:
            layouts[f"p{size}/block_mass"] = ArrayLayout("uint8", (*heads, blocks))
            prompt = ArrayLayout("uint8", (*heads, num_blocks(group.context_tokens, size)), per_step=False)
            for name in prompt_masses(group):
                layouts[f"p{size}/{name}"] = prompt
    return layouts
