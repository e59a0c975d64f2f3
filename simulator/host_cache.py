"""Blocks that host memory keeps of KV whose home is beyond it: per KV head those fetched last. Compiled.

A doubly linked list per head over block ids, most recent first. `HostCache` of `simulator.residency_reference` is its
plain twin.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

BEFORE, AFTER = np.arange(2)
"""Fields of the list, int32 [heads, 2, B + 1]: the more and the less recently fetched neighbour of a block; entry B is
both ends. A block that is not kept has the neighbour ABSENT."""
ABSENT = -1

_compiled = njit(cache=True, error_model="numpy")


def make_host_cache(num_heads: int, max_blocks: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(list, blocks kept per head) of empty caches for block ids below `max_blocks`."""
    links = np.full((num_heads, 2, max_blocks + 1), ABSENT, dtype=np.int32)
    links[:, :, max_blocks] = max_blocks
    return links, np.zeros(num_heads, dtype=np.int32)


@_compiled
def empty_host_cache(links: Any, kept: Any) -> None:
    links[:] = ABSENT
    links[:, :, links.shape[2] - 1] = links.shape[2] - 1
    kept[:] = 0


@_compiled
def fetch_through_host(links: Any, kept: Any, head: int, blocks: Any, count: int, capacity: int) -> int:
    """Fetch `count` blocks in order; each is then the most recent, and the least recent beyond `capacity` goes.

    Returns how many were not there.
    """
    end = links.shape[2] - 1
    misses = 0
    for i in range(count):
        block = blocks[i]
        if links[head, BEFORE, block] != ABSENT:
            newer, older = links[head, BEFORE, block], links[head, AFTER, block]
            links[head, AFTER, newer] = older
            links[head, BEFORE, older] = newer
        else:
            misses += 1
            if kept[head] == capacity:
                last = links[head, BEFORE, end]
                newer = links[head, BEFORE, last]
                links[head, AFTER, newer] = end
                links[head, BEFORE, end] = newer
                links[head, BEFORE, last] = ABSENT
                links[head, AFTER, last] = ABSENT
            else:
                kept[head] += 1
        first = links[head, AFTER, end]
        links[head, AFTER, end] = block
        links[head, BEFORE, block] = end
        links[head, AFTER, block] = first
        links[head, BEFORE, first] = block
    return misses
