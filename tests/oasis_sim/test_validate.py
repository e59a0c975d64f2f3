"""`oasis-sim validate` on a few points recorded on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from oasis_sim.verbs.validate import validate
from realhw.decode_point import Point
from traces.errors import CheckFailed, EnvironmentMissing, InputError

REPOSITORY = Path(__file__).parents[2]
CAMPAIGN = REPOSITORY / "docs" / "validation" / "h200" / "campaign.jsonl"
HARDWARE = "h200-sxm-calibrated"


@pytest.fixture(scope="module")
def campaign(tmp_path_factory) -> Path:
    """The head, two points that move nothing and the smallest that prefetches."""
    head, *lines = CAMPAIGN.read_text().splitlines()
    small = [line for line in lines if json.loads(line)["point"]["batch_size"] == 1]
    chosen = {json.loads(line)["point"]["system"]: line for line in small}
    path = tmp_path_factory.mktemp("campaign") / "campaign.jsonl"
    path.write_text("\n".join([head, chosen["dense"], chosen["quest"], chosen["prefetch-previous"]]) + "\n")
    return path


def test_compares_moves_first_and_then_time(campaign, tmp_path, capsys):
    assert validate(str(campaign), HARDWARE, str(tmp_path / "out"), "abc", False, None, None, as_json=True) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["num_points"] == 3
    assert summary["byte_mismatches"] == 0
    assert summary["fetched_blocks_compared"] > 0
    assert summary["median_abs_error"] < 0.10
    assert pq.read_table(tmp_path / "out" / "points.parquet").num_rows == 3


def test_torn_lines_are_named(campaign, tmp_path, capsys):
    head, first, second, third = campaign.read_text().splitlines()
    torn = tmp_path / "torn.jsonl"
    torn.write_text("\n".join([head, first[:500], second, third[:-9]]))
    validate(str(torn), HARDWARE, str(tmp_path / "out"), None, False, None, None, as_json=False)
    printed = capsys.readouterr().out
    assert "1 points of NVIDIA H200" in printed
    assert "torn lines of the campaign's file (2, 4)" in printed
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["torn_lines"] == [2, 4]


def test_check_fails_where_lines_were_not_read(campaign, tmp_path):
    head, first, second, _ = campaign.read_text().splitlines()
    torn = tmp_path / "torn.jsonl"
    torn.write_text("\n".join([head, first, second[:500]]))
    with pytest.raises(CheckFailed, match="1 torn lines were not read"):
        validate(str(torn), HARDWARE, str(tmp_path / "out"), None, True, 1.0, 1.0, as_json=True)


BROKEN = {
    "step_s is not": lambda row: row.update(step_s=[[float("nan")] * len(row["step_s"][0])]),
    "positive times": lambda row: row.update(step_s=[step[:-1] for step in row["step_s"]]),
    "not finite": lambda row: row.update(finite=False),
    "evicted is not there for each": lambda row: row.pop("evicted"),
    "fetched_hash is not there for each": lambda row: row["fetched_hash"].pop(),
    "fetched_hash is not of": lambda row: row["fetched_hash"][0].pop(),
    "unexpected keyword": lambda row: row["point"].update(nonsense=1),
}


@pytest.mark.parametrize("told", BROKEN)
def test_a_point_that_cannot_be_compared_is_named(told, campaign, tmp_path):
    head, *lines = campaign.read_text().splitlines()
    row = json.loads(lines[-1])
    BROKEN[told](row)
    broken = tmp_path / "broken.jsonl"
    broken.write_text("\n".join([head, json.dumps(row)]) + "\n")
    with pytest.raises(InputError, match=told) as refused:
        validate(str(broken), HARDWARE, str(tmp_path / "out"), None, False, None, None, as_json=True)
    assert row["key"] in str(refused.value)


def test_no_points_and_points_there_twice_are_told(campaign, tmp_path):
    head, first, *_ = campaign.read_text().splitlines()
    for text, told in (
        (head + "\n", "no point of this campaign ran"), ("", "empty or torn"), (head[:40], "empty or torn"),
        ("\n".join([head, first, first]), "is there 2 times"),
    ):  # fmt: skip
        path = tmp_path / "campaign.jsonl"
        path.write_text(text)
        with pytest.raises(InputError, match=told):
            validate(str(path), HARDWARE, str(tmp_path / "out"), None, False, None, None, as_json=True)
        assert not (tmp_path / "out").exists()


def test_a_campaign_is_compared_without_torch(campaign, tmp_path):
    for name in ("torch", "triton"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}', name='{name}')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH"), str(REPOSITORY)])])

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "oasis_sim", "validate", *arguments, "--out", "V"], cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    done = run(str(campaign), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_points"] == 3
    default = run()
    assert default.returncode == 2
    assert default.stderr == "error: to run points validate needs torch: pip install '.[gpu]' in a clone\n"


def test_check_fails_past_a_threshold(campaign, tmp_path, capsys):
    with pytest.raises(CheckFailed, match="median_abs_error"):
        validate(str(campaign), HARDWARE, str(tmp_path / "out"), None, True, 1e-9, None, as_json=False)
    assert "3 points of NVIDIA H200" in capsys.readouterr().out


def test_a_block_that_moved_otherwise_is_found(campaign, tmp_path, capsys):
    *lines, last = campaign.read_text().splitlines()
    row = json.loads(last)
    row["fetched_hash"][3][0] = "0" * 16
    altered = tmp_path / "altered.jsonl"
    altered.write_text("\n".join([*lines, json.dumps(row)]) + "\n")
    with pytest.raises(CheckFailed, match="1 plans moved other blocks"):
        validate(str(altered), HARDWARE, str(tmp_path / "out"), None, True, 1.0, 1.0, as_json=False)
    assert "PLANS DIFFER" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "{}\n", "not json}\n"])
def test_another_file_is_refused(content, tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match="is no campaign"):
        validate(str(path), HARDWARE, str(tmp_path / "out"), None, False, None, None, as_json=True)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory) -> Path:
    """Two systems that the harness runs and one that it does not."""
    path = tmp_path_factory.mktemp("experiment") / "e.yaml"
    path.write_text(
        "system: [quest, retrieval, h2o]\nmodel: SmolLM2-135M\nhardware: h200-sxm\n"
        "workload: {batch_size: 1, output_tokens: 8}\n"
    )
    return path


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the points where there is a GPU")
def test_without_a_gpu_it_picks_points_and_says_where_they_can_run(experiment, tmp_path, capsys):
    out = tmp_path / "out"
    with pytest.raises(EnvironmentMissing, match=r"no CUDA device.*picks\.jsonl.*validate campaign\.jsonl"):
        validate(str(experiment), HARDWARE, str(out), None, False, None, None, as_json=False)
    text = capsys.readouterr().out
    assert "2 of 3 points" in text
    assert "left out    1: system h2o" in text
    points = [Point(**json.loads(line)) for line in (out / "picks.jsonl").read_text().splitlines()]
    assert sorted(point.system for point in points) == ["quest", "retrieval"]
    assert all(point.context_tokens == 6144 and point.num_kept == 48 for point in points)
    with pytest.raises(EnvironmentMissing):  # the sweep's folder serves as well
        validate(str(out / "sweep"), HARDWARE, str(tmp_path / "again"), None, False, None, None, as_json=True)


def test_an_experiment_that_the_harness_cannot_run_is_refused(tmp_path):
    path = tmp_path / "e.yaml"
    path.write_text("system: h2o\nmodel: SmolLM2-135M\nworkload: {batch_size: 1, output_tokens: 4}\n")
    with pytest.raises(InputError, match=r"none of its 1 points runs on the harness: system h2o \(1\)"):
        validate(str(path), HARDWARE, str(tmp_path / "out"), None, False, None, None, as_json=True)


def test_a_profile_of_another_device_is_said_in_every_output(campaign, tmp_path, capsys):
    out = tmp_path / "out"
    validate(str(campaign), "h100-sxm", str(out), None, False, None, None, as_json=False)
    said = "measured on NVIDIA H200, predicted with profile h100-sxm"
    assert said in capsys.readouterr().out
    assert said in json.loads((out / "summary.json").read_text())["warning"]
    assert said in (out / "points.md").read_text()
    assert all(said in row["warning"] for row in map(json.loads, (out / "points.jsonl").read_text().splitlines()))
