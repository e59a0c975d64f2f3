"""What a Workload accepts, and that nothing can change it afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from traces.errors import InputError
from traces.workload import Request, Workload


def workload(**changes: object) -> Workload:
    fields: dict = {
        "name": "w",
        "arrival_s": np.array([0.0, 1.0]),
        "prompt_tokens": np.array([600, 512]),
        "output_tokens": np.array([3, 4]),
        "hash_ids": np.array([5, 6, 5]),
        "hash_offsets": np.array([0, 2, 3]),
        "hash_block_tokens": 512,
    }
    return Workload(**(fields | changes))


def test_arrays_are_read_only_copies_of_the_right_type() -> None:
    arrival_s = np.array([0.0, 1.0])
    made = workload(arrival_s=arrival_s, prompt_tokens=np.array([600, 512], np.int32))
    arrival_s[0] = 9.0
    assert made.arrival_s.tolist() == [0.0, 1.0]
    assert made.prompt_tokens.dtype == np.int64
    for array in (made.arrival_s, made.prompt_tokens, made.output_tokens, made.hash_ids, made.hash_offsets):
        assert array is not None
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    moved = made.with_arrivals(np.array([2.0, 2.5]))
    assert moved.duration_s == 2.5
    assert moved.hash_ids is made.hash_ids
    assert made.duration_s == 1.0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"arrival_s": np.array([1.0, 0.5])}, r"arrival_s\[1\] = 0.5, expected no earlier than its predecessor"),
        ({"arrival_s": np.array([-1.0, 0.5])}, r"arrival_s\[0\] = -1.0, expected finite and >= 0 s"),
        ({"arrival_s": np.array([0.0, np.nan])}, r"arrival_s\[1\] = nan"),
        ({"arrival_s": np.array([0.0])}, r"prompt_tokens has shape \(2,\), arrival_s \(1,\)"),
        ({"arrival_s": np.zeros((1, 2))}, "arrival_s must have one dimension"),
        ({"arrival_s": np.zeros(0)}, "at least one request"),
        ({"output_tokens": np.array([3, 0])}, r"output_tokens\[1\] = 0, expected at least 1 token"),
        ({"output_tokens": np.array([3.0, 2.5])}, "output_tokens must hold whole numbers, got float64"),
        ({"hash_offsets": None}, "come together or not at all"),
        ({"hash_offsets": np.array([0, 2, 4])}, "hash_offsets must have 3 entries from 0 to 3"),
        ({"hash_offsets": np.array([0, 1, 3])}, "request 0 has 1 hash_ids, expected 2: 600 prompt tokens"),
    ],
)
def test_inconsistent_arrays_are_refused_with_the_index(changes: dict, problem: str) -> None:
    with pytest.raises(InputError, match=f"^w: .*{problem}"):
        workload(**changes)


def test_requests_of_mixed_kind_and_without_output() -> None:
    hashed, plain = Request(0.0, 5, 1, (3,)), Request(1.0, 5, 0, None)
    with pytest.raises(InputError, match="request 1: hash_ids on some requests only"):
        Workload.from_requests("mixed", [hashed, plain], hash_block_tokens=512)
    with pytest.raises(InputError, match=r"output_tokens\[1\] = 0"):
        Workload.from_requests("failed", [plain._replace(output_tokens=2), plain])
    kept = Workload.from_requests("failed", [plain._replace(output_tokens=2), plain], drop_empty=True)
    assert (kept.num_requests, kept.num_dropped) == (1, 1)
    assert kept.prefix_blocks(0).size == 0
