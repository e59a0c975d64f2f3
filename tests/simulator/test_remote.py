"""KV beyond the host: message times, paths, what binds, what each tier's bandwidth touches, what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from simulator import catalog
from simulator.demand import Demand
from simulator.experiment import resolve
from simulator.points import demands_by_gpu, run_point
from simulator.remote import nic_message_s, pages_across, remote_cost
from simulator.specs.experiment import PlacementSpec
from simulator.topology import HostTopology, Solo
from tests.simulator.synthetic_trace import synthetic_point
from traces.errors import InputError

H100 = catalog.load_hardware("h100-sxm")
BLOCK = 8192
TIERS = ("host", "remote", "nvme", "nvme-of")


pytestmark = pytest.mark.usefixtures("synthetic")


def run(**settings):
    row = run_point(synthetic_point(**settings), use_cache=False)
    assert row["status"] == "ok", row["error"]
    return row


def scaled(tmp_path: Path, factor: float, *figures: str) -> str:
    """The H100's profile with some figures times `factor` (`nic`: its rates at every message size)."""
    profile = H100.model_dump(mode="json")
    for name in figures:
        section, _, figure = name.partition(".")
        found = [profile[section][figure]] if figure else []
        if name == "nic":
            found = [profile["nic"]["bytes_per_s"], *(row["bytes_per_s"] for row in profile["nic"]["messages"])]
        for value in found:
            value["value"] *= factor
    path = tmp_path / f"{factor}-{'-'.join(figures)}.yaml"
    path.write_text(json.dumps(profile))
    return str(path)


# Messages


@pytest.mark.parametrize(("size", "rate"), [(4096, 3.8e9), (8192, 5.9e9), (16384, 9.6e9), (65536, 12.05e9)])
def test_a_message_takes_what_was_measured_at_its_size(size, rate):
    assert nic_message_s(H100.nic, size) == pytest.approx(size / rate)


def test_messages_between_and_beyond_the_measured_sizes():
    at = {size: nic_message_s(H100.nic, size) for size in (4096, 8192, 12288, 65536)}
    assert at[8192] < at[12288] == pytest.approx((at[8192] + nic_message_s(H100.nic, 16384)) / 2)
    # A small message costs its overhead, a large one the line rate.
    assert nic_message_s(H100.nic, 512) == pytest.approx(at[4096] - (at[8192] - at[4096]) * (4096 - 512) / 4096)
    assert nic_message_s(H100.nic, 2**30) == pytest.approx(2**30 / 12.05e9, rel=1e-3)


def test_drives_are_bound_by_operations_for_small_blocks_and_bytes_for_large():
    placement, drives = PlacementSpec(kv_tier="nvme"), H100.nvme
    small, large = (remote_cost(H100, placement, size, size, 1) for size in (4096, 2**20))
    assert small.read_s == pytest.approx(1 / drives.read_iops.value)
    assert large.read_s == pytest.approx(2**20 / drives.read_bytes_per_s.value)
    assert remote_cost(H100, placement, 4096, 512, 2).write_s == pytest.approx(2 / drives.write_iops.value)


def test_drives_behind_the_network_take_the_slower_of_both():
    def read_s(tier: str, size: int) -> float:
        return remote_cost(H100, PlacementSpec(kv_tier=tier), size, size, 1).read_s

    for size in (4096, 8192, 2**20):
        assert read_s("nvme-of", size) == max(read_s("nvme", size), read_s("remote", size))


@pytest.mark.parametrize(
    ("path", "nic", "host", "share"),
    [
        ("staged", "local", "local", 0), ("staged", "far", "local", 1), ("staged", "far", "far", 0),
        ("staged", "local", "far", 1), ("staged", "local", "interleave", 0.5), ("direct", "local", "far", 0),
        ("direct", "far", "far", 1),
    ],
)  # fmt: skip
def test_what_crosses_sockets_between_nic_and_memory(path, nic, host, share):
    assert pages_across(PlacementSpec(kv_tier="remote", remote_path=path, nic_numa=nic, host_numa=host)) == share


