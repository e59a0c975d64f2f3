"""Every fault of a request file is refused in one line that names file, line number and field."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import pytest

from traces.errors import InputError
from traces.importers.formats import load_workload, stream_requests

MOONCAKE = '{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,API log\n"
PLAIN_CSV = "arrival_s,prompt_tokens,output_tokens\n1.5,10,20\n"
PLAIN_JSONL = '{"arrival_s": 1.5, "prompt_tokens": 600, "output_tokens": 20, "hash_ids": [7, 8]}\n'


def mooncake(**changes: str) -> str:
    fields = {"timestamp": "1000", "input_length": "600", "output_length": "5", "hash_ids": "[1, 2]"} | changes
    return "{" + ", ".join(f'"{key}": {value}' for key, value in fields.items() if value) + "}"


@pytest.mark.parametrize(
    ("format", "start", "bad_line", "line", "problem"),
    [
        ("mooncake", MOONCAKE, mooncake(timestamp="999"), 2, "field timestamp: times must not decrease: 999"),
        ("mooncake", "", mooncake(timestamp="-1"), 1, "field timestamp: time must be >= 0, got -1"),
        ("mooncake", MOONCAKE, mooncake(timestamp="NaN"), 2, "field timestamp: expected a finite time, got nan"),
        ("mooncake", MOONCAKE, mooncake(timestamp="1" + "0" * 400), 2, "field timestamp: expected a finite time"),
        ("mooncake", MOONCAKE, mooncake(timestamp='"soon"'), 2, "field timestamp: expected a time, got 'soon'"),
        ("mooncake", MOONCAKE, mooncake(timestamp="true"), 2, "field timestamp: expected a time, got True"),
        ("mooncake", MOONCAKE, mooncake(timestamp="null"), 2, "field timestamp: expected a time, got None"),
        (
            "mooncake",
            MOONCAKE,
            mooncake(input_length="0", hash_ids="[]"),
            2,
            "input_length: expected a whole number >= 1",
        ),
        (
            "mooncake",
            MOONCAKE,
            mooncake(input_length="600.0"),
            2,
            "input_length: expected a whole number >= 1, got 600.0",
        ),
        ("mooncake", MOONCAKE, mooncake(output_length="0"), 2, "output_length: expected a whole number >= 1, got 0"),
        (
            "mooncake",
            MOONCAKE,
            mooncake(output_length=""),
            2,
            "output_length: missing; the line has timestamp, input_length",
        ),
        ("mooncake", MOONCAKE, mooncake(hash_ids=""), 2, "field hash_ids: missing"),
        ("mooncake", MOONCAKE, mooncake(hash_ids="[1]"), 2, "hash_ids: expected 2 ids for 600 tokens in blocks of 512"),
        ("mooncake", MOONCAKE, mooncake(hash_ids="[1, -2]"), 2, r"hash_ids\[1\]: expected a whole number >= 0, got -2"),
        ("mooncake", MOONCAKE, mooncake(hash_ids="[1, 18446744073709551616]"), 2, r"hash_ids\[1\]: expected a whole"),
        ("mooncake", MOONCAKE, mooncake(hash_ids="7"), 2, "hash_ids: expected a list of block ids, got 7"),
        ("mooncake", MOONCAKE + "\n", '{"timestamp": 1000,', 3, "not JSON"),
        ("mooncake", MOONCAKE, "[" * 100_000, 2, "not JSON"),
        ("mooncake", MOONCAKE, "[1, 2]", 2, "expected a JSON object"),
        ("azure", AZURE, "2023-11-16 18:17:03.9799599,1,1", 3, "field TIMESTAMP: times must not decrease: 2023"),
        ("azure", AZURE, "16.11.2023,1,1", 3, "TIMESTAMP: expected YYYY-MM-DD hh:mm:ss"),
        ("azure", AZURE, "2023-02-30 18:17:03,1,1", 3, "TIMESTAMP: no such time"),
        ("azure", AZURE, "2023-11-16 18:17:04,1", 3, "field GeneratedTokens: expected 3 columns, got 2"),
        ("azure", AZURE, "2023-11-16 18:17:04,1,2,3", 3, "field 4: expected 3 columns, got 4"),
        ("azure", AZURE, "2023-11-16 18:17:04,many,2", 3, "ContextTokens: expected a whole number >= 1, got 'many'"),
        ("azure", AZURE, '2023-11-16 18:17:04,"1,2', 3, "not comma-separated text"),
        ("burstgpt", BURSTGPT, "4.5,GPT-4,1,1,2,API log", 3, "field Timestamp: times must not decrease: 4.5"),
        ("burstgpt", BURSTGPT, "6,GPT-4,1,-1,0,API log", 3, "Response tokens: expected a whole number >= 0, got -1"),
        ("burstgpt", BURSTGPT, "6,GPT-4,,1,1,API log", 3, "Request tokens: expected a whole number >= 0, got ''"),
        (
            "csv",
            PLAIN_CSV,
            "1.25,10,20",
            3,
            "arrival_s: times must not decrease: 1.25 is earlier than the time of line 2",
        ),
        ("csv", PLAIN_CSV, "-0.5,10,20", 3, "arrival_s: time must be >= 0, got -0.5"),
        ("csv", PLAIN_CSV, "inf,10,20", 3, "arrival_s: expected a finite time"),
        ("csv", PLAIN_CSV, "2,1_0,20", 3, "prompt_tokens: expected a whole number >= 1, got '1_0'"),
        ("csv", PLAIN_CSV, f"2,{10**30},20", 3, r"prompt_tokens: expected a whole number at most [\d,]+, got '1000"),
        (
            "mooncake",
            MOONCAKE,
            mooncake(output_length=str(10**25)),
            2,
            r"output_length: expected a whole number at most",
        ),
        ("csv", PLAIN_CSV, "2,10,1e3", 3, "output_tokens: expected a whole number >= 1, got '1e3'"),
        ("csv", PLAIN_CSV, "2,10,99999999999999999999", 3, "output_tokens: expected a whole number"),
        ("csv", "arrival_s,prompt_tokens,prompt_tokens\n", "1,2,3", 1, "a column is named twice"),
        (
            "jsonl",
            PLAIN_JSONL,
            '{"arrival_s": 2, "prompt_tokens": 9, "output_tokens": 2}',
            2,
            "hash_ids: must be on all",
        ),
        ("jsonl", PLAIN_JSONL, PLAIN_JSONL.replace(", 8", "").strip(), 2, "hash_ids: expected 2 ids for 600 tokens"),
    ],
)
def test_a_faulty_line_is_named(
    tmp_path: Path, format: str, start: str, bad_line: str, line: int, problem: str
) -> None:
    path = tmp_path / ("requests.jsonl" if format in ("mooncake", "jsonl") else "requests.csv")
    path.write_text(f"{start}{bad_line}\n")
    with pytest.raises(InputError, match=rf"requests\.(jsonl|csv), line {line}\b.*{problem}") as caught:
        load_workload(path, format)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_stream_yields_what_precedes_the_fault(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(PLAIN_CSV + "2,11,21\nx,1,1\n")
    stream = stream_requests(path)
    assert next(stream).prompt_tokens == 10
    assert next(stream).prompt_tokens == 11
    with pytest.raises(InputError, match="line 4, field arrival_s"):
        next(stream)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("empty.csv", b"", "no requests"),
        ("header.csv", b"arrival_s,prompt_tokens,output_tokens\n", "no requests"),
        ("empty.jsonl", b"\n\n", "no requests"),
        ("binary.csv", b"arrival_s,prompt_tokens,output_tokens\n1,2,\xff\xfe\n", "not UTF-8 text"),
        ("first.csv", b"\xff\xfe\n", "first.csv: not UTF-8 text"),
        (
            "requests.csv.gz",
            gzip.compress(b"arrival_s,prompt_tokens,output_tokens\n0,1,1\n", mtime=0),
            "requests.csv.gz: compressed by gzip",
        ),
        ("requests.jsonl", gzip.compress(b"{}\n", mtime=0), "requests.jsonl: compressed by gzip, which is not read"),
        ("requests.csv", bz2.compress(b"x"), "compressed by bzip2"),
        ("requests.jsonl", lzma.compress(b"x"), "compressed by xz"),
        ("binary.jsonl", b'{"arrival_s": 1, "prompt_tokens": 1, "output_tokens": 1}\n\xff\n', "not UTF-8 text"),
    ],
)
def test_files_without_a_request_or_text(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=problem if name in problem else f"{name}.*{problem}"):
        load_workload(path)


def test_json_lines_under_another_ending_are_told(tmp_path: Path) -> None:
    path = tmp_path / "requests.txt"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 8, "output_tokens": 8}\n')
    with pytest.raises(InputError, match=r"requests\.txt: JSON lines are read from a file that ends in \.jsonl"):
        load_workload(path)


def test_only_failed_calls_leave_no_workload(tmp_path: Path) -> None:
    path = tmp_path / "failed.csv"
    path.write_text(BURSTGPT.replace(",18,", ",0,"))
    with pytest.raises(InputError, match="at least one request"):
        load_workload(path)


def test_a_file_that_cannot_be_opened_and_a_bad_limit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.csv: cannot be read: No such file"):
        load_workload(tmp_path / "absent.csv")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        load_workload(tmp_path)
    path = tmp_path / "requests.csv"
    path.write_text(PLAIN_CSV)
    with pytest.raises(InputError, match="max_requests must be >= 1, got 0"):
        load_workload(path, max_requests=0)
