"""The GPU that the harness runs on: what it is, and whether it and the software are recent enough."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from dataclasses import asdict, dataclass

import torch
import triton

from traces.errors import EnvironmentMissing

MIN_TRITON = (3, 2)
"""First version with the atomics' scopes and the cache modifiers that the kernels use."""
MIN_COMPUTE_CAPABILITY = (8, 0)
"""bf16 tensor cores."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a measurement ran on."""

    name: str
    driver: str
    cuda: str
    torch: str
    triton: str
    python: str
    num_sms: int
    hbm_bytes: int
    l2_bytes: int

    def as_dict(self) -> dict[str, str | int]:
        return asdict(self)


def require_gpu() -> torch.device:
    """The current CUDA device; `EnvironmentMissing` says what is missing and what works without it."""
    if not torch.cuda.is_available():
        raise EnvironmentMissing(
            "no CUDA device: calibrate and validate need one; run and sweep simulate with catalog profiles"
        )
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < MIN_TRITON:
        raise EnvironmentMissing(f"triton {triton.__version__}: need {'.'.join(map(str, MIN_TRITON))} or newer")
    capability = torch.cuda.get_device_capability()
    if capability < MIN_COMPUTE_CAPABILITY:
        need = ".".join(map(str, MIN_COMPUTE_CAPABILITY))
        raise EnvironmentMissing(f"{torch.cuda.get_device_name()}: compute capability {capability}, need {need}")
    return torch.device("cuda", torch.cuda.current_device())


def device_info() -> DeviceInfo:
    """Describe the current CUDA device."""
    properties = torch.cuda.get_device_properties(require_gpu())
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        driver = "unknown"
    return DeviceInfo(
        name=properties.name,
        driver=driver.strip(),
        cuda=str(torch.version.cuda),
        torch=torch.__version__,
        triton=triton.__version__,
        python=platform.python_version(),
        num_sms=properties.multi_processor_count,
        hbm_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
    )


def cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime library that torch has loaded."""
    require_gpu()
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.', maxsplit=1)[0]}")


def check_cuda(status: int, call: str) -> None:
    """`EnvironmentMissing` naming the call unless it succeeded."""
    if status != 0:
        raise EnvironmentMissing(f"{call}: CUDA error {status}")


def new_stream(priority: int = 0) -> torch.cuda.Stream:
    """A stream of the current device; negative priorities run first."""
    return torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]


def new_event(timing: bool = False, external: bool = False) -> torch.cuda.Event:
    """An event; `external` ones become record and wait nodes of a captured graph."""
    return torch.cuda.Event(enable_timing=timing, external=external)  # type: ignore[no-untyped-call]


def num_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Nodes of a captured graph that was kept."""
    count = ctypes.c_size_t(0)
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    check_cuda(cuda_runtime().cudaGraphGetNodes(handle, None, ctypes.byref(count)), "cudaGraphGetNodes")
    return count.value
