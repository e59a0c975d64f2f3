"""Iterations of verified drafts in plain Python, to be read beside `simulator.iterations`; only tests call it."""

from __future__ import annotations

from collections.abc import Sequence


def iterations(right: Sequence[Sequence[bool]], num_positions: int) -> list[tuple[int, int]]:
    """(first position, positions emitted); right[j − 1][t] is the draft for t made at t − j."""
    found = []
    position = 0
    while position + len(right) < num_positions:
        verdicts = [right[j - 1][position + j] for j in range(1, len(right) + 1)]
        accepted = verdicts.index(False) if False in verdicts else len(verdicts)
        found.append((position, 1 + accepted))
        position += 1 + accepted
    return found


def union(rows: Sequence[Sequence[int]], num_selectable: int, num_ranked: int) -> list[int]:
    """First `num_ranked` distinct selectable ids of rank 0 of each row, then rank 1 of each, …; −1 ends a row."""
    merged: list[int] = []
    for rank in range(max(len(row) for row in rows)):
        for row in rows:
            if rank < len(row) and 0 <= row[rank] < num_selectable and row[rank] not in merged:
                merged.append(row[rank])
    return merged[:num_ranked]


def mean_mass(rows: Sequence[Sequence[float]], open_block: int) -> list[float]:
    """Mean of the rows; what lies behind the iteration's open block counts to it."""
    mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return [*mean[:open_block], sum(mean[open_block:])]