# Sharing


def shares(gpus: list[int], solo: Solo, both: bool = True, **placement: Any) -> dict[int, tuple[float, float]]:
    topology = HostTopology(H100, 8, PlacementSpec(**placement))
    return {gpu: tuple(share) for gpu, share in topology.shares(gpus if both else [], gpus, solo).items()}


ALL = list(range(8))


def test_each_gpu_has_a_nic_and_so_its_full_rate():
    assert shares(ALL, Solo(1e9, 6e9), kv_tier="remote") == dict.fromkeys(ALL, (1.0, 1.0))


def test_gpus_share_the_nics_that_there_are():
    one_nic = H100.nic.per_socket.model_copy(update={"value": 1})
    hardware = H100.model_copy(update={"nic": H100.nic.model_copy(update={"per_socket": one_nic})})
    topology = HostTopology(hardware, 8, PlacementSpec(kv_tier="remote"))
    assert all(share.remote == pytest.approx(1 / 4) for share in topology.shares(ALL, ALL, Solo(1e9, 6e9)).values())
    assert topology.shares([], [0, 1], Solo(1e9, 6e9))[0].remote == 1.0  # different sockets


def test_drives_of_a_socket_are_shared_by_its_gpus():
    rates = shares(ALL, Solo(1e9, 26e9), kv_tier="nvme")
    assert rates[0] == pytest.approx((1.0, 1 / 4))


def test_far_nics_share_the_inter_socket_link():
    solo = Solo(1e9, 40e9)
    cross = H100.host.inter_socket_bytes_per_s.value / 4  # four GPUs fetch each way
    assert shares(ALL, solo, both=False, kv_tier="remote", remote_path="direct", nic_numa="far")[0][1] == pytest.approx(
        cross / 40e9
    )
    assert shares(ALL, solo, both=False, kv_tier="remote", remote_path="direct")[0][1] == 1.0


def test_staged_bytes_cross_the_host_memory_twice():
    dram = H100.host.dram_bytes_per_s.value
    solo = Solo(54e9, 54e9)
    rates = shares(ALL, solo, kv_tier="remote")
    # Four GPUs of a socket: four flows in and four out of its DRAM, which they fill.
    assert rates[0] == pytest.approx((dram / 8 / 54e9, dram / 8 / 54e9))
    # Landing on the GPU, no byte touches it.
    direct = shares(ALL, solo, both=False, kv_tier="remote", remote_path="direct")
    assert direct[0][1] == 1.0


def test_a_far_nic_and_far_pages_meet_on_one_socket():
    """The NIC writes the far DRAM beside it; only H2D crosses the socket link."""
    solo = Solo(30e9, 30e9)
    rates = shares(ALL, solo, kv_tier="remote", nic_numa="far", host_numa="far")
    cross = H100.host.inter_socket_bytes_per_s.value / 4
    assert rates[0] == pytest.approx((cross / 30e9, 1.0))


# Points


COMMON = {"policy__fetch_cap": 0.1, "workload__batch_size": 32}
BEYOND = {**COMMON, "placement__kv_tier": "remote"}


def test_bytes_are_counted_on_the_links_that_they_cross():
    host, staged = run(**COMMON), run(**BEYOND)
    direct = run(**BEYOND, placement__remote_path="direct")
    drives = run(**{**BEYOND, "placement__kv_tier": "nvme"})
    behind = run(**{**BEYOND, "placement__kv_tier": "nvme-of"})
    h2d, d2h = host["h2d_bytes_per_token"], host["d2h_bytes_per_token"]
    columns = ("h2d_bytes_per_token", "d2h_bytes_per_token", "remote_bytes_per_token", "nvme_bytes_per_token")

    def moved(row: dict[str, Any]) -> list[float]:
        return [row[name] for name in columns]

    assert moved(host) == [h2d, d2h, 0, 0]
    assert moved(staged) == pytest.approx([h2d, d2h, h2d + d2h, 0])
    assert moved(direct) == pytest.approx([0, 0, h2d + d2h, 0])
    assert moved(drives) == pytest.approx([h2d, d2h, 0, h2d + d2h])
    assert moved(behind) == pytest.approx([h2d, d2h, h2d + d2h, h2d + d2h])
    assert host["recall"] == staged["recall"] == direct["recall"]


