"""Triton kernel that holds a stream until the CPU's copies have arrived."""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["number", "most_tries"])
def wait_flag_kernel(flag, failed, number, most_tries):
    """One warp spins; the copy engine writes the flag behind the data, in stream order."""
    tries = tl.where(tl.load(failed) == 0, 0, most_tries)
    arrived = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while (arrived == 0) & (tries < most_tries):
        arrived = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        tries += 1
    if arrived == 0:
        tl.atomic_cas(failed, 0, number)
