"""Reuse of the Mooncake traces: golden hits on excerpts, the published shares on the whole files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from simulator.prefix_cache import Tier, TouchOrder
from simulator.prefix_reuse import block_reuse, main, replay_prefixes
from traces.errors import InputError
from traces.importers.formats import load_workload
from traces.workload import Workload

EXCERPTS = Path(__file__).parents[1] / "data" / "workloads"
FOLDER = os.environ.get("OASIS_SIM_WORKLOADS")
CONVERSATION, SYNTHETIC = "mooncake_conversation_head700.jsonl", "mooncake_synthetic_head350.jsonl"


# Counted once by a separate flat LRU over the block ids (in these files an id has one predecessor only).
@pytest.mark.parametrize(
    ("file", "touch_order", "hit_blocks"),
    [
        (CONVERSATION, "forward", (673, 699, 738, 1193, 3336, 3493)),
        (CONVERSATION, "reverse", (699, 699, 738, 1193, 3336, 3493)),
        (SYNTHETIC, "forward", (28, 85, 145, 443, 516, 516)),
        (SYNTHETIC, "reverse", (28, 85, 145, 443, 516, 516)),
    ],
)
def test_golden_hits_on_the_excerpts(file: str, touch_order: TouchOrder, hit_blocks: tuple[int, ...]) -> None:
    workload = load_workload(EXCERPTS / file)
    for capacity, expected in zip((100, 300, 1_000, 3_000, 10_000, None), hit_blocks, strict=True):
        reuse = replay_prefixes(workload, [Tier("gpu", capacity)], touch_order)
        assert reuse.tier_hit_blocks == (expected,)
        assert reuse.inserted_blocks - reuse.evicted_blocks <= (capacity or reuse.num_blocks)
    assert block_reuse(workload) == hit_blocks[-1] / len(workload.hash_ids)


def test_tiers_share_the_hits_of_one_cache_and_count_their_traffic() -> None:
    workload = load_workload(EXCERPTS / CONVERSATION)
    one = replay_prefixes(workload, [Tier("gpu", 10_000)])
    two = replay_prefixes(workload, [Tier("gpu", 1_000), Tier("host", 9_000)])
    assert sum(two.tier_hit_blocks) == one.tier_hit_blocks[0] == 3336
    assert two.tier_hit_blocks[0] == 738
    assert two.reused_tokens == one.reused_tokens
    assert two.num_reusing_requests == one.num_reusing_requests < one.num_requests == 700
    assert one.demoted_blocks == ()
    assert two.demoted_blocks[0] > two.evicted_blocks > 0


def test_shares_of_a_workload_worked_by_hand() -> None:
    workload = Workload(
        "hand",
        np.array([0.0, 1.0, 2.0]),
        np.array([1024, 1100, 1024]),
        np.array([1, 1, 1]),
        np.array([1, 2, 1, 2, 3, 1, 4]),
        np.array([0, 2, 5, 7]),
        512,
    )
    reuse = replay_prefixes(workload, [Tier("gpu", None)])
    assert (reuse.tier_hit_blocks, reuse.num_blocks, reuse.inserted_blocks) == ((3,), 7, 4)
    assert reuse.hit_share == 3 / 7
    assert reuse.reused_token_share == (1024 + 512) / 3148
    assert reuse.num_reusing_requests == 1
    assert block_reuse(workload) == pytest.approx(3 / 7)


def test_the_command_prints_the_table_and_refuses_files_without_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(EXCERPTS / CONVERSATION), "--capacity-blocks", "1000", "--host-blocks", "9000"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{CONVERSATION}: 700 requests, 18.4 % of blocks reused"
    assert lines[4].startswith("| 1,000 | 9,000 | 3.9 | 13.7 | 17.5 |")
    assert lines[5].startswith("| unlimited | 0 | 18.4 | 0.0 | 18.4 |")
    assert main([str(EXCERPTS / "azure_2023_code_head300.csv")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        captured.err
        == "error: azure_2023_code_head300.csv: has no hash_ids, so nothing is known about shared prefixes\n"
    )
    with pytest.raises(InputError, match="no hash_ids"):
        block_reuse(load_workload(EXCERPTS / "azure_2023_code_head300.csv"))


@pytest.mark.parametrize(
    ("file", "reuse_percent", "hit_percent"),
    [
        ("mooncake_conversation.jsonl", 36.6, (4.4, 11.0, 21.1, 32.6, 35.5, 36.4)),
        ("mooncake_synthetic.jsonl", 64.0, (8.2, 27.9, 42.3, 62.4, 64.0, 64.0)),
    ],
)
def test_shares_of_the_whole_files(file: str, reuse_percent: float, hit_percent: tuple[float, ...]) -> None:
    """Blocks touched in order (forward), hits counted before the request's own blocks are touched."""
    if FOLDER is None or not (Path(FOLDER) / file).is_file():
        pytest.skip(f"OASIS_SIM_WORKLOADS does not name a folder with {file}")
    workload = load_workload(Path(FOLDER) / file)
    assert 100 * block_reuse(workload) == pytest.approx(reuse_percent, abs=0.05)
    for capacity, expected in zip((1_000, 5_000, 10_000, 30_000, 50_000, 100_000), hit_percent, strict=True):
        start_s = time.process_time()
        reuse = replay_prefixes(workload, [Tier("gpu", capacity)], "forward")
        assert 100 * reuse.hit_share == pytest.approx(expected, abs=0.05)
        assert time.process_time() - start_s < 10
