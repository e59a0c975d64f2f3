"""A serving workload: when requests arrive, how many tokens they bring and generate, and which prefix they share."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Request(NamedTuple):
    """One request as a reader yields it; a million of them need not be in memory together."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    """Ids of the prompt's blocks in order; equal ids under equal predecessors hold the same KV."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """N requests in arrival order as read-only arrays.

    Prefix blocks are in CSR form: those of request i are `hash_ids[hash_offsets[i]:hash_offsets[i + 1]]`.
    Raises InputError when shapes disagree, a time is negative, not finite or earlier than its predecessor, or a
    token count is below 1.
    """

    name: str
    arrival_s: FloatArray
    """[N], seconds from the start of the workload, non-decreasing."""
    prompt_tokens: IntArray
    """[N], at least 1."""
    output_tokens: IntArray
    """[N], at least 1."""
    hash_ids: IntArray | None = None
    """[sum of blocks], or None where the source tells nothing about shared prefixes."""
    hash_offsets: IntArray | None = None
    """[N + 1], from 0 to len(hash_ids), non-decreasing."""
    hash_block_tokens: int | None = None
    """Tokens of a full prefix block (the last of a prompt may be partial)."""
    num_dropped: int = 0
    """Rows of the source that are no served request (a failed call has no output)."""

    def __post_init__(self) -> None:
        _freeze(self, "arrival_s", np.float64)
        for field in ("prompt_tokens", "output_tokens", "hash_ids", "hash_offsets"):
            if getattr(self, field) is not None:
                _freeze(self, field, np.int64)
        if self.num_requests == 0:
            raise InputError(f"{self.name}: a workload needs at least one request")
        for field in ("prompt_tokens", "output_tokens"):
            if getattr(self, field).shape != self.arrival_s.shape:
                raise InputError(
                    f"{self.name}: {field} has shape {getattr(self, field).shape}, arrival_s {self.arrival_s.shape}"
                )
            self._refuse_first(field, getattr(self, field) < 1, "at least 1 token")
        self._refuse_first("arrival_s", ~np.isfinite(self.arrival_s) | (self.arrival_s < 0), "finite and >= 0 s")
        decreasing = np.concatenate(([False], np.diff(self.arrival_s) < 0))
        self._refuse_first("arrival_s", decreasing, "no earlier than its predecessor")
        self._check_hash_ids()

    def _refuse_first(self, field: str, wrong: NDArray[np.bool_], expected: str) -> None:
        if wrong.any():
            index = int(np.argmax(wrong))
            raise InputError(f"{self.name}: {field}[{index}] = {getattr(self, field)[index]}, expected {expected}")

    def _check_hash_ids(self) -> None:
        given = [self.hash_ids is not None, self.hash_offsets is not None, self.hash_block_tokens is not None]
        if any(given) and not all(given):
            raise InputError(f"{self.name}: hash_ids, hash_offsets and hash_block_tokens come together or not at all")
        if self.hash_ids is None or self.hash_offsets is None or self.hash_block_tokens is None:
            return
        offsets = self.hash_offsets
        if offsets.shape != (self.num_requests + 1,) or offsets[0] != 0 or offsets[-1] != len(self.hash_ids):
            raise InputError(
                f"{self.name}: hash_offsets must have {self.num_requests + 1} entries from 0 to {len(self.hash_ids)}"
            )
        blocks = np.diff(offsets)
        expected = -(-self.prompt_tokens // self.hash_block_tokens)
        if (blocks != expected).any():
            index = int(np.argmax(blocks != expected))
            raise InputError(
                f"{self.name}: request {index} has {blocks[index]} hash_ids, expected {expected[index]}: "
                f"{self.prompt_tokens[index]} prompt tokens in blocks of {self.hash_block_tokens}"
            )

    @property
    def num_requests(self) -> int:
        return int(self.arrival_s.shape[0])

    @property
    def duration_s(self) -> float:
        """From the workload's start to its last arrival."""
        return float(self.arrival_s[-1])

    def prefix_blocks(self, index: int) -> IntArray:
        """Ids of the prompt blocks of request `index`, a view [num_blocks]; empty where the source has none."""
        if self.hash_ids is None or self.hash_offsets is None:
            return np.empty(0, np.int64)
        return self.hash_ids[self.hash_offsets[index] : self.hash_offsets[index + 1]]

    def requests(self) -> Iterator[Request]:
        """The requests one by one, as a reader of the source file would yield them."""
        for index in range(self.num_requests):
            yield Request(
                float(self.arrival_s[index]),
                int(self.prompt_tokens[index]),
                int(self.output_tokens[index]),
                None if self.hash_ids is None else tuple(self.prefix_blocks(index).tolist()),
            )

    def with_arrivals(self, arrival_s: FloatArray) -> Workload:
        """The same requests in the same order at other times [N]."""
        return replace(self, arrival_s=arrival_s)

    @classmethod
    def from_requests(
        cls,
        name: str,
        requests: Iterable[Request],
        *,
        hash_block_tokens: int | None = None,
        drop_empty: bool = False,
    ) -> Workload:
        """Collects a stream of requests.

        `drop_empty`: requests without a prompt or an output are left out and counted; otherwise they are refused.
        Raises InputError as the class does, and when some requests have hash ids and others have none.
        """
        arrival_s, prompt_tokens, output_tokens = array("d"), array("q"), array("q")
        hash_ids, hash_offsets = array("q"), array("q", [0])
        num_dropped = 0
        hashed: bool | None = None
        for request in requests:
            if drop_empty and (request.prompt_tokens < 1 or request.output_tokens < 1):
                num_dropped += 1
                continue
            if hashed is None:
                hashed = request.hash_ids is not None
            elif hashed != (request.hash_ids is not None):
                raise InputError(f"{name}: request {len(arrival_s)}: hash_ids on some requests only")
            arrival_s.append(request.arrival_s)
            prompt_tokens.append(request.prompt_tokens)
            output_tokens.append(request.output_tokens)
            hash_ids.extend(request.hash_ids or ())
            hash_offsets.append(len(hash_ids))
        return cls(
            name,
            np.array(arrival_s, np.float64),
            np.array(prompt_tokens, np.int64),
            np.array(output_tokens, np.int64),
            np.array(hash_ids, np.int64) if hashed else None,
            np.array(hash_offsets, np.int64) if hashed else None,
            hash_block_tokens if hashed else None,
            num_dropped,
        )


def _freeze(workload: Workload, field: str, dtype: Any) -> None:
    """Replaces a field by a read-only, one-dimensional array; a writeable array of the caller is copied, not frozen."""
    values = np.asarray(getattr(workload, field))
    if values.ndim != 1:
        raise InputError(f"{workload.name}: {field} must have one dimension, got shape {values.shape}")
    if values.dtype != dtype or values.flags.writeable:
        if dtype == np.int64 and values.dtype.kind not in "iu" and values.size:
            raise InputError(f"{workload.name}: {field} must hold whole numbers, got {values.dtype}")
        values = values.astype(dtype)
        values.setflags(write=False)
    object.__setattr__(workload, field, values)
