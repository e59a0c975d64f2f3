"""`oasis-sim validate` on a few points recorded on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from oasis_sim.verbs.validate import validate
from traces.errors import CheckFailed, InputError

CAMPAIGN = Path(__file__).parents[2] / "docs" / "validation" / "h200" / "campaign.jsonl"
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
