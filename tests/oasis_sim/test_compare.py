"""`oasis-sim compare`: one best row per system, from a grid that each system serves."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from oasis_sim.verbs.compare import comparison
from traces.errors import InputError

SMALL = ("--batch-size", "4,8", "--fetch-cap", "0.05,1", "--lookahead", "1", "--set", "workload.output_tokens=16")


@pytest.fixture
def setting(tiny_trace):
    return ("--trace", str(tiny_trace), "--model", "Qwen3-8B", *SMALL)


def test_each_system_is_at_the_best_of_its_points(oasis, setting, tmp_path):
    out = tmp_path / "runs"
    done = oasis("compare", "--systems", "dense,retrieval,oasiskv", *setting, "--out", str(out), "--json", "-j", "1")
    assert done.code == 0, done.err
    document = done.document
    assert [row["system"] for row in document["rows"]] == ["dense", "retrieval", "oasiskv"]
    points = pq.read_table(out / "results.parquet").to_pylist()
    assert len(points) == 2 + 4 + 4
    for row in document["rows"]:
        own = [p for p in points if p["system"] == row["system"] and p["recall"] >= p["min_recall"]]
        if own:
            assert row["throughput_tokens_per_s"] == max(p["throughput_tokens_per_s"] for p in own)
    best = document["best"]
    assert best in document["rows"]
    assert best["throughput_tokens_per_s"] == max(
        row["throughput_tokens_per_s"] for row in document["rows"] if row["recall"] >= row["min_recall"]
    )
    assert (document["out"], document["left_out"]) == (str(out), {})
    assert (out / "plots" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "manifest.json").read_text())["verb"] == "compare"


def test_screen_has_a_line_per_system_and_names_the_best(oasis, setting, tmp_path):
    done = oasis("compare", "--systems", "dense,oasiskv", *setting, "--out", str(tmp_path / "r"), "-j", "1", "-q")
    assert done.code == 0, done.err
    assert sum(line.lstrip("★ ").startswith(("dense ", "oasiskv ")) for line in done.out.splitlines()) == 2
    assert "★" in done.out
    assert "Best: " in done.out


def test_nothing_to_choose_from_is_said(oasis, tiny_trace, tmp_path):
    few = ["--trace", str(tiny_trace), "--system", "dense,quest", "--batch-size", "2", "-j", "1", "-q"]
    done = oasis("compare", *few, "--out", str(tmp_path / "r"))
    assert done.code == 0, done.err
    assert "; each system as it is: nothing to choose from\n" in done.out
    both = oasis("compare", "--systems", "dense", "--system", "quest")
    assert (both.code, both.err) == (2, "error: system is given by --system and by --systems\n")


def test_one_system_has_a_table_and_no_picture(oasis, setting, tmp_path):
    done = oasis("compare", "--systems", "quest", *setting, "--out", str(tmp_path / "r"), "-j", "1", "-q")
    assert done.code == 0, done.err
    assert "quest" in done.out
    assert "picture" not in done.out


def test_default_takes_every_system_that_the_trace_serves(tiny_trace):
    request, left_out = comparison({"trace": [str(tiny_trace)], "policy.lookahead_k": [1, 9]})
    systems = {point.system for point in request.points}
    assert {"dense", "quest", "retrieval", "prefetch-previous", "oasiskv"} <= systems
    assert not any("oracle" in system for system in systems)
    assert not systems & set(left_out)
    drafted = {point.policy["lookahead_k"] for point in request.points if point.system == "oasiskv"}
    assert drafted == {1}, "the trace has no drafts nine steps ahead"


def test_a_system_that_cannot_be_served_is_left_out_or_refused_by_name(tiny_trace):
    only_far = {"trace": [str(tiny_trace)], "policy.lookahead_k": [9]}
    _, left_out = comparison(only_far)
    assert "draft distances" in left_out["oasiskv"]
    with pytest.raises(InputError, match=r"system oasiskv: .*draft distances"):
        comparison({**only_far, "system": ["dense", "oasiskv"]})


def test_bad_input_is_one_line(oasis, setting):
    for arguments, text in (
        (["compare", "--systems", "dens"], "dense"),
        (["compare", "--jobs", "0"], "--jobs"),
        (["compare", "--systems", "dense,dense"], "value given twice: dense"),
        (["compare", "--systems", ","], "--systems: empty value"),
        (["compare", "--systems", "dense", "--maximize", "recall,churn"], "objective.maximize cannot be swept"),
        (["compare", "--systems", "dense", "--trace", "nowhere"], "nowhere"),
        (["compare", "--systems", "dense", "--set", "policy.fetch_capp=1"], "policy.fetch_cap"),
    ):
        done = oasis(*arguments)
        assert done.code == 2, (arguments, done.out)
        assert text in done.err
        assert len(done.err.strip().splitlines()) == 1
