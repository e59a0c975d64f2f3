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


def require_rows(name: str, tensor: torch.Tensor) -> None:
    """`InputError` unless [B, H, n] holds each row in one piece and its rows at one distance."""
    if tensor.stride(2) != 1 or tensor.stride(0) != tensor.shape[1] * tensor.stride(1):
        raise InputError(f"{name}: strides {tensor.stride()} of shape {tuple(tensor.shape)}, need rows at one distance")


def require_range(name: str, value: int, low: int, high: int) -> None:
    """`InputError` unless low <= value <= high."""
    if not low <= value <= high:
        raise InputError(f"{name}: {value}, need {low} to {high}")


FLOATS = (torch.bfloat16, torch.float16, torch.float32)
