"""The campaign's bookkeeping, on a CPU with a toy geometry: every flow and transport, resuming, what does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from realhw import campaign as module
from realhw.campaign import Campaign, check_moves, describe
from realhw.decode_point import Point
from realhw.device import DeviceInfo
from realhw.geometry import GEOMETRIES, ModelGeometry
from realhw.host_kv import HostKv
from traces.errors import EnvironmentMissing, InputError

pytestmark = pytest.mark.usefixtures("one_thread")
TOY = ModelGeometry("toy", 1, 32, 2, 1, 16, 48, 40)
POINT = Point("retrieval", 2, 38, 4, 4, num_steps=3, gather_ctas=1, model="toy", churn=1.0)


class PlainHostKv(HostKv):
    """Pageable memory of random values."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.values = torch.randn(num_bytes // 2).bfloat16()

    def close(self) -> None:
        pass


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("the kernels run on the GPU here")
    info = DeviceInfo("toy GPU", "1", "1", "1", "1", "1", 4, 1 << 20, 1)
    monkeypatch.setattr(module, "require_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(module, "device_info", lambda: info)
    monkeypatch.setattr(module, "HostKv", PlainHostKv)
    monkeypatch.setitem(GEOMETRIES, "toy", TOY)
    # On a CPU nothing is timed: a run gives no marks.
    monkeypatch.setattr(module.DecodeRunner, "step_seconds", lambda self, marks: [1.0] * self.num_steps)


def small_campaign(out: Path) -> Campaign:
    campaign = Campaign(out, host_gib=1)
    campaign._host_bytes = 1 << 16
    return campaign


@pytest.mark.parametrize("transport", ["gather", "ce-batched", "ce-contiguous"])
def test_moves_of_a_run_equal_the_rules(transport: Any, on_cpu: None, tmp_path: Path) -> None:
    point = replace(POINT, system="oasiskv", fetch_cap=0.8, transport=transport)
    row = small_campaign(tmp_path / "c.jsonl").run(point, repeats=1, profile=False)
    check_moves(row, None)
    assert (row["status"], row["differing_plans"], row["finite"]) == ("ok", 0, True)
    assert np.sum(row["fetched"]) >= 2
    assert "differing plans 0" in describe(row)


def test_a_campaign_goes_on_where_it_was_cut(on_cpu: None, tmp_path: Path) -> None:
    out = tmp_path / "c.jsonl"
    first = small_campaign(out)
    point = replace(POINT, system="quest")
    first.run(point, repeats=1, profile=False)
    first.run(replace(point, batch_size=1 << 12), profile=False)
    with out.open("a") as file:
        file.write('{"key": "torn')
    again = small_campaign(out)
    assert again.run(point)["status"] == "skipped"
    assert again.run(replace(point, system="dense"), repeats=1, profile=False)["status"] == "ok"
    _, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["status"] for row in rows] == ["ok", "does_not_fit", "ok"]
    assert 0 < rows[1]["largest_batch"] < 1 << 12
    assert rows[1]["need_bytes"] > rows[1]["have_bytes"]


def test_a_failing_point_is_kept_and_run_again(on_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, point = tmp_path / "c.jsonl", replace(POINT, system="quest")
    with monkeypatch.context() as patched:
        patched.setattr(
            module, "random_weights", lambda *_: (_ for _ in ()).throw(EnvironmentMissing("no more memory"))
        )
        row = small_campaign(out).run(point)
    assert (row["status"], row["error"]) == ("failed", "EnvironmentMissing: no more memory")
    assert small_campaign(out).run(point, repeats=1, profile=False)["status"] == "ok"


def test_a_file_of_another_device_is_refused(on_cpu: None, tmp_path: Path) -> None:
    out = tmp_path / "c.jsonl"
    out.write_text(json.dumps({"device": {"name": "NVIDIA H100"}}) + "\n")
    with pytest.raises(InputError, match="campaign of NVIDIA H100, here is toy GPU"):
        Campaign(out, host_gib=1)


def test_whole_kv_is_held_where_a_point_asks_for_it(on_cpu: None, tmp_path: Path) -> None:
    campaign = small_campaign(tmp_path / "c.jsonl")
    campaign._host_bytes = 6000  # a request's KV has 19 blocks of 256 bytes
    assert campaign._host_kv(POINT, 19).shape == (1, 1, 1, 19, 2, 4, 16)
    assert campaign._host_kv(replace(POINT, aliased=False), 19).shape[0] == 2
    assert campaign._host_kv(POINT, 19).shape[0] == 1, "the buffer stays large, the point does not use it"
