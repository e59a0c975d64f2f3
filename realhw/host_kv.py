"""Pinned host memory that holds the full KV of a decode run."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from realhw.device import check_cuda, cuda_runtime
from realhw.geometry import ModelGeometry
from traces.errors import EnvironmentMissing

HOST_SHARE = 0.8
"""Of the memory that the host has available; pinned pages cannot be taken back."""
FILL_ELEMENTS = 1 << 27
GIB = 1 << 30


def available_host_bytes() -> int:
    """What the host can still give: free memory, or the control group's limit where that is less."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    have = int(fields["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text(encoding="ascii").strip()).isdigit():
        have = min(have, int(text))
    return have


def require_pinnable(num_bytes: int) -> None:
    """Raises EnvironmentMissing where the host cannot pin so much."""
    have = int(HOST_SHARE * available_host_bytes())
    if num_bytes > have:
        raise EnvironmentMissing(
            f"pinned host memory: need {num_bytes / GIB:.1f} GiB, have {have / GIB:.1f} GiB that can be pinned; "
            f"largest that fits: {have // GIB} GiB"
        )


class HostKv:
    """A pinned buffer of random bf16 values, viewed as the KV of as many requests as it holds."""

    def __init__(self, num_bytes: int) -> None:
        """Raises EnvironmentMissing where the host cannot pin so much."""
        require_pinnable(num_bytes)
        # Not torch's pinned allocator: it rounds up to a power of two.
        self._runtime, pointer = cuda_runtime(), ctypes.c_void_p()
        self._runtime.cudaHostAlloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_uint]
        check_cuda(
            self._runtime.cudaHostAlloc(ctypes.byref(pointer), num_bytes, 0), f"pinning {num_bytes / GIB:.1f} GiB"
        )
        self._pointer, self.num_bytes = pointer, num_bytes
        buffer = (ctypes.c_uint8 * num_bytes).from_address(int(pointer.value or 0))
        self.values = torch.frombuffer(buffer, dtype=torch.bfloat16)
        chunk = torch.randn(FILL_ELEMENTS, device="cuda").bfloat16()
        for part in torch.split(self.values, FILL_ELEMENTS):
            part.copy_(chunk[: len(part)])

    def close(self) -> None:
        """Unpin and free; nothing may use the views any more."""
        torch.cuda.synchronize()
        check_cuda(self._runtime.cudaFreeHost(self._pointer), "cudaFreeHost")

    def view(
        self, g: ModelGeometry, batch_size: int, num_blocks: int, block_size_tokens: int, held_bytes: int
    ) -> torch.Tensor:
        """KV [A, L, H, n, 2, P, d] of A ≤ B requests: the batch, or as many as `held_bytes` hold; others share them."""
        per_request = request_bytes(g, num_blocks, block_size_tokens) // 2
        requests = max(1, min(batch_size, held_bytes // 2 // per_request))
        shape = (requests, g.num_layers, g.num_kv_heads, num_blocks, 2, block_size_tokens, g.head_dim)
        return self.values[: requests * per_request].view(shape)


def request_bytes(g: ModelGeometry, num_blocks: int, block_size_tokens: int) -> int:
    """Bytes of one request's whole KV."""
    return g.num_layers * g.num_kv_heads * num_blocks * g.block_bytes(block_size_tokens)
