"""The fit from measurements to a profile, on the measurements of a real H200."""

import json
from pathlib import Path

import pytest

from realhw.figures import fit_affine
from realhw.measurement import Measurement, Recorder, read_measurements
from realhw.profile import build_profile, write_profile
from simulator.catalog import load_hardware
from simulator.experiment import resolve
from simulator.points import parameters
from simulator.specs.experiment import ExperimentSpec
from traces.errors import InputError

RECORDED = Path(__file__).resolve().parents[2] / "docs" / "validation" / "h200" / "calibration.jsonl"


@pytest.fixture(scope="module")
def raw():
    return read_measurements(RECORDED)


@pytest.fixture(scope="module")
def profile(raw):
    return build_profile(raw, base="h200-sxm")


def test_affine_fit_is_exact_on_a_line_and_weighs_relative_errors():
    t0, slope, worst = fit_affine([1e6, 1e7, 1e9], [3e-6 + 1e6 / 4e12, 3e-6 + 1e7 / 4e12, 3e-6 + 1e9 / 4e12])
    assert t0 == pytest.approx(3e-6)
    assert 1 / slope == pytest.approx(4e12)
    assert worst < 1e-9
    # A start-up time cannot be negative: through the origin then, by relative errors.
    t0, slope, _ = fit_affine([1.0, 2.0], [1.0, 3.0])
    assert t0 == 0
    assert slope == pytest.approx((1 + 2 / 3) / (1 + 4 / 9))


def test_the_shipped_profile_is_the_fit_of_the_recorded_measurements(profile, tmp_path):
    shipped = load_hardware("h200-sxm-calibrated")
    assert profile == shipped
    write_profile(profile, tmp_path / "again.yaml")
    assert load_hardware(tmp_path / "again.yaml") == shipped


def test_measured_figures_carry_spread_and_repetitions_and_agree_with_independent_ones(profile):
    link = profile.link
    for figure in (link.h2d_bytes_per_s, link.ce_op_s, link.gather_bytes_per_s, link.plan_to_host_s):
        assert figure.spread is not None
        assert figure.repetitions >= 5
        assert "NVIDIA H200" in figure.source
    # Other machines of this kind: 54.8 to 55.1 GB/s, 2.5 to 2.7 us an operation, 48-51 GB/s by gather.
    assert link.h2d_bytes_per_s.value == pytest.approx(55.1e9, rel=0.05)
    assert link.ce_op_s.value == pytest.approx(2.7e-6, rel=0.12)
    assert link.gather_bytes_per_s.value == pytest.approx(50e9, rel=0.03)
    # NVLink: 392 GB/s there too.
    assert profile.nvlink.bytes_per_s.value == pytest.approx(392e9, rel=0.01)
    assert profile.kernels.table is None, "a table of other kernels would come before nothing that was timed here"


def test_unmeasured_figures_keep_the_catalog_source(profile):
    base = load_hardware("h200-sxm")
    assert profile.nvlink.domain_gpus == base.nvlink.domain_gpus
    assert profile.host.switch_bytes_per_s == base.host.switch_bytes_per_s, "two links at once carried twice one"
    assert profile.host.inter_socket_bytes_per_s.assumption


def test_pairs_cover_the_table_at_every_batch(profile):
    pairs = {(p.kernel, p.beside, p.gather_ctas, p.batch_size) for p in profile.pairs}
    for batch in (1, 8, 16, 32, 64):
        for kernel in ("gemm", "attention", "score", "topk"):
            assert {(kernel, "ce_h2d", None, batch), (kernel, "ce_d2h", None, batch)} <= pairs
            assert {(kernel, "gather", n, batch) for n in (4, 8, 16)} <= pairs
        assert {(k, b, None, batch) for k in ("gemm", "attention") for b in ("score", "topk")} <= pairs
    assert len(pairs) == len(profile.pairs) == 5 * 24
    assert {p.kv_heads for p in profile.pairs} == {8}
    assert all((p.launch_wait_s is not None) == (p.beside == "gather") for p in profile.pairs)
    # Scoring starts before attention and holds the multiprocessors: next to nothing is won over one after the other.
    for pair in profile.pairs:
        if (pair.kernel, pair.beside) == ("attention", "score"):
            assert pair.kernel_rate.value < 0.5 < pair.beside_rate.value
            assert 0.95 < pair.kernel_rate.value + pair.beside_rate.value < 1.15
    # The default gather leaves the layer stack nine tenths of its rate, larger ones less.
    for batch in (1, 8, 16, 32, 64):
        stack = {
            p.gather_ctas: p for p in profile.pairs if (p.kernel, p.beside, p.batch_size) == ("gemm", "gather", batch)
        }
        assert stack[4].kernel_rate.value > 0.9 > 0.75 < stack[4].beside_rate.value
        assert stack[16].kernel_rate.value < stack[4].kernel_rate.value


