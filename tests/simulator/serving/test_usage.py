"""Use over time: integrals are kept, whatever the length of the run, and equal what the run counted itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow.parquet as pq
import pytest

from simulator.experiment import expand
from simulator.points import run_point
from simulator.serving import usage as module
from simulator.serving.pools import Pool
from simulator.serving.usage import COUNTS, POOLS, Usage


@dataclass
class Held:
    """As much of a scheduler as `Usage` reads."""

    num: int
    waiting: list[int] = field(default_factory=list)
    prefilling: list[int] = field(default_factory=list)
    pulling: list[int] = field(default_factory=list)

    @property
    def decode(self):
        return [0] * self.num

    @property
    def pools(self):
        return self

    @property
    def used(self):
        return np.full(len(Pool), 1000 * self.num)


@pytest.mark.parametrize("limit", [8, 64, 1024])
def test_intervals_merge_and_keep_the_integral(limit, monkeypatch):
    monkeypatch.setattr(module, "MAX_INTERVALS", limit)
    rng = np.random.default_rng(limit)
    usage, now_s, exact, held = Usage(2), 0.0, 0.0, [0, 0]
    for _ in range(500):
        replica, count = int(rng.integers(2)), int(rng.integers(50))
        usage.record(replica, now_s, Held(count))
        held[replica] = count
        gap_s = float(rng.exponential(0.03))
        exact += sum(held) * gap_s
        now_s += gap_s
    usage.record(0, now_s, Held(0))
    spans, means = usage.means()
    assert len(spans) <= limit
    assert spans[:, 1].sum() == pytest.approx(now_s, rel=1e-12)
    np.testing.assert_allclose(np.diff(spans[:, 0]), usage.interval_s)
    decoding, full_kv = means[:, COUNTS.index("decoding")], means[:, len(COUNTS) + Pool.FULL_KV]
    assert float(decoding @ spans[:, 1]) == pytest.approx(exact, rel=1e-9)
    np.testing.assert_allclose(full_kv, decoding * 1000 / 2)


def test_the_file_agrees_with_the_row(tmp_path):
    (point,) = expand(
        {
            "trace": "synthetic", "model": "Qwen3-0.6B", "system": "oasiskv", "policy.kv_budget_tokens": 512,
            "serving.num_requests": 40, "serving.prompt_tokens": 3000, "serving.output_tokens": 200,
            "serving.arrivals": "poisson", "serving.rate_per_s": 20.0, "placement.num_gpus": 2,
        },
        {},
    )  # fmt: skip
    path = tmp_path / "usage.parquet"
    row = run_point(point, use_cache=False, usage_path=path)
    table = pq.read_table(path).to_pandas()
    assert set(table["role"]) == {"both"}
    seconds = table["seconds"]
    assert seconds.sum() == pytest.approx(row["duration_s"], rel=0.05)
    # Decode steps are counted by iteration there, by time here.
    decoded = float((table["decoding"] * seconds).sum())
    assert decoded == pytest.approx(row["batch_mean"] * row["num_iterations"] * row["iteration_mean_s"], rel=0.1)
    for pool, peak in (
        ("sparse_kv_bytes", "sparse_kv_bytes_peak"),
        ("compressed_keys_bytes", "compressed_keys_bytes_peak"),
    ):
        assert 0.2 * row[peak] < table[pool].max() <= row[peak]
    assert (table["remote_kv_bytes"] == 0).all()
    assert (table[list(POOLS[: Pool.HOST_KV])].sum(axis=1) <= table["hbm_capacity_bytes"]).all()
    assert run_point(point, use_cache=False) == row


def test_prefill_replicas_are_a_role_of_their_own(tmp_path):
    (point,) = expand(
        {
            "trace": "synthetic", "model": "Qwen3-0.6B", "system": "dense", "serving.num_requests": 10,
            "serving.prompt_tokens": 3000, "serving.output_tokens": 20, "serving.disaggregation": "full-push",
        },
        {},
    )  # fmt: skip
    run_point(point, use_cache=False, usage_path=tmp_path / "u.parquet")
    table = pq.read_table(tmp_path / "u.parquet").to_pandas()
    by_role = table.groupby("role")
    assert set(by_role.groups) == {"decode", "prefill"}
    assert by_role["decoding"].max()["prefill"] == 0 < by_role["prefilling"].max()["prefill"]
    assert by_role["prefilling"].max()["decode"] == 0 < by_role["decoding"].max()["decode"]
