"""Wait, in a captured graph, for work that the CPU enqueues while the graph runs."""

from __future__ import annotations

import torch

from realhw.kernels.checks import require_dtype, require_range, require_shape
from realhw.kernels.wait.kernel import wait_flag_kernel
from traces.errors import InputError

MOST_TRIES = 2_000_000
"""Reads of the flag before a wait gives up; each takes about a microsecond."""


def wait_flag(flag: torch.Tensor, failed: torch.Tensor, number: int, most_tries: int = MOST_TRIES) -> None:
    """Hold the current stream until `flag` int32 [1] is not 0; give up after about two seconds.

    failed int32 [1]: gets `number` (at least 1) where this is the first wait that gave up; later ones do not wait.
    On a CPU, in program order, nobody could set the flag later: raises `InputError` if it is 0.
    """
    require_range("number", number, 1, 2**31 - 1)
    for name, tensor in (("flag", flag), ("failed", failed)):
        require_dtype(name, tensor, torch.int32)
        require_shape(name, tensor, (1,))
    if not flag.is_cuda and int(flag) == 0:
        raise InputError("flag: 0 on a CPU, where nothing runs beside the wait")
    wait_flag_kernel[(1,)](flag, failed, number, most_tries, num_warps=1)
