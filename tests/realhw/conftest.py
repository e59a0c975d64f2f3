"""Kernels run on a CUDA device when there is one, else on the CPU through Triton's interpreter (read at decoration)."""

import os

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def generator(device: str) -> "torch.Generator":
    return torch.Generator(device=device).manual_seed(7)
