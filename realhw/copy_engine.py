"""Copies by the copy engines: one call per copy, or many copies in one batched submission.

Source: CUDA runtime API, `cudaMemcpyAsync` and `cudaMemcpyBatchAsync` (CUDA 12.8; the failure index left its
parameters in 13.0).
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from realhw.device import check_cuda, cuda_runtime
from traces.errors import EnvironmentMissing, InputError

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
_ORDER_STREAM = 1
"""cudaMemcpySrcAccessOrderStream: sources are read in stream order."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_hint", _Location),
        ("dst_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class CopyEngine:
    """Enqueues copies by address on a stream, with no Python object per copy."""

    def __init__(self) -> None:
        self._runtime = cuda_runtime()
        self._cuda_major = int(str(torch.version.cuda).split(".", maxsplit=1)[0])
        self._attributes = _CopyAttributes(_ORDER_STREAM, _Location(0, 0), _Location(0, 0), 0)
        self._first_index = ctypes.c_size_t(0)
        self._runtime.cudaMemcpyAsync.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
        ]  # fmt: skip

    def copy(self, target: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        """One copy between two addresses; `stream` is a raw handle."""
        check_cuda(self._runtime.cudaMemcpyAsync(target, source, num_bytes, kind, stream), "cudaMemcpyAsync")

    def copy_batch(
        self, targets: NDArray[np.uint64], sources: NDArray[np.uint64], sizes: NDArray[np.uint64], stream: int
    ) -> None:
        """Many copies in one submission, unordered. Arrays uint64 [n]: addresses, bytes; not the default stream."""
        if not len(targets) == len(sources) == len(sizes):
            raise InputError(f"copies: {len(targets)} targets, {len(sources)} sources, {len(sizes)} sizes")
        if len(targets) == 0:
            return
        if self._cuda_major < 12 or not hasattr(self._runtime, "cudaMemcpyBatchAsync"):
            raise EnvironmentMissing(f"CUDA {torch.version.cuda}: no cudaMemcpyBatchAsync, need 12.8 or newer")
        failed = () if self._cuda_major >= 13 else (ctypes.byref(ctypes.c_size_t(0)),)
        status = self._runtime.cudaMemcpyBatchAsync(
            targets.ctypes.data_as(ctypes.c_void_p),
            sources.ctypes.data_as(ctypes.c_void_p),
            sizes.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(len(targets)),
            ctypes.byref(self._attributes),
            ctypes.byref(self._first_index),
            ctypes.c_size_t(1),
            *failed,
            ctypes.c_void_p(stream),
        )
        check_cuda(status, "cudaMemcpyBatchAsync")
