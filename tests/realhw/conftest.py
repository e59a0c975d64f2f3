"""Kernels run on a CUDA device when there is one, else on the CPU."""

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def generator(device: str) -> "torch.Generator":
    return torch.Generator(device=device).manual_seed(7)
