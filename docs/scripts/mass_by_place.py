"""Share of a trace's attention mass on the first block and the newest blocks, which never need a fetch."""

from __future__ import annotations

import sys

import numpy as np

from traces.catalog import resolve
from traces.reader import open_trace

BLOCK_SIZE_TOKENS = 16


def main() -> None:
    trace = open_trace(resolve(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-reasoning"))
    for name in trace.group_names:
        group = trace.group(name)
        mass = group.mass(BLOCK_SIZE_TOKENS).dense()
        newest = (group.kv_len - 1) // BLOCK_SIZE_TOKENS
        for blocks in (1, 2, 4, 8):
            recent = [mass[t, ..., n - blocks + 1 : n + 1].sum(axis=-1).mean() for t, n in enumerate(newest)]
            share = mass[..., 0].mean() + np.mean(recent)
            print(f"{name}: first block and newest {blocks * BLOCK_SIZE_TOKENS:>3} tokens hold {share:.1%}")


if __name__ == "__main__":
    main()
