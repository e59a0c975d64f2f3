"""Memory pools against hand-computed bytes."""

from __future__ import annotations

import pytest

from simulator import catalog
from simulator.capacity import footprint, kv_bytes_in_hbm, slots_per_head
from simulator.policy_composition import resolve_policy
from simulator.specs.experiment import EngineSpec
from traces.errors import CapacityError

QWEN = catalog.load_model("Qwen3-8B")
H100 = catalog.load_hardware("h100-sxm")
ENGINE = EngineSpec()
CONTEXT = 32768


def pools(system: str, overrides: dict[str, object] | None = None, kv_len: int = CONTEXT, num_gpus: int = 1):
    return footprint(QWEN, H100, resolve_policy(system, overrides or {}, kv_len), ENGINE, kv_len, num_gpus)


def test_dense_keeps_the_whole_kv():
    """Qwen3-8B: 147,456 bytes a token; 32K is 4.50 GiB."""
    dense = pools("dense")
    assert kv_bytes_in_hbm(QWEN, resolve_policy("dense", {}, CONTEXT), CONTEXT) == 4.5 * 2**30
    assert dense.hbm_per_request_bytes == 4.5 * 2**30 + 4 * QWEN.vocab
    assert dense.host_per_request_bytes == 0


def test_sparse_keeps_k_slots_and_the_open_block():
    """2,048 tokens of Qwen3-8B are 288 MiB; the open block adds 36 x 8 x 8 KiB."""
    policy = resolve_policy("retrieval", {"kv_budget_tokens": 2048}, CONTEXT)
    assert slots_per_head(policy) == 128
    assert kv_bytes_in_hbm(QWEN, policy, CONTEXT) == 288 * 2**20 + 36 * 8 * 8192


def test_compressed_keys_are_a_sixteenth_of_the_kv_at_block_16():
    assert QWEN.metadata_bytes(CONTEXT // 16) == QWEN.kv_bytes(CONTEXT) / 16


def test_slack_is_charged():
    exact = pools("oasiskv", {"residency": "exact"}).hbm_per_request_bytes
    slack = pools("oasiskv", {"residency": "slack", "slack_blocks": 10}).hbm_per_request_bytes
    assert slack - exact == 10 * 36 * 8 * 8192


def test_full_kv_lies_in_host_memory_shared_by_the_gpus_of_the_host():
    one, eight = pools("oasiskv"), pools("oasiskv", num_gpus=8)
    assert one.host_per_request_bytes == 4.5 * 2**30
    assert eight.host_available_bytes == one.host_available_bytes // 8


@pytest.mark.parametrize("system", ["dense", "quest", "retrieval", "oasiskv"])
def test_the_largest_batch_fits_and_one_more_does_not(system):
    fits = pools(system)
    fits.require(fits.max_batch_size)
    with pytest.raises(CapacityError) as caught:
        fits.require(fits.max_batch_size + 1)
    assert caught.value.largest_batch_size == fits.max_batch_size
    assert caught.value.need_bytes > caught.value.have_bytes
    assert f"largest batch that fits is {fits.max_batch_size}" in str(caught.value)


def test_sparse_systems_hold_many_more_requests_than_dense():
    assert pools("oasiskv").max_batch_size > 4 * pools("dense").max_batch_size


def test_less_hbm_utilisation_means_fewer_requests():
    policy = resolve_policy("dense", {}, CONTEXT)
    small = footprint(QWEN, H100, policy, EngineSpec(hbm_utilization=0.5), CONTEXT, 1)
    assert small.max_batch_size < pools("dense").max_batch_size


def test_fp8_halves_the_kv():
    bf16, fp8 = (
        kv_bytes_in_hbm(QWEN, resolve_policy("dense", {"kv_dtype": d}, CONTEXT), CONTEXT) for d in ("bf16", "fp8")
    )
    assert bf16 == 2 * fp8


def test_sliding_window_layers_keep_their_window_only():
    model = catalog.load_model("gpt-oss-20b")
    policy = resolve_policy("oasiskv", {"kv_budget_tokens": 1024}, 65536)
    full = model.working_set_bytes(slots_per_head(policy) + 1, 16)
    windows = len(model.sliding_layers) * model.sliding_window * model.kv_bytes_per_token_per_layer()
    assert kv_bytes_in_hbm(model, policy, 65536) == full + windows
