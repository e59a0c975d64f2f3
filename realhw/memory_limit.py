"""Running out of device memory as one line that says what would fit."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

from traces.errors import InputError

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "bytes": 1}


def peak_memory_bytes() -> int:
    """Most memory that this process had in use: tensors on the current GPU since torch's last reset, else resident."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def out_of_memory(error: BaseException, model: Any, cached_tokens: int, chunk_tokens: int) -> InputError | None:
    """An InputError for torch's out-of-memory errors, CUDA or CPU; None for any other.

    cached_tokens: KV length that had been reached.
    """
    text = str(error)
    cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in text
    if not isinstance(error, torch.OutOfMemoryError) and not cpu:
        return None
    if cached_tokens == 0:
        advice = f"set prefill_chunk_tokens below {chunk_tokens}, or dtype bfloat16"
        return InputError(f"out of memory in the first {chunk_tokens} tokens of the prompt: {advice}")
    device = model.device
    have = used = 0
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    if device.type == "cuda":
        used = torch.cuda.memory_allocated(device)
        have = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    fits = fitting_context(cached_tokens, used, requested_bytes(text), have, weights)
    return InputError(
        f"out of memory at KV length {cached_tokens} on {device}: a context of about {fits} tokens fits "
        f"(prefill_chunk_tokens is {chunk_tokens}; smaller chunks take less); steps already recorded stay"
    )


def fitting_context(cached_tokens: int, used_bytes: int, requested: int, have_bytes: int, weights_bytes: int) -> int:
    """Context that fits where what is not weights grows with the context; `cached_tokens` where nothing is known."""
    need, free = used_bytes + requested - weights_bytes, have_bytes - weights_bytes
    if have_bytes == 0 or need <= 0 or free <= 0:
        return cached_tokens
    return min(cached_tokens, int(cached_tokens * free / need))


def requested_bytes(message: str) -> int:
    """The allocation that failed, as torch's message states it; 0 where it does not."""
    found = re.search(r"[Tt]ried to allocate ([0-9.]+) (KiB|MiB|GiB|bytes)", message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0
