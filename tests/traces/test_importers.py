"""Request files: golden numbers of excerpts of the real traces, formats by example, and round trips."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.errors import InputError
from traces.importers.formats import FORMATS, detect_format, load_workload, stream_requests
from traces.workload import Request, Workload

EXCERPTS = Path(__file__).parents[1] / "data" / "workloads"


@pytest.mark.parametrize(
    ("file", "format", "num_requests", "prompt_tokens", "output_tokens", "num_blocks", "last_arrival_s"),
    [
        ("mooncake_conversation_head700.jsonl", "mooncake", 700, 9_565_859, 245_810, 19_027, 234.0),
        ("mooncake_synthetic_head350.jsonl", "mooncake", 350, 4_472_604, 66_292, 8_963, 96.474),
        ("azure_2023_code_head300.csv", "azure", 300, 627_529, 7_126, None, 216.8382390),
        ("azure_2023_conv_head300.csv", "azure", 300, 270_000, 76_870, None, 84.0291020),
    ],
)
def test_excerpts_of_the_real_files_have_their_golden_totals(
    file: str,
    format: str,
    num_requests: int,
    prompt_tokens: int,
    output_tokens: int,
    num_blocks: int | None,
    last_arrival_s: float,
) -> None:
    assert detect_format(EXCERPTS / file) == format
    workload = load_workload(EXCERPTS / file)
    assert workload.num_requests == num_requests
    assert workload.prompt_tokens.sum() == prompt_tokens
    assert workload.output_tokens.sum() == output_tokens
    assert workload.arrival_s[0] == 0.0
    assert workload.duration_s == last_arrival_s
    assert (None if workload.hash_ids is None else len(workload.hash_ids)) == num_blocks
    assert workload.num_dropped == 0


def test_mooncake_rows_keep_their_blocks() -> None:
    workload = load_workload(EXCERPTS / "mooncake_conversation_head700.jsonl", max_requests=4)
    assert workload.num_requests == 4
    assert workload.hash_block_tokens == 512
    np.testing.assert_array_equal(workload.prefix_blocks(1), [0, *range(14, 28)])
    np.testing.assert_array_equal(workload.prefix_blocks(3), [0, 42, 43, 44, 45])
    assert list(workload.requests())[3] == Request(0.0, 2290, 316, (0, 42, 43, 44, 45))


def test_azure_times_are_exact_to_the_last_decimal_and_across_zones(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 23:59:59.9999999,10,1\n"
        "2023-11-17 00:00:00.0000001,11,2\n"
        "2023-11-17 02:00:01+02:00,12,3\n"
        "2023-11-17T00:00:02.5Z,13,4\n"
    )
    workload = load_workload(path)
    assert workload.arrival_s.tolist() == [0.0, 2e-7, 1.0000001, 2.5000001]


def test_burstgpt_of_either_layout_drops_and_counts_failed_calls(tmp_path: Path) -> None:
    """Rows made up for the test in the published layouts: the trace itself is not shipped."""
    first = tmp_path / "first.csv"
    first.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,0,1087,API log\n"
        "118,GPT-4,417,276,693,Conversation log\n"
    )
    third = tmp_path / "third.csv"
    third.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "19440110.0,a,43,GPT-4,472,18,490,Conversation log\n"
        "19440150.0,b,2,GPT-4,0,7,7,Conversation log\n"
        "19440223.0,c,2,ChatGPT,417,276,693,Conversation log\n"
    )
    for path in (first, third):
        assert detect_format(path) == "burstgpt"
        workload = load_workload(path)
        assert workload.arrival_s.tolist() == [0.0, 113.0]
        assert workload.prompt_tokens.tolist() == [472, 417]
        assert workload.output_tokens.tolist() == [18, 276]
        assert workload.num_dropped == 1
        assert len(list(stream_requests(path))) == 3


def test_plain_csv_with_other_columns_order_mark_and_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "plain.csv"
    path.write_bytes(b"\xef\xbb\xbfarrival_s, output_tokens,user,prompt_tokens\r\n0.5,7,x,3\r\n\r\n1e1, 8 ,y,4\r\n")
    workload = load_workload(path)
    assert workload.arrival_s.tolist() == [0.5, 10.0]
    assert workload.prompt_tokens.tolist() == [3, 4]
    assert workload.output_tokens.tolist() == [7, 8]


requests = st.lists(
    st.tuples(st.floats(0, 1e6), st.integers(1, 3000), st.integers(1, 40_000), st.integers(0, 2**40)),
    min_size=1,
    max_size=20,
)


@settings(deadline=None)
@given(requests, st.booleans())
def test_plain_jsonl_round_trip(tmp_path_factory: pytest.TempPathFactory, rows: list, hashed: bool) -> None:
    expected = []
    arrival_s = 0.0
    for gap_s, prompt_tokens, output_tokens, first_id in rows:
        arrival_s += gap_s
        ids = tuple(range(first_id, first_id - (-prompt_tokens // 512))) if hashed else None
        expected.append(Request(arrival_s, prompt_tokens, output_tokens, ids))
    path = tmp_path_factory.mktemp("jsonl") / "requests.jsonl"
    lines = [{k: v for k, v in request._asdict().items() if v is not None} for request in expected]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    assert list(stream_requests(path)) == expected
    workload = load_workload(path)
    assert list(workload.requests()) == expected
    again = Workload.from_requests("again", workload.requests(), hash_block_tokens=workload.hash_block_tokens)
    for field in ("arrival_s", "prompt_tokens", "output_tokens", "hash_ids", "hash_offsets"):
        np.testing.assert_array_equal(getattr(again, field), getattr(workload, field))


def test_streaming_holds_one_row_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    line = '{"timestamp": %d, "input_length": 5000, "output_length": 9, "hash_ids": [1,2,3,4,5,6,7,8,9,10]}\n'
    path.write_text("".join(line % index for index in range(20_000)))
    next(stream_requests(path))
    tracemalloc.start()
    total = sum(request.output_tokens for request in stream_requests(path))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == 180_000
    assert peak_bytes < 2**20 < path.stat().st_size


def test_every_format_is_found_by_its_fields_and_unknown_ones_name_the_known(tmp_path: Path) -> None:
    for name, form in FORMATS.items():
        path = tmp_path / f"{name}.{'jsonl' if form.jsonl else 'csv'}"
        if form.jsonl:
            path.write_text(json.dumps(dict.fromkeys(form.fields, 1)))
        else:
            path.write_text(",".join(form.fields) + "\n" + ",".join("1" for _ in form.fields))
        assert detect_format(path) == name
    path.write_text('{"when": 3}')
    with pytest.raises(InputError, match=r"unknown request format with fields when; .*mooncake: timestamp"):
        load_workload(path)
    with pytest.raises(InputError, match="unknown request format 'parquet'; choose from auto, mooncake"):
        load_workload(path, "parquet")
