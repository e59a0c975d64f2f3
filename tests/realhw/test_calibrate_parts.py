"""Parts of calibration that need no GPU."""

import os

import pytest
import torch

from realhw import calibrate, host_kv, numa
from realhw.graph_timer import summarise
from realhw.pairbench import overlap_rates
from realhw.workbench import num_sets
from traces.errors import EnvironmentMissing, InputError


def test_overlap_rates_are_one_without_interference_and_a_half_when_work_is_shared():
    assert overlap_rates(2.0, 3.0, 2.0, 3.0) == (1.0, 1.0)
    # Two equal amounts of work that halve each other's rate end together after the sum.
    assert overlap_rates(4.0, 4.0, 2.0, 2.0) == (0.5, 0.5)
    # The first runs at half rate for its 2 s; the second does 1.5 s of its 3 s meanwhile and the rest alone.
    first, second = overlap_rates(2.0, 3.5, 1.0, 3.0)
    assert (first, second) == (0.5, 0.75)
    # The same the other way round.
    assert overlap_rates(3.5, 2.0, 3.0, 1.0) == (0.75, 0.5)


def test_summary_is_the_median_and_interquartile_range_per_call():
    timing = summarise([2.0, 4.0, 6.0, 8.0, 100.0], calls=2)
    assert (timing.median_s, timing.spread_s, timing.repetitions) == (3.0, 2.0, 5)


def test_buffer_sets_exceed_the_cache_and_stay_few():
    h200, rtx_4090 = 140 << 30, 24 << 30
    assert num_sets(1 << 30, h200) == 8
    assert num_sets(9 << 30, h200) == 2
    assert num_sets(1024, h200) == 256
    # Four products and two kernels at once must fit beside each other.
    assert num_sets(1 << 28, rtx_4090) == 6
    assert num_sets(8 << 30, rtx_4090) == 1


def test_numa_nodes_are_read_from_the_kernel_s_lists(tmp_path):
    assert numa.parse_cpus("0-2,8\n") == {0, 1, 2, 8}
    assert numa.parse_cpus("") == frozenset()
    for node, cpus in ((0, "0-3"), (1, "4-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus)
    two = numa.describe(tmp_path)
    assert two.num_nodes == 2
    assert two.summary() == "2 NUMA nodes: 0 (4 CPUs), 1 (4 CPUs)"
    assert "one NUMA node" in numa.describe(tmp_path / "none").summary()


def test_a_bound_block_gives_the_cpus_and_the_memory_policy_back():
    before = os.sched_getaffinity(0)
    node = next(iter(numa.describe().cpus), None)
    if node is None:
        pytest.skip("the kernel lists no node")
    try:
        with numa.bound(node):
            assert os.sched_getaffinity(0) <= numa.describe().cpus[node]
    except EnvironmentMissing:
        pytest.skip("set_mempolicy is not allowed here")
    assert os.sched_getaffinity(0) == before


def test_more_pinned_memory_than_the_host_has_is_refused_with_what_fits(monkeypatch):
    monkeypatch.setattr(host_kv, "available_host_bytes", lambda: 10 << 30)
    host_kv.require_pinnable(8 << 30)
    with pytest.raises(EnvironmentMissing, match=r"need 9.0 GiB, have 8.0 GiB .* largest that fits: 8 GiB"):
        host_kv.require_pinnable(9 << 30)


def test_binding_to_a_node_that_is_not_there_is_named():
    with pytest.raises(InputError, match="NUMA node 99"):
        numa.bind(99)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_calibration_says_what_still_works(tmp_path):
    options = calibrate.CalibrateOptions(tmp_path / "p.yaml")
    with pytest.raises(EnvironmentMissing, match="no CUDA device: calibrate and validate need one"):
        calibrate.calibrate(options)
    assert list(tmp_path.iterdir()) == []
