"""Kernels run on a CUDA device when there is one, else on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from realhw.models import LoadedModel

torch = pytest.importorskip("torch")


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def generator(device: str) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(7)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Matrices of tiny models only wait for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def loaded(one_thread: None) -> LoadedModel:
    """A tiny random Llama."""
    from tests.realhw.tiny_llama import loaded_model

    return loaded_model()
