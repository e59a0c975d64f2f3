"""Argument checks shared by the kernel launchers."""

from __future__ import annotations

import torch

from traces.errors import InputError


def require_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """`InputError` unless `tensor` has exactly `shape`."""
    if tuple(tensor.shape) != shape:
        raise InputError(f"{name}: shape {tuple(tensor.shape)}, need {shape}")


def require_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """`InputError` unless `tensor` has one of `dtypes`."""
    if tensor.dtype not in dtypes:
        raise InputError(f"{name}: dtype {tensor.dtype}, need {' or '.join(map(str, dtypes))}")


def require_contiguous(**tensors: torch.Tensor) -> None:
    """`InputError` naming the first tensor that is not contiguous."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise InputError(f"{name}: strides {tensor.stride()} of shape {tuple(tensor.shape)}, need contiguous")


def require_range(name: str, value: int, low: int, high: int) -> None:
    """`InputError` unless low <= value <= high."""
    if not low <= value <= high:
        raise InputError(f"{name}: {value}, need {low} to {high}")


FLOATS = (torch.bfloat16, torch.float16, torch.float32)
