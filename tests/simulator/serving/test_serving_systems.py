"""Systems of serving runs: rows of the table that set serving keys."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.experiment import expand, resolve
from simulator.points import point_key, run_point
from simulator.specs.experiment import ExperimentSpec
from simulator.specs.serving import ServingSpec
from simulator.systems import SYSTEMS
from tests.simulator.serving.test_prefix_reuse import turns as turns
from traces.errors import InputError

OF_SERVING = {
    "radix": {"serving.prefix_cache": "gpu"},
    "distserve": {"serving.disaggregation": "full-push"},
    "mooncake": {"serving.disaggregation": "layer-push", "serving.prefix_cache": "host"},
}


def point(turns: str, **settings: Any) -> ExperimentSpec:
    base = {"trace": "synthetic", "model": "Qwen3-0.6B", "serving.requests": turns}
    (only,) = expand({**base, **{key.replace("__", "."): value for key, value in settings.items()}}, {})
    return only


def test_the_table_has_the_systems_of_serving_runs():
    assert {name for name, system in SYSTEMS.items() if system.serving} == set(OF_SERVING)


@pytest.mark.parametrize("system", OF_SERVING)
def test_a_serving_system_is_dense_with_its_own_serving_keys(system, turns):
    own = run_point(point(turns, system=system), use_cache=False)
    spelled = run_point(
        point(turns, system="dense", **{k.replace(".", "__"): v for k, v in OF_SERVING[system].items()}),
        use_cache=False,
    )
    plain = run_point(point(turns, system="dense"), use_cache=False)
    assert own["status"] == "ok", own["error"]
    different = {name for name in own if own[name] != spelled[name]}
    assert different == {"system", "point_key"}
    assert own["e2e_p50_s"] != plain["e2e_p50_s"]
    # What the system says of its own shows as a column, as what a user says.
    assert {key: own[key] for key in OF_SERVING[system]} == OF_SERVING[system]


def test_what_a_user_says_overrides_the_system(turns):
    asked = point(turns, system="mooncake", serving__prefix_cache="gpu+host", serving__prefix_gpu_tokens=4096)
    serving = resolve(asked).spec.serving
    assert isinstance(serving, ServingSpec)
    assert (serving.disaggregation, serving.prefix_cache) == ("layer-push", "gpu+host")
    assert point_key(asked) != point_key(point(turns, system="mooncake"))
    # A key that the system's own choice makes meaningless is dropped, as one that a user's choice does.
    assert point_key(point(turns, system="radix", serving__prefix_host_tokens=64)) == point_key(
        point(turns, system="radix")
    )
    kept = point(turns, system="mooncake", serving__prefix_host_tokens=64, serving__prefill_replicas=2)
    assert point_key(kept) != point_key(point(turns, system="mooncake"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"system": "radix"}, "serving: radix is a system of serving runs: say what"),
        ({"system": "radix", "serving.num_requests": 4}, "system radix: serving: prefix_cache needs serving.requests"),
        ({"system": "distserve", "serving.preemption": "swap"}, "full-push goes with preemption recompute"),
    ],
)
def test_what_a_serving_system_cannot_be_is_refused_in_one_line(settings, message):
    with pytest.raises(InputError, match=message) as caught:
        expand({"trace": "synthetic", **settings}, {})
    assert "\n" not in str(caught.value)
