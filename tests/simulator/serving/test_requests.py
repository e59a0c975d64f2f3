"""Where requests come from: files, spread stamps, processes, drawn lengths, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from simulator.experiment import expand, resolve
from simulator.serving.requests import make_workload
from simulator.specs.serving import ServingSpec
from traces.arrivals import batch_interval_s
from traces.errors import InputError


@pytest.fixture
def stamped(tmp_path):
    """A file whose requests are stamped every 3 s, five at a time."""
    file = tmp_path / "stamped.jsonl"
    rows = [{"timestamp": 3000 * (i // 5), "input_length": 600, "output_length": 4, "hash_ids": [i, i + 1]}
            for i in range(100)]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_stamped_batches_are_refused_spread_or_kept(stamped):
    with pytest.raises(InputError, match=r"every 3 s.*serving.stamped_batches to spread"):
        make_workload(ServingSpec(requests=stamped), 0)
    spread = make_workload(ServingSpec(requests=stamped, stamped_batches="spread"), 0)
    assert batch_interval_s(spread.arrival_s) is None
    assert len(np.unique(spread.arrival_s)) == 100
    kept = make_workload(ServingSpec(requests=stamped, stamped_batches="keep"), 0)
    assert len(np.unique(kept.arrival_s)) == 20


def test_stamps_are_refused_before_anything_is_simulated(stamped):
    (point,) = expand({"trace": "synthetic", "serving.requests": stamped, "policy.kv_budget_tokens": 512}, {})
    with pytest.raises(InputError, match="stamped_batches"):
        resolve(point)


def test_a_file_can_come_at_another_rate_or_by_another_process(stamped):
    faster = make_workload(ServingSpec(requests=stamped, stamped_batches="spread", rate_per_s=10.0), 0)
    assert faster.arrival_s[-1] == pytest.approx(10.0)
    poisson = make_workload(ServingSpec(requests=stamped, arrivals="poisson", rate_per_s=10.0), 0)
    assert poisson.prompt_tokens.tolist() == [600] * 100
    assert 5.0 < poisson.arrival_s[-1] < 20.0
    assert make_workload(ServingSpec(requests=stamped, arrivals="closed", num_requests=7), 0).num_requests == 7


def test_a_sweep_of_the_rate_keeps_lengths_and_pattern():
    slow, fast = (
        make_workload(ServingSpec(arrivals="gamma", burstiness_cv=2.0, rate_per_s=rate), 3) for rate in (1.0, 4.0)
    )
    assert slow.output_tokens.tolist() == fast.output_tokens.tolist()
    np.testing.assert_allclose(slow.arrival_s, 4.0 * fast.arrival_s)
    assert make_workload(ServingSpec(), 4).output_tokens.tolist() != slow.output_tokens.tolist()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"serving.arrivals": "poisson"}, "arrivals poisson needs serving.rate_per_s"),
        ({"serving.arrivals": "gamma", "serving.rate_per_s": 1.0}, "needs serving.burstiness_cv"),
        ({"serving.arrivals": "file"}, "needs serving.requests"),
        ({"serving.lengths": "reasonin"}, "one of reasoning, reasoning-long"),
        ({"serving.max_num_batched_tokens": 8}, "below max_num_seqs 256"),
        ({"serving.rate_per_s": -1.0}, "serving.rate_per_s: input should be greater than or equal"),
        ({"serving.rate": 1.0}, "did you mean .*serving.rate_per_s"),
        ({"serving.link_limit": 1.5}, "serving.link_limit"),
        ({"serving.scheduler": "sjf"}, "serving.scheduler"),
    ],
)
def test_bad_keys_get_one_line(settings, problem):
    with pytest.raises(InputError, match=problem) as refused:
        expand({"trace": "synthetic", **settings}, {})
    assert "\n" not in str(refused.value)


def test_a_bad_line_of_a_file_is_named(tmp_path):
    file = tmp_path / "bad.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,x,5\n")
    with pytest.raises(InputError, match=r"bad.csv, line 3, field prompt_tokens"):
        make_workload(ServingSpec(requests=str(file)), 0)
