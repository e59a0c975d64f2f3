"""The rankings of `simulator.selectors.kept`, one step and head at a time in plain Python; only tests call it."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.selectors.kept import UNITS_PER_MASS, Keeping


def kept_reference(
    keeping: Keeping, step: int, kv_len: Sequence[int], units: Sequence[Sequence[int]], prompt: Sequence[int]
) -> list[int]:
    """Ids best first at `step`.

    units: integer mass of every block at every step up to it; prompt: of the prompt's blocks, by its last queries
    (prompt-window) or as the mean of all (accumulated-mass that starts there).
    """
    size = keeping.block_size_tokens
    selectable = range(-(-kv_len[step] // size) - 1)
    sinks = [block for block in selectable if block < keeping.sink_blocks]
    others = [block for block in selectable if block not in sinks]
    if keeping.selector == "sink-recent":
        return sinks + others[::-1]
    had = dict(enumerate(prompt))
    if keeping.selector == "prompt-window":
        generated = [block for block in others if (block + 1) * size >= kv_len[0]]
        rest = [block for block in others if block not in generated]
        return generated[::-1] + sorted(rest, key=lambda block: (-had.get(block, 0), block))
    recent = others[::-1][: keeping.recent_blocks]
    rest = [block for block in others if block not in recent]

    def mass(block: int, first: int) -> int:
        return sum(units[t][block] for t in range(first, step + 1))

    def unimportant(block: int, first: int) -> int:
        """Steps in which the block, where it existed, had less than its tokens' share of an even spread."""
        steps = [t for t in range(first, step + 1) if block * size < kv_len[t]]
        return sum(1 for t in steps if units[t][block] * kv_len[t] < UNITS_PER_MASS * size)

    if keeping.selector == "accumulated-mass":
        queries = kv_len[0] - 1 if keeping.from_prompt else 0
        return recent + sorted(rest, key=lambda block: (-mass(block, 0) - queries * had.get(block, 0), block))
    first = max(0, step + 1 - keeping.history_steps)
    return recent + sorted(rest, key=lambda block: (unimportant(block, first), -mass(block, first), block))
