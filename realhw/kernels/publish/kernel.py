"""Triton kernel that tells the CPU a plan: SMs write it into pinned memory that the CPU polls."""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def publish_kernel(fetch, count, codes, known, FIELD_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Persistent grid; an entry is one 8-byte store, so the CPU never sees half of one."""
    total = tl.load(count)
    pid = tl.program_id(0)
    for group in tl.range(pid, tl.cdiv(total, BLOCK), tl.num_programs(0)):
        e = group * BLOCK + tl.arange(0, BLOCK)
        ok = e < total
        head = tl.load(fetch + e * 3, mask=ok, other=0).to(tl.int64)
        block = tl.load(fetch + e * 3 + 1, mask=ok, other=0).to(tl.int64)
        slot = tl.load(fetch + e * 3 + 2, mask=ok, other=0).to(tl.int64)
        tl.store(codes + e, (head << (2 * FIELD_BITS)) | (block << FIELD_BITS) | slot, mask=ok)
    if pid == 0:
        tl.store(known, total)
