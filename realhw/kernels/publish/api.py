"""A layer's fetches, written by a kernel into pinned memory for the CPU that enqueues their copies."""

from __future__ import annotations

import torch

from realhw.kernels.checks import require_contiguous, require_dtype, require_shape
from realhw.kernels.publish.kernel import publish_kernel
from traces.errors import InputError

FIELD_BITS = 21
"""An entry's code is head << 42 | block << 21 | slot: not negative, in (head, block) order."""
_NUM_CTAS, _BLOCK = 4, 256


def publish_fetches(fetch: torch.Tensor, count: torch.Tensor, codes: torch.Tensor, known: torch.Tensor) -> None:
    """Write the codes of the first `count` entries, then their number.

    fetch int32 [max, 3] of (head, block, slot) and count int32 [1] as `Moves` has them; codes int64 [>= max] and known
    int32 [1] in pinned memory. The CPU may see them in any order: it sets all to −1 before and waits for what it needs.
    Raises `InputError`.
    """
    for name, tensor, dtype in (
        ("fetch", fetch, torch.int32), ("count", count, torch.int32), ("codes", codes, torch.int64),
        ("known", known, torch.int32),
    ):  # fmt: skip
        require_dtype(name, tensor, dtype)
    require_shape("fetch", fetch, (len(fetch), 3))
    require_shape("count", count, (1,))
    require_shape("known", known, (1,))
    require_contiguous(fetch=fetch, codes=codes)
    if codes.dim() != 1 or len(codes) < len(fetch):
        raise InputError(f"codes: shape {tuple(codes.shape)}, need [>= {len(fetch)}]")
    if fetch.is_cuda and not (codes.is_pinned() and known.is_pinned()):
        raise InputError("codes, known: pageable memory, need pinned (the GPU writes it in place)")
    publish_kernel[(_NUM_CTAS,)](fetch, count, codes, known, FIELD_BITS=FIELD_BITS, BLOCK=_BLOCK, num_warps=4)
