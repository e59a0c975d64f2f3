"""NUMA nodes of the host: which exist, and binding this process's CPUs and new memory to one."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from traces.errors import EnvironmentMissing, InputError

NODES = Path("/sys/devices/system/node")
_MPOL_DEFAULT, _MPOL_BIND = 0, 2
_SYS_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Source: Linux system call tables (arch/x86/entry/syscalls, include/uapi/asm-generic/unistd.h)."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """CPUs of each node."""

    cpus: dict[int, frozenset[int]]

    @property
    def num_nodes(self) -> int:
        return max(1, len(self.cpus))

    def summary(self) -> str:
        """One line for the terminal."""
        if self.num_nodes == 1:
            return "one NUMA node: far and interleaved placement cannot be measured here"
        return f"{self.num_nodes} NUMA nodes: " + ", ".join(f"{n} ({len(c)} CPUs)" for n, c in self.cpus.items())


def parse_cpus(text: str) -> frozenset[int]:
    """CPU ids of a kernel list such as `0-3,8`."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def describe(root: Path = NODES) -> Nodes:
    """The nodes that the kernel shows; none where it shows none."""
    found = sorted(root.glob("node[0-9]*"), key=lambda p: int(p.name[4:]))
    return Nodes({int(p.name[4:]): parse_cpus((p / "cpulist").read_text()) for p in found})


def bind(node: int) -> None:
    """Run on a node's CPUs and take new memory from it. Raises `InputError`, `EnvironmentMissing`."""
    nodes = describe()
    if node not in nodes.cpus:
        raise InputError(f"NUMA node {node}: this machine has {sorted(nodes.cpus) or 'none listed'}")
    try:
        os.sched_setaffinity(0, nodes.cpus[node])
    except OSError as error:
        raise EnvironmentMissing(f"NUMA node {node}: {error.strerror} (none of its CPUs may be used here?)") from error
    _set_memory_policy(_MPOL_BIND, 1 << node)


@contextmanager
def bound(node: int) -> Iterator[None]:
    """`bind` for a while; memory that was taken meanwhile stays where it is."""
    cpus = os.sched_getaffinity(0)
    try:
        bind(node)
        yield
    finally:
        os.sched_setaffinity(0, cpus)
        _set_memory_policy(_MPOL_DEFAULT, 0)


def _set_memory_policy(mode: int, nodes: int) -> None:
    number = _SYS_SET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        raise EnvironmentMissing(f"{os.uname().machine}: memory binding is known for x86_64 and aarch64 only")
    mask = ctypes.c_ulong(nodes)
    status = ctypes.CDLL(None, use_errno=True).syscall(number, mode, ctypes.byref(mask) if nodes else None, 64)
    if status != 0:
        raise EnvironmentMissing(f"set_mempolicy: {os.strerror(ctypes.get_errno())}")
