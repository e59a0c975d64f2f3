"""How many new blocks a step may fetch: the fetch cap's credit in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def exact_share(share: float) -> Fraction:
    """The share as a person wrote it: 0.05 is 1/20, not the binary fraction nearest to it."""
    return Fraction(str(share))


def allowed_blocks(share: Fraction, num_blocks: int, num_steps: int) -> NDArray[np.int64]:
    """New blocks allowed in each step for a cap of c = `share`, int64 [num_steps]: floor((t+1)·c·K) − floor(t·c·K).

    `num_blocks` is K of one KV head, or K times the heads that share the credit. Unused credit is lost, so a step's
    allowance does not depend on what earlier steps fetched.

    A plain floor(c·K) would freeze small K (docs/decisions.md §2).
    """
    credit = [step * share.numerator * num_blocks // share.denominator for step in range(num_steps + 1)]
    return np.array([after - before for before, after in pairwise(credit)], dtype=np.int64)


def default_slack_blocks(lookahead_k: int, fetch_cap: float, num_blocks: int) -> int:
    """Slots for everything that can be in flight: ceil(k·c·K)."""
    share = exact_share(fetch_cap)
    return -(-lookahead_k * share.numerator * num_blocks // share.denominator)
