"""`oasis-sim trace overlap` as a user runs it, and the page that shows what it wrote."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from analysis.overlap_frames import load_caps, load_misses, load_overlap
from analysis.overlap_tables import write_tables
from tests.oasis_sim.conftest import REPOSITORY, Oasis
from tests.traces.tiny import group_attributes, record_of, trace_attributes, truth_of
from traces.writer import TraceWriter

PAGE, FOLDER = REPOSITORY / "docs/traces.md", REPOSITORY / "docs/traces"


def test_tables_and_pictures(oasis: Oasis, tiny_trace: Path) -> None:
    done = oasis("trace", "overlap", str(tiny_trace), "--out", "told", "--detail-budget", "256", "--json")
    assert done.code == 0, done.err
    document = done.document
    assert set(document["rows"]) == {"overlap.parquet", "misses.parquet", "caps.parquet"}
    assert {"distance.png", "heads.png", "caps.png", "block-sizes.png"} <= set(document["pictures"])
    assert "sparse.png" not in document["pictures"], "the trace has no drafts over a working set"
    for name, rows in document["rows"].items():
        assert len(pd.read_parquet(Path("told") / name)) == rows
    table = pd.read_parquet("told/overlap.parquet")
    assert set(table["num_blocks"]) == {256 // 8, 16, 20, 8, 4}
    assert set(table["block_size_tokens"]) == {8, 16, 32, 64}
    assert not [path for path in Path("told").iterdir() if path.name.startswith(".")]
    again = oasis("trace", "overlap", str(tiny_trace), "--out", "again", "--detail-budget", "256", "--no-pictures")
    assert again.code == 0, again.err
    for name in document["rows"]:
        assert (Path("told") / name).read_bytes() == (Path("again") / name).read_bytes()
    few = oasis(
        *("trace", "overlap", str(tiny_trace), "--out", "few", "--budgets", "128", "--top-blocks", "0"),
        *("--block-sizes", "16", "--max-distance", "2", "--no-pictures", "--detail-budget", "128", "--json"),
    )
    assert few.code == 0, few.err
    table = pd.read_parquet("few/overlap.parquet")
    assert (set(table["num_blocks"]), set(table["distance"])) == ({8}, {1, 2})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["smollm2-135m-reason"], "neither a shipped trace nor an existing file"),
        (["TINY", "TINY"], "are both named"),
        (["TINY", "--budgets", "256,x"], "--budgets"),
        (["TINY", "--budgets", "0"], "must be positive"),
        (["TINY", "--budgets", "8192", "--top-blocks", "0", "--detail-budget", "128"], "none ranks a budget"),
        (["TINY", "--max-distance", "9"], "max_distance 9"),
        (["TINY", "--detail-budget", "0"], "--detail-budget 0"),
        (["TINY", "--seed", "-1"], "--seed"),
        (["TINY", "--detail-budget", "4096"], "ranks so much at every step; the most is 256"),
    ],
)
def test_bad_input_is_one_line(oasis: Oasis, tiny_trace: Path, arguments: list[str], message: str) -> None:
    given = [str(tiny_trace) if argument == "TINY" else argument for argument in arguments]
    done = oasis("trace", "overlap", *given, "--out", "told", "--quiet")
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert message in done.err


def test_requests_of_one_trace_have_rows_and_panels_of_their_own(oasis: Oasis, tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "two.zarr", trace_attributes()) as writer:
        for name in ("first", "second"):
            group = writer.group(name, group_attributes(24))
            for truth in truth_of(24):
                group.append(record_of(truth))
    done = oasis(
        *("trace", "overlap", str(tmp_path / "two.zarr"), "--out", "told", "--top-blocks", "0", "--max-distance", "1"),
        *("--budgets", "8", "--detail-budget", "8"),
    )
    assert done.code == 0, done.err
    table = pd.read_parquet("told/overlap.parquet")
    assert table["trace"].unique().tolist() == ["tiny-trace/first", "tiny-trace/second"]
    assert "| first, " in Path("told/tables.md").read_text()
    assert "| second, " in Path("told/tables.md").read_text()


def test_a_trace_of_too_few_steps_is_named_before_anything_is_written(oasis: Oasis, tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "short.zarr", trace_attributes()) as writer:
        group = writer.group("reasoning", group_attributes(2))
        for truth in truth_of(2):
            group.append(record_of(truth))
    done = oasis("trace", "overlap", str(tmp_path / "short.zarr"), "--out", "short", "--detail-budget", "8")
    assert done.code == 2
    assert done.err.endswith("request 'reasoning' has 2 steps; recall under fetch caps needs 3\n")
    assert done.err.count("\n") == 1
    assert not Path("short").exists()


def test_the_page_shows_tables_as_they_are_made() -> None:
    overlap, misses = load_overlap(FOLDER / "overlap.parquet"), load_misses(FOLDER / "misses.parquet")
    tables = write_tables(overlap, misses, load_caps(FOLDER / "caps.parquet"), 1024)
    assert (FOLDER / "tables.md").read_text(encoding="utf-8") == tables
    script = REPOSITORY / "docs/scripts/refresh_tables.py"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, env=environment, check=False)  # fmt: skip  # noqa: E501
    assert done.returncode == 0, done.stderr
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("<!-- table: ") >= 6
    pictures = re.findall(r"^!\[.*?\]\((.*?)\)$", text, flags=re.MULTILINE)
    assert len(pictures) >= 6
    assert all((PAGE.parent / picture).is_file() for picture in pictures)


def test_a_shipped_trace_gives_the_rows_that_the_page_keeps(oasis: Oasis) -> None:
    """Of one compact trace, so that the page's tables cannot outlive a change of the definitions."""
    name = "smollm2-135m-reasoning-2k-h200"
    done = oasis(
        "trace", "overlap", name, "--out", "told", "--detail-budget", "1024", "--no-pictures", "--quiet", "--json"
    )
    assert done.code == 0, done.err
    for file in done.document["rows"]:
        kept, made = pd.read_parquet(FOLDER / file), pd.read_parquet(Path("told") / file)
        kept = kept[kept["trace"] == name].reset_index(drop=True)
        pd.testing.assert_frame_equal(kept, made, check_dtype=False, rtol=1e-5)


@pytest.mark.parametrize(("stopped_at", "kept"), [("misses.parquet", ["overlap.parquet"]), ("overlap.parquet", None)])
def test_an_interruption_keeps_whole_tables_and_no_empty_folder(
    oasis: Oasis, tiny_trace: Path, monkeypatch: pytest.MonkeyPatch, stopped_at: str, kept: list[str] | None
) -> None:
    def stop(*_: object) -> int:
        raise KeyboardInterrupt

    write = {"misses.parquet": "traces.misses.write_misses", "overlap.parquet": "oasis_sim.verbs.overlap.write_overlap"}
    monkeypatch.setattr(write[stopped_at], stop)
    done = oasis("trace", "overlap", str(tiny_trace), "--out", "new/tables", "--quiet", "--detail-budget", "128")
    said = "new/tables keeps overlap.parquet" if kept else "nothing is in new/tables"
    assert (done.code, done.out, done.err) == (130, "", f"interrupted: {said}\n")
    assert Path("new").exists() == (kept is not None)
    assert kept is None or [path.name for path in Path("new/tables").iterdir()] == kept