def test_a_saturated_nic_binds_and_gives_its_ceiling():
    row = run(**{**BEYOND, "workload__batch_size": 128})
    assert row["bound"] == "remote"
    assert row["remote_utilization"] > 0.99
    assert row["throughput_tokens_per_s"] == pytest.approx(row["remote_ceiling_tokens_per_s"], rel=0.02)


def test_a_full_copy_on_the_host_is_the_host_tier_and_costs_both_pools():
    host, full = run(**COMMON), run(**BEYOND, policy__host_residency="full")
    assert full["tpot_mean_s"] == host["tpot_mean_s"]
    assert full["remote_bytes_per_token"] == 0
    assert full["host_bytes_peak"] == full["remote_bytes_peak"] == host["host_bytes_peak"]


def test_a_host_cache_lies_between_none_and_a_full_copy():
    sizes = (512, 1024, 2048, 4096 + 128)
    rows = [run(**BEYOND)] + [
        run(**BEYOND, policy__host_residency="fetched", policy__host_cache_tokens=tokens) for tokens in sizes
    ]
    traffic = [row["remote_bytes_per_token"] for row in rows]
    assert traffic == sorted(traffic, reverse=True)
    assert traffic[-1] < 0.3 * traffic[0]
    times = [row["tpot_mean_s"] for row in rows]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(times))
    kv_heads, layers = 8, 36
    assert rows[2]["host_bytes_peak"] == 32 * 1024 // 16 * kv_heads * layers * BLOCK
    assert len({row["h2d_bytes_per_token"] for row in rows}) == 1  # what reaches HBM does not depend on it


def test_a_cache_that_holds_everything_fetches_each_block_once():
    point = resolve(synthetic_point(**BEYOND, policy__host_residency="fetched", policy__host_cache_tokens=8192))
    (demand,) = demands_by_gpu(point)
    assert isinstance(demand, Demand)
    fetched, _, _ = demand.from_remote()
    num_blocks = int(demand.num_blocks[-1])
    per_head_and_layer = fetched.sum() / fetched.shape[1] / demand.num_kv_heads
    assert per_head_and_layer + demand.num_kept <= num_blocks
    assert fetched.sum() < 0.5 * demand.fetched.sum()


@pytest.mark.parametrize("system", ["retrieval", "prefetch-previous", "oasiskv", "infinigen"])
@pytest.mark.parametrize("tier", ["remote", "nvme"])
def test_no_point_beats_a_ceiling(system, tier):
    row = run(system=system, placement__kv_tier=tier, policy__fetch_cap=1.0)
    assert row["remote_ceiling_tokens_per_s"] is not None
    for name in ("hbm", "compute", "h2d", "remote"):
        ceiling = row[f"{name}_ceiling_tokens_per_s"]
        # The last of 126 steps' transfers end after it.
        assert ceiling is None or row["throughput_tokens_per_s"] <= ceiling * (1 + 1 / 126)


def test_the_pool_beyond_the_host_can_be_too_small(tmp_path):
    small = scaled(tmp_path, 1e-3, "nic.pool_bytes")
    row = run_point(synthetic_point(**BEYOND, hardware=small), use_cache=False)
    assert row["status"] == "does_not_fit"
    assert "remote cannot hold the batch" in row["error"]
    assert row["max_batch_size"] == 6  # 4 GB / 4,223 tokens of 147,456 bytes in whole blocks
    assert row["bound"] == "capacity"


# What binds


