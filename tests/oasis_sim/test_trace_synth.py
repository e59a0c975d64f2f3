"""`oasis-sim trace synth` as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oasis_sim.conftest import Oasis
from traces.reader import open_trace


def test_a_recorded_trace_at_another_context(oasis: Oasis, tiny_trace: Path, tmp_path: Path) -> None:
    done = oasis(
        *("trace", "synth", "--from", str(tiny_trace), "--context", "2048", "--steps", "24"),
        *("--out", "longer.zarr", "--save-statistics", "statistics.yaml"),
    )
    assert done.code == 0, done.err
    assert "synthesised, not recorded" in done.out
    assert "targets hold at 1,024 tokens of context, achieved is at 2,048" in done.out
    assert "synthesised for tiny" in oasis("trace", "info", "longer.zarr").out
    assert oasis("trace", "check", "longer.zarr").code == 0
    ran = oasis("run", "--trace", "longer.zarr", "--context", "2048", "--budget", "256", "--batch-size", "2", "--json")
    assert ran.code == 0, ran.err
    assert ran.document["workload.context_tokens"] == 2048
    again = oasis(
        *("trace", "synth", "--from", "statistics.yaml", "--context", "2048", "--steps", "24", "--out", "again.zarr")
    )
    assert again.code == 0, again.err


def test_a_recipe_prints_its_open_input_and_targets(oasis: Oasis, tmp_path: Path) -> None:
    given = ("--from", "qwen3-8b-published", "--layers", "4", "--steps", "24", "--context", "4096")
    done = oasis("trace", "synth", *given, "--churn", "0.2", "--out", "made.zarr", "--json")
    assert done.code == 0, done.err
    document = done.document
    effect = {row["set_size_blocks"]: row for row in document["churn_effect"]}
    assert effect[128]["churn"] == pytest.approx(0.2, abs=1e-4)
    # 0.2 x 128 blocks x 2 x 16 tokens x 128 x 2 bytes x 36 layers x 8 heads
    assert effect[128]["uncapped_bytes_per_token"] == pytest.approx(0.2 * 128 * 8192 * 288, rel=1e-3)
    targets = {(row["statistic"], row["blocks"]): row["target"] for row in document["rows"]}
    assert targets["churn per step", 20] == pytest.approx(0.161, abs=1e-4)
    assert targets["draft1 overlap", 20] == pytest.approx(0.96, abs=1e-4)
    assert "synthesised" in (open_trace("made.zarr").attrs.provenance.notes or "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "qwen3-published"], "neither a shipped trace nor an existing file"),
        (["--from", "absent.yaml"], "absent.yaml"),
        (["--from", "FOLDER.yaml"], "cannot be read as YAML: Is a directory"),
        (["--from", "LIST.yaml"], "expected the keys of a recipe or of statistics"),
        (["--from", "TEXT.jsonl"], "TEXT.jsonl: is neither a trace (a folder or .zarr.zip) nor a recipe"),
        (["--from", "qwen3-8b-published", "--save-statistics", "none/s.yaml"], "--save-statistics none/s.yaml"),
        (["--from", "qwen3-8b-published", "--model", "Qwen3-9B"], "unknown model 'Qwen3-9B'"),
        (["--from", "qwen3-8b-published", "--context", "40"], "context of 40 tokens"),
        (["--from", "qwen3-8b-published", "--layers", "1,x"], "--layers"),
        (["--from", "qwen3-8b-published", "--layers", "99"], "layer 99 is not one of the 36 layers"),
        (["--from", "qwen3-8b-published", "--group", "a"], "--group"),
        (["--from", "TINY", "--churn", "0.2"], "--churn"),
        (["--from", "TINY", "--block-size", "128"], "block size 128 is not recorded"),
        (["--from", "TINY", "--acceptance", "0.5,x"], "--acceptance: expected numbers"),
        (["--from", "qwen3-8b-published", "--acceptance", "0.5,0.5,0.5,0.5,0.5"], "acceptance: 5 shares for"),
        (["--from", "TINY", "--max-budget", "8"], "a budget below one block"),
        (["--from", "TINY", "--max-budget", "0"], "a budget below one block"),
        (["--from", "qwen3-8b-published", "--context", "0"], "context of 0 tokens: must be 128"),
        (["--from", "qwen3-8b-published", "--context", "-4096"], "context of -4096 tokens: must be 128"),
        (["--from", "qwen3-8b-published", "--steps", "0"], "0 steps: at least 5"),
        (["--from", "qwen3-8b-published", "--seed", "-1"], "seed -1: must not be negative"),
    ],
)
def test_bad_input_is_one_clear_line(oasis: Oasis, tiny_trace: Path, arguments: list[str], message: str) -> None:
    given = [str(tiny_trace) if argument == "TINY" else argument for argument in arguments]
    Path("FOLDER.yaml").mkdir()
    Path("LIST.yaml").write_text("- 1\n")
    Path("TEXT.jsonl").write_text("{}\n")
    done = oasis("trace", "synth", *given, "--out", "made.zarr")
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not Path("made.zarr").exists()


def test_nothing_is_overwritten(oasis: Oasis, tmp_path: Path) -> None:
    Path("made.zarr").mkdir()
    Path("made.zarr/mine").write_text("")
    done = oasis("trace", "synth", "--from", "qwen3-8b-published", "--out", "made.zarr")
    assert done.code == 2
    assert "made.zarr" in done.err
    assert [path.name for path in Path("made.zarr").iterdir()] == ["mine"]
