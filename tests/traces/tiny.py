"""A small trace of random scores and masses, written as the recorder writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from traces.codec import rank_scores
from traces.mass import quantise_mass
from traces.schema import BlockSizeAttributes, DrafterAttributes, GroupAttributes, ModelGeometry, TraceAttributes
from traces.writer import StepRecord

CONTEXT_TOKENS, NUM_LAYERS, NUM_HEADS, DISTANCES = 95, 3, 2, 2
BLOCKS = {
    4: BlockSizeAttributes(layers=(0, 2), max_ranked_blocks=12, rankings=("true", "draft1", "draft2")),
    8: BlockSizeAttributes(layers=(0, 2), max_ranked_blocks=6, rankings=("true", "draft1", "draft2"), block_mass=False),
    5: BlockSizeAttributes(layers=(1, 2), max_ranked_blocks=9, rankings=("true", "exact", "draft1"), block_mass=False),
}


def trace_attributes() -> TraceAttributes:
    model = ModelGeometry(name="tiny", num_layers=NUM_LAYERS, num_query_heads=4, num_kv_heads=NUM_HEADS, head_dim=8)
    return TraceAttributes(name="tiny-trace", model=model)


def group_attributes(steps: int, blocks: dict[int, BlockSizeAttributes] = BLOCKS) -> GroupAttributes:
    return GroupAttributes(
        context_tokens=CONTEXT_TOKENS,
        steps_planned=steps,
        blocks=blocks,
        drafter=DrafterAttributes(name="n-gram", distances=DISTANCES),
    )


def truth_of(steps: int, blocks: dict[int, BlockSizeAttributes] = BLOCKS, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Per step: token masses [L, H, kv_len] and scores by (block size, ranking), [L_P, H, n-1] or fewer blocks."""
    rng = np.random.default_rng(seed)
    for t in range(steps):
        kv_len = CONTEXT_TOKENS + t
        token_mass = rng.dirichlet(np.full(kv_len, 0.2), size=(NUM_LAYERS, NUM_HEADS))
        scores = {}
        for size, block in blocks.items():
            for name in block.rankings:
                j = int(name[5:]) if name.startswith("draft") else 0
                if name != "exact" and j <= t:
                    shape = (len(block.layers), NUM_HEADS, -(-(kv_len - j) // size) - 1)
                    scores[size, name] = rng.normal(scale=4, size=shape)
        yield {"kv_len": kv_len, "token": int(rng.integers(100)), "token_mass": token_mass, "scores": scores}


def pooled(token_mass: np.ndarray, size: int) -> np.ndarray:
    return np.add.reduceat(token_mass, np.arange(0, token_mass.shape[-1], size), axis=-1)


def record_of(truth: dict[str, Any], blocks: dict[int, BlockSizeAttributes] = BLOCKS) -> StepRecord:
    rankings, mass, rest = {}, {}, {}
    for (size, name), scores in truth["scores"].items():
        rankings[size, name] = rank_scores(scores, blocks[size].max_ranked_blocks, 16)
    for size, block in blocks.items():
        values = pooled(truth["token_mass"], size)[list(block.layers)]
        ids = rankings[size, "true"][0]
        inside = np.where(ids >= 0, np.take_along_axis(values, np.maximum(ids, 0), axis=-1), 0).sum(axis=-1)
        mass[size], rest[size] = quantise_mass(values), (1 - inside).astype(np.float32)
    return StepRecord(
        kv_len=truth["kv_len"],
        token=truth["token"],
        rankings=rankings,
        mass=mass,
        rest=rest,
        draft_tokens=(truth["token"], None),
    )
