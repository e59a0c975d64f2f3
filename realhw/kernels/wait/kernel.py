"""Triton kernel that holds a stream until the CPU's copies have arrived."""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_flag_kernel(flag):
    """One warp spins; the copy engine writes the flag behind the data, in stream order."""
    while tl.atomic_add(flag, 0, sem="acquire") == 0:
        pass
