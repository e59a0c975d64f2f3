"""Wait, in a captured graph, for work that the CPU enqueues while the graph runs."""

from __future__ import annotations

import torch

from realhw.kernels.checks import require_dtype, require_shape
from realhw.kernels.wait.kernel import wait_flag_kernel
from traces.errors import InputError


def wait_flag(flag: torch.Tensor) -> None:
    """Hold the current stream until `flag` int32 [1] is not 0.

    On a CPU, in program order, nobody could set it later: raises `InputError` if it is 0.
    """
    require_dtype("flag", flag, torch.int32)
    require_shape("flag", flag, (1,))
    if not flag.is_cuda and int(flag) == 0:
        raise InputError("flag: 0 on a CPU, where nothing runs beside the wait")
    wait_flag_kernel[(1,)](flag, num_warps=1)
