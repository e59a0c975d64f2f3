"""How many multiprocessors matrix products may count on: cuBLAS tiles them for as many."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

from realhw.device import check_cuda, require_gpu
from traces.errors import EnvironmentMissing


@lru_cache(maxsize=1)
def _cublas() -> ctypes.CDLL:
    """The cuBLAS library that torch has loaded."""
    torch.mm(*torch.ones(2, 16, 16, device=require_gpu()))
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if "/libcublas.so" in line:
            return ctypes.CDLL(line.split()[-1])
    raise EnvironmentMissing("no cuBLAS is loaded: products cannot be told to leave multiprocessors to a gather")


@contextmanager
def leave_multiprocessors(count: int) -> Iterator[None]:
    """Products launched or captured inside are tiled for all multiprocessors but `count`; 0 changes nothing.

    A gather's thread blocks hold a multiprocessor each while they run. A product whose grid is exactly as large as
    the chip then needs a second wave.
    """
    if count == 0:
        yield
        return
    have = torch.cuda.get_device_properties(require_gpu()).multi_processor_count
    _set_target(have - count)
    try:
        yield
    finally:
        _set_target(0)


def _set_target(num_sms: int) -> None:
    """0: cuBLAS counts on all of them again. Source: cuBLAS documentation, cublasSetSmCountTarget."""
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]
    check_cuda(_cublas().cublasSetSmCountTarget(handle, ctypes.c_int(num_sms)), "cublasSetSmCountTarget")
