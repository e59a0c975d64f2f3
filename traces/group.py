"""What replay needs of one recorded request, wherever it comes from: a file, arrays in memory, a generator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

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
        """Recorded KV heads: the model's, unless the trace names a few."""
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
        """Available rankings: true, exact, draft1, …, mean, prev_layer, draft1_sparse, …"""

    @abstractmethod
    def ranking(self, name: str, block_size_tokens: int) -> NDArray[np.int32]:
        """Selectable block ids by rank, int32 [S, L_P, H, M]; −1 where there are fewer or the row is masked.

        Masked are rows t < j of `draft{j}` and model layer 0 of `prev_layer`. Raises TraceError for a ranking or a
        block size that is not recorded.
        """

    def query_cos(self, block_size_tokens: int) -> NDArray[np.float32] | None:
        """Cosine of each query with that of the position before, mean over the query group: float32 [S, L_P, H].

        None where it was not recorded. Raises TraceError for a block size that is not recorded.
        """
        self.layers(block_size_tokens)
        return None

    def prefill_mass(self, block_size_tokens: int) -> NDArray[np.float32] | None:
        """Softmax mass on each block of the prompt's queries before position 0, mean over them and the query group.

        float32 [L_P, H, n], rows sum to 1; n blocks of the context at position 0. Times (context − 1) it is their sum.
        None where it was not recorded. Raises TraceError for a block size that is not recorded.
        """
        self.layers(block_size_tokens)
        return None

    def prompt_window_mass(self, block_size_tokens: int) -> NDArray[np.float32] | None:
        """As `prefill_mass`, of the prompt's last few queries only (SnapKV's observation window)."""
        self.layers(block_size_tokens)
        return None

    def accepted(self, distance: int) -> NDArray[np.bool_] | None:
        """Whether the token guessed for each position `distance` steps before was right, bool [S].

        None where no guesses were recorded at that distance, or a synthesised trace does not model which were right.
        """
        return None

    @property
    def tokens_per_step(self) -> NDArray[np.int32]:
        """Tokens that the request gains at each position, int32 [S]: one."""
        return np.ones(self.num_positions, dtype=np.int32)

    @property
    def sparse_policy(self) -> Mapping[str, int | float | str] | None:
        """Residency rules under whose working set the drafts of `draft{j}_sparse` ran; None where there are none."""
        return None

    @abstractmethod
    def has_block_mass(self, block_size_tokens: int) -> bool:
        """Whether `mass` covers every block."""

    @abstractmethod
    def mass(self, block_size_tokens: int) -> BlockMass:
        """Softmax mass per block."""