def test_a_policy_that_names_no_grid_has_the_one_that_was_timed(profile):
    assert profile.link.gather_ctas == 4

    def ctas(hardware, **policy):
        return resolve(ExperimentSpec(hardware=hardware, policy=policy)).policy.gather_ctas

    assert [ctas("h200-sxm-calibrated"), ctas("h200-sxm-calibrated", gather_ctas=8), ctas("h200-sxm")] == [4, 8, 16]
    # A sweep's table says so, since what runs on a GPU is chosen from it.
    values = parameters(resolve(ExperimentSpec(hardware="h200-sxm-calibrated")))
    assert values["policy.gather_ctas"] == 4
    assert "policy.gather_ctas" not in parameters(resolve(ExperimentSpec(hardware="h200-sxm")))


def test_what_ran_beside_the_layer_stack_holds_for_both_kinds_of_its_kernels(raw):
    of = {"kernel": "stack", "beside": "gather", "ctas": 4, "batch": 32, "kv_heads": 4}
    alone = {"kernel_alone_s": 37e-6, "gemm_alone_s": 28e-6, "attention_alone_s": 70e-6}
    rows = [
        Measurement(
            "pair",
            value,
            0.01,
            5,
            unit="1",
            params={"which": which, "blocks": n, "beside_alone_s": n * 1e-7, **of, **alone},
        )
        for n in (256, 2048)
        for which, value in (("kernel_rate", 0.9), ("beside_rate", 0.8))
    ]
    pairs = {p.kernel: p for p in _with_rows(_without_pairs(raw), *rows).pairs}
    assert pairs.keys() == {"gemm", "attention"}
    assert {(p.kernel_rate.value, p.beside_rate.value, p.kv_heads) for p in pairs.values()} == {(0.9, 0.8, 4)}
    assert (pairs["gemm"].kernel_s, pairs["attention"].kernel_s) == (28e-6, 70e-6)


def test_a_torn_last_line_is_dropped_and_a_torn_middle_one_is_named(tmp_path):
    whole = RECORDED.read_text().splitlines()
    path = tmp_path / "raw.jsonl"
    path.write_text("\n".join([*whole[:5], whole[5][:20]]))
    assert len(read_measurements(path).rows) == 3  # the fourth line ends a part
    path.write_text("\n".join([*whole[:3], whole[3][:20], *whole[4:6]]))
    with pytest.raises(InputError, match="line 4: not JSON"):
        read_measurements(path)
    path.write_text(json.dumps({"kind": "copy"}) + "\n")
    with pytest.raises(InputError, match="does not describe a device"):
        read_measurements(path)


def test_missing_measurements_and_unknown_devices_are_named(raw, tmp_path):
    with pytest.raises(InputError, match="0 rows of hbm_read"):
        build_profile(
            type(raw)(raw.device, raw.started, tuple(r for r in raw.rows if r.kind != "hbm_read")), None, "h200-sxm"
        )
    other = type(raw)({**raw.device, "name": "NVIDIA Z1"}, raw.started, raw.rows)
    with pytest.raises(InputError, match="device 'NVIDIA Z1': no catalog profile"):
        build_profile(other)


def _with_rows(raw, *rows):
    """The profile with `rows` for the measurements of their kinds."""
    kinds = {row.kind for row in rows}
    others = tuple(row for row in raw.rows if row.kind not in kinds)
    return build_profile(type(raw)(raw.device, raw.started, (*others, *rows)), None, "h200-sxm")


def _without_pairs(raw):
    return type(raw)(raw.device, raw.started, tuple(r for r in raw.rows if not r.kind.startswith("pair")))


def test_pairs_by_batch_keep_their_batch(raw):
    of = {"kernel": "gemm", "beside": "topk", "ctas": None}
    rows = [
        Measurement("pair", value, 0.01, 7, unit="1", params={"which": which, "batch": batch, **of})
        for batch, kernel_rate, beside_rate in ((8, 0.95, 0.8), (64, 0.5, 0.6))
        for which, value in (("kernel_rate", kernel_rate), ("beside_rate", beside_rate))
    ]
    pairs = _with_rows(_without_pairs(raw), *rows).pairs
    found = [(p.batch_size, p.kernel_rate.value, p.beside_rate.value) for p in pairs]
    assert found == [(8, 0.95, 0.8), (64, 0.5, 0.6)]


