"""Triton kernel of the gated activation."""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu_multiply_kernel(gate_up, out, F, BLOCK: tl.constexpr):
    """Grid (rows, ceil(F / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * F + i, mask=i < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + i, mask=i < F, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * F + i, value.to(out.dtype.element_ty), mask=i < F)
