"""Gated activation in plain torch."""

from __future__ import annotations

import torch


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [gate | up] in float32: [rows, F]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