def test_two_launch_lengths_tell_the_wait_from_the_rate(raw):
    wait_s, rate, alone = 40e-6, 0.9, {256: 45e-6, 2048: 335e-6}
    of = {"kernel": "gemm", "beside": "gather", "ctas": 4, "batch": 32, "kernel_alone_s": 28e-6}
    rows = [
        Measurement(
            "pair", value, 0.01, 5, unit="1", params={"which": which, "blocks": n, "beside_alone_s": alone[n], **of}
        )
        for n in (2048, 256)
        for which, value in (("kernel_rate", 0.8 + n / 20480), ("beside_rate", alone[n] / (wait_s + alone[n] / rate)))
    ]
    (pair,) = _with_rows(_without_pairs(raw), *rows).pairs
    assert pair.launch_wait_s is not None
    assert pair.launch_wait_s.value == pytest.approx(wait_s, rel=1e-4)
    assert pair.beside_rate.value == pytest.approx(rate, rel=1e-4)
    assert pair.kernel_rate.value == pytest.approx(0.9)  # of the long launch
    assert pair.kernel_s == 28e-6


def test_two_gpus_give_nvlink_and_a_switch_only_where_they_share_one(raw):
    base = load_hardware("h200-sxm")
    peer = [Measurement("peer_copy", size / rate, 0.0, 7, size) for size, rate in ((1 << 24, 252e9), (1 << 30, 392e9))]

    def links(both_bytes_per_s):
        rates = {(0,): 55e9, (1,): 55e9, (0, 1): both_bytes_per_s}
        return [
            Measurement(
                "copy_two_gpus", len(g) * 2**24 / rate, 0.0, 7, len(g) * 2**24,
                params={"direction": "h2d", "gpus": list(g)},
            )
            for g, rate in rates.items()
        ]  # fmt: skip

    apart = _with_rows(raw, *peer, *links(107.5e9))
    assert apart.nvlink.bytes_per_s.value == pytest.approx(392e9, rel=1e-4)
    assert "1024 MiB" in apart.nvlink.bytes_per_s.source
    assert apart.nvlink.domain_gpus == base.nvlink.domain_gpus
    assert apart.host.switch_bytes_per_s == base.host.switch_bytes_per_s
    shared = _with_rows(raw, *peer, *links(70e9))
    assert shared.host.switch_bytes_per_s.value == pytest.approx(70e9, rel=1e-4)


def test_a_second_numa_node_gives_far_figures(raw):
    def of(node, copy_bytes_per_s, read_s):
        size, in_flight = 16 << 20, raw.one("gather", ctas=1).params["in_flight_bytes"]
        return [
            Measurement("node_copy", size / copy_bytes_per_s, 0.0, 7, size, params={"node": node}),
            Measurement("node_gather", 64 * read_s, 0.0, 7, 64 * in_flight, params={"node": node}),
        ]

    host = _with_rows(raw, *of(0, 40e9, 3.5e-6), *of(1, 55e9, 2.5e-6)).host
    assert host.far_h2d_bytes_per_s.value == pytest.approx(40e9, rel=1e-4)
    assert host.far_latency_s.value == pytest.approx(1e-6, rel=1e-4)
    assert not host.far_latency_s.assumption
    assert "node 0 against that of node 1" in host.far_latency_s.source
    assert _with_rows(raw, *of(0, 40e9, 3.5e-6)).host.far_latency_s == load_hardware("h200-sxm").host.far_latency_s


def test_submissions_towards_the_host_do_not_become_figures_of_fetches(raw, profile):
    of = {"method": "batched", "count": 1024, "direction": "d2h"}
    slow = Measurement("submit_engine", 1e-3, 0.0, 6, 8192, params=of)
    assert build_profile(type(raw)(raw.device, raw.started, (*raw.rows, slow)), None, "h200-sxm").link == profile.link


def test_an_interrupted_calibration_goes_on_after_its_last_finished_part(tmp_path):
    path, device = tmp_path / "m.jsonl", {"name": "x"}
    first = Recorder(path, device)
    first.add("hbm_read", 1.0, 0.1, 9)
    first.finish("memory")
    first.add("copy", 2.0, 0.1, 9, direction="h2d")
    with path.open("a") as out:
        out.write('{"kind": "copy", "med')  # killed while writing
    again = Recorder(path, device)
    assert again.finished == {"memory"}
    assert [r.kind for r in again.rows] == ["hbm_read"]
    again.add("copy", 3.0, 0.1, 9, direction="h2d")
    again.finish("copies")
    assert [r.median for r in read_measurements(path).rows] == [1.0, 3.0]
    # Another GPU's file is not continued.
    assert Recorder(path, {"name": "y"}).finished == set()
    assert read_measurements(path).rows == ()


def test_a_recorder_writes_what_the_reader_reads(tmp_path):
    recorder = Recorder(tmp_path / "m.jsonl", {"name": "x"})
    recorder.add("copy", 2.0, 0.5, 7, 1024, direction="h2d")
    found = read_measurements(tmp_path / "m.jsonl")
    assert found.device == {"name": "x"}
    assert found.one("copy", direction="h2d") == recorder.rows[0]
