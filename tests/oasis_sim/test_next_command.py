"""What `run` names as next does run, and is about the same model, GPU and batch."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.oasis_sim.conftest import Oasis


def _next(out: str) -> list[str]:
    (line,) = [line for line in out.splitlines() if "; next: " in line]
    words = shlex.split(line.partition("; next: ")[2])
    assert words[0] == "oasis-sim"
    return words[1:]


GIVEN = ["--system", "quest", "--model", "Qwen3-0.6B", "--hardware", "h200-sxm", "--batch-size", "3"]
FILE = "name: one\nsystem: oasiskv\nmodel: Qwen3-0.6B\nhardware: h200-sxm\n"
SERVED = ["--model", "Qwen3-0.6B", "--system", "dense", "--set", "serving.num_requests=4"]


def test_next_names_the_block_size_of_a_trace_that_lacks_others(oasis: Oasis) -> None:
    ran = oasis("run", "--trace", "gemma3-270m-reasoning-16k-h200", "--context", "16128", *GIVEN)
    assert ran.code == 0, ran.err
    words = _next(ran.out)
    assert words[words.index("--block-size") + 1] == "16"


@pytest.mark.parametrize(
    ("file", "arguments", "swept"),
    [
        (None, GIVEN, "policy.block_size_tokens"),
        (None, [*GIVEN, "--set", "name=first", "--set", "policy.transport=gather"], "policy.block_size_tokens"),
        (
            "name: one\nsystem: oasiskv\nmodel: Qwen3-0.6B\nhardware: h200-sxm\n",
            ["--batch-size", "3"],
            "policy.fetch_cap",
        ),
        (None, SERVED, "serving.rate_per_s"),
    ],
)
def test_next_keeps_what_was_given(
    oasis: Oasis, tiny_trace: Path, tmp_path: Path, file: str | None, arguments: list[str], swept: str
) -> None:
    if file is not None:
        (tmp_path / "e.yaml").write_text(file)
        arguments = ["e.yaml", *arguments]
    first = oasis("run", *arguments, "--trace", str(tiny_trace), "--quiet")
    assert first.code == 0, first.err
    following = _next(first.out)
    assert following[0] == "sweep"
    done = oasis(*following, "--quiet", "--jobs", "1", "--json")
    assert done.code == 0, done.err
    rows = done.document["rows"]
    assert len({row[swept] for row in rows}) > 1
    assert {row["model"] for row in rows} == {"Qwen3-0.6B"}
    assert {row["hardware"] for row in rows} == {"h100-sxm" if swept.startswith("serving") else "h200-sxm"}
    assert swept.startswith("serving") or {row["workload.batch_size"] for row in rows} == {3}
