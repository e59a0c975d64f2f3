"""Parts of calibration that need no GPU."""

import pytest
import torch

from realhw import calibrate, numa
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
    assert num_sets(1 << 30) == 8
    assert num_sets(1 << 40) == 2
    assert num_sets(1024) == 256


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


def test_binding_to_a_node_that_is_not_there_is_named():
    with pytest.raises(InputError, match="NUMA node 99"):
        numa.bind(99)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_calibration_says_what_still_works(tmp_path):
    options = calibrate.CalibrateOptions(tmp_path / "p.yaml")
    with pytest.raises(EnvironmentMissing, match="no CUDA device: calibrate and validate need one"):
        calibrate.calibrate(options)
    assert list(tmp_path.iterdir()) == []
