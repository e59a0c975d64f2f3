"""Codes of a layer's fetches in plain torch."""

from __future__ import annotations

import torch


def fetch_codes(fetch: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """int64 [count]: head << 42 | block << 21 | slot of the first `count` entries of fetch int32 [max, 3]."""
    head, block, slot = fetch[: int(count)].long().unbind(1)
    return (head << 42) + (block << 21) + slot