WHAT_BINDS = {
    "host": ("link.gather_bytes_per_s", "link.gather_cta_bytes_per_s"),
    "remote": ("nic",),
    "nvme": ("nvme.read_bytes_per_s", "nvme.read_iops", "nvme.write_bytes_per_s", "nvme.write_iops"),
}


@pytest.mark.parametrize("tier", WHAT_BINDS)
def test_doubling_what_binds_helps_and_what_does_not_changes_nothing(tier, tmp_path):
    busy = {
        "policy__fetch_cap": 1.0, "workload__batch_size": 160, "workload__output_tokens": 32,
        "placement__kv_tier": tier, "placement__num_gpus": 1,
    }  # fmt: skip
    before = run(**busy)["tpot_mean_s"]
    assert run(**busy, hardware=scaled(tmp_path, 2.0, *WHAT_BINDS[tier]))["tpot_mean_s"] < 0.85 * before
    idle = [f for other, figures in WHAT_BINDS.items() if other not in (tier, "host") for f in figures]
    idle += ["host.switch_bytes_per_s", "host.inter_socket_bytes_per_s", "nvlink.bytes_per_s", "nic.pool_bytes"]
    assert run(**busy, hardware=scaled(tmp_path, 2.0, *idle))["tpot_mean_s"] == before


MODES = {
    "closed": {"workload__batch_size": 16},
    "serving": {
        "serving__num_requests": 16, "serving__prompt_tokens": 2500, "serving__output_tokens": 60,
        "policy__kv_budget_tokens": 512,
    },
}  # fmt: skip


@pytest.mark.parametrize("system", ["dense", "quest", "retrieval", "oasiskv", "infinigen", "shadowkv", "freekv"])
@pytest.mark.parametrize("tier", WHAT_BINDS)
@pytest.mark.parametrize("mode", MODES)
def test_without_a_tier_only_the_systems_that_use_it_suffer(mode, tier, system, tmp_path):
    gone = scaled(tmp_path, 0.01, *WHAT_BINDS[tier], *(["link.h2d_bytes_per_s"] if tier == "host" else []))
    for used in TIERS:
        common = {"system": system, "placement__kv_tier": used, **MODES[mode]}
        before, after = (run(**common, hardware=name)["tpot_mean_s"] for name in ("h100-sxm", gone))
        # Staged blocks pass the host link; drives behind the network pass the NIC.
        touched = tier == used or (tier == "host") or (used == "nvme-of" and tier in ("remote", "nvme"))
        if system in ("dense", "quest") or not touched:
            assert after == before, (system, used)
        else:
            assert after > 2 * before, (system, used)


# Refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"placement__nic_numa": "far", "hardware": "gh200"}, "nic_numa far needs two sockets; gh200 has 1"),
        ({"placement__remote_path": "direct", "policy__host_residency": "fetched"}, "must be staged, not direct"),
        ({"placement__kv_tier": "ssd"}, "placement.kv_tier"),
        ({"policy__host_residency": "fetched", "policy__host_cache_tokens": 40}, "nearest: 32 and 48"),
        ({"policy__host_residency": "fetched", "policy__host_cache_tokens": 4}, "nearest: 16"),
        (
            {"serving__num_requests": 4, "policy__kv_budget_tokens": 512, "serving__disaggregation": "first-set"},
            "kv_tier remote: with serving.disaggregation first-set the KV goes to the decode host's memory, use host",
        ),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        resolve(synthetic_point(**{"placement__kv_tier": "remote", **settings}))


@pytest.mark.parametrize(
    ("tier", "figure", "message"),
    [("remote", "nic.per_socket", "needs a NIC"), ("nvme", "nvme.bytes", "needs drives")],
)
def test_a_host_without_the_tier_is_refused(tier, figure, message, tmp_path):
    with pytest.raises(InputError, match=message):
        resolve(synthetic_point(placement__kv_tier=tier, hardware=scaled(tmp_path, 0.0, figure)))
