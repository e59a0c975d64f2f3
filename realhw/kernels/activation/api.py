"""Gated activation of the feed-forward network."""

from __future__ import annotations

import torch
import triton

from realhw.kernels.activation.kernel import silu_multiply_kernel
from realhw.kernels.checks import FLOATS, require_contiguous, require_dtype, require_shape

BLOCK = 1024


def silu_multiply(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(gate) * up; gate_up [rows, 2F] ([gate | up]), out [rows, F] of its dtype. Raises `InputError`."""
    rows, width = gate_up.shape
    require_dtype("gate_up", gate_up, *FLOATS)
    require_dtype("out", out, gate_up.dtype)
    require_shape("out", out, (rows, width // 2))
    require_contiguous(gate_up=gate_up, out=out)
    grid = (rows, triton.cdiv(width // 2, BLOCK))
    silu_multiply_kernel[grid](gate_up, out, width // 2, BLOCK=BLOCK, num_warps=4)
