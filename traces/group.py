"""What replay needs of one recorded request, wherever it comes from: a file, arrays in memory, a generator."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from traces.mass import BlockMass
from traces.schema import ModelGeometry


class TraceGroup(ABC):
    """One request: S decode positions of a model's attention, ranked by block.

    kv_len: int32 [S], KV length at each position, the current token included.
    """

    name: str
    model: ModelGeometry
    kv_len: NDArray[np.int32]

    @property
    def num_positions(self) -> int:
        return len(self.kv_len)

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def num_kv_heads(self) -> int:
        return self.model.num_kv_heads

    @property
    @abstractmethod
    def content_hash(self) -> str:
        """sha256 over semantic attributes and decoded arrays: equal hashes replay alike."""

    @property
    @abstractmethod
    def block_sizes(self) -> tuple[int, ...]:
        """Recorded block sizes in tokens, ascending."""

    @abstractmethod
    def layers(self, block_size_tokens: int) -> tuple[int, ...]:
        """Model layers recorded at this block size. Raises TraceError for a block size that is not recorded."""

    @abstractmethod
    def max_ranked_blocks(self, block_size_tokens: int) -> int:
        """M: length of a ranking."""

    @abstractmethod
    def rankings(self, block_size_tokens: int) -> tuple[str, ...]:
        """Available rankings: true, exact, draft1, …"""

    @abstractmethod
    def ranking(self, name: str, block_size_tokens: int) -> NDArray[np.int32]:
        """Selectable block ids by rank, int32 [S, L_P, H, M]; −1 where there are fewer or the row is masked."""

    @abstractmethod
    def mass(self, block_size_tokens: int) -> BlockMass:
        """Softmax mass per block."""
