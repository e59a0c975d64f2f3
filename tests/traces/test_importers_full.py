"""The whole public files, where `OASIS_SIM_WORKLOADS` names the folder that has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from traces.arrivals import batch_interval_s
from traces.importers.formats import load_workload

FOLDER = os.environ.get("OASIS_SIM_WORKLOADS")


@pytest.mark.parametrize(
    ("file", "num_requests", "prompt_tokens", "output_tokens", "last_arrival_s", "interval_s"),
    [
        ("mooncake_conversation.jsonl", 12_031, 144_793_823, 4_122_048, 3536.999, 3.0),
        ("mooncake_synthetic.jsonl", 3_993, 61_194_628, 595_432, 1022.025, None),
        ("azure_2023_code.csv", 8_819, 18_059_974, 245_896, 3435.948056, None),
        ("azure_2023_conv.csv", 19_366, 22_361_870, 4_088_665, 3501.721937, None),
    ],
)
def test_totals_of_the_whole_files(
    file: str,
    num_requests: int,
    prompt_tokens: int,
    output_tokens: int,
    last_arrival_s: float,
    interval_s: float | None,
) -> None:
    if FOLDER is None or not (Path(FOLDER) / file).is_file():
        pytest.skip(f"OASIS_SIM_WORKLOADS does not name a folder with {file}")
    workload = load_workload(Path(FOLDER) / file)
    assert workload.num_requests == num_requests
    assert workload.prompt_tokens.sum() == prompt_tokens
    assert workload.output_tokens.sum() == output_tokens
    assert workload.duration_s == last_arrival_s
    assert batch_interval_s(workload.arrival_s) == interval_s
