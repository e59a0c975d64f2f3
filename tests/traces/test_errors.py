"""What a user reads when something does not fit."""

from __future__ import annotations

from traces.errors import CapacityError


def test_a_pool_that_is_far_too_small_is_told_in_gib() -> None:
    assert str(CapacityError("hbm", 90 << 30, 72 << 30, 51)) == (
        "hbm cannot hold the batch: need 90.00 GiB, have 72.00 GiB; the largest batch that fits is 51"
    )


def test_amounts_that_look_alike_in_gib_are_told_in_bytes() -> None:
    assert "need 77,309,411,329 bytes, have 77,309,411,328 bytes" in str(
        CapacityError("hbm", (72 << 30) + 1, 72 << 30, 1)
    )
