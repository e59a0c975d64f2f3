from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from simulator.metrics import COLUMNS
from simulator.point_lines import point_line, read_points
from simulator.results import (
    CONFIG,
    LOCK,
    MANIFEST,
    POINTS,
    TABLE,
    RunFolder,
    read_manifest,
    write_table,
)
from traces.errors import InputError

CONFIG_DOCUMENT = {"system": "oasiskv", "policy": {"fetch_cap": [0.1, 1.0]}}


def _folder(path: Path, experiment_hash: str = "a" * 64) -> RunFolder:
    return RunFolder(path, experiment_hash, CONFIG_DOCUMENT, {"verb": "sweep", "seed": 0})


def _row(key: str, **values: Any) -> dict[str, Any]:
    return dict.fromkeys(COLUMNS) | {"point_key": key, "status": "ok"} | values


def test_a_finished_folder_holds_points_table_config_and_manifest(tmp_path: Path) -> None:
    rows = [_row("p1", recall=0.5), _row("p2", recall=0.75)]
    with _folder(tmp_path / "run") as folder:
        folder.append(rows[1:])
        folder.append(rows[:1])
        folder.finish(rows, {"wall_s": 1.5})
    path = tmp_path / "run"
    assert sorted(entry.name for entry in path.iterdir()) == sorted([POINTS, TABLE, CONFIG, MANIFEST])
    assert pq.read_table(path / TABLE)["recall"].to_pylist() == [0.5, 0.75]
    assert yaml.safe_load((path / CONFIG).read_text()) == CONFIG_DOCUMENT
    manifest = read_manifest(path)
    assert (manifest["experiment_hash"], manifest["state"], manifest["wall_s"]) == ("a" * 64, "finished", 1.5)


def test_points_are_on_the_disk_as_they_finish_and_are_there_again_on_resume(tmp_path: Path) -> None:
    with _folder(tmp_path / "run") as folder:
        folder.append([_row("p1", recall=0.25)])
        rows, whole_bytes = read_points(tmp_path / "run" / POINTS)
        assert rows["p1"]["recall"] == 0.25
        assert whole_bytes == (tmp_path / "run" / POINTS).stat().st_size
        assert read_manifest(tmp_path / "run")["state"] == "unfinished"
    with _folder(tmp_path / "run") as folder:
        assert list(folder.rows) == ["p1"]


@pytest.mark.parametrize("torn", [b'{"point_key": "p2", "sta', b'{"point_key": "p2"}', b"\xff"])
def test_a_torn_last_line_is_dropped_and_overwritten(tmp_path: Path, torn: bytes) -> None:
    with _folder(tmp_path / "run") as folder:
        folder.append([_row("p1")])
    with open(tmp_path / "run" / POINTS, "ab") as handle:
        handle.write(torn)
    with _folder(tmp_path / "run") as folder:
        assert list(folder.rows) == ["p1"]
        folder.append([_row("p3")])
    assert list(read_points(tmp_path / "run" / POINTS)[0]) == ["p1", "p3"]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"not json\n", "no JSON"),
        (b"\xff\xfe\n", "no JSON"),
        (b"\n", "no JSON"),
        (b'"text"\n', "no JSON object"),
        (b'{"status": "ok"}\n', "it lacks point_key"),
    ],
)
def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path, line: bytes, fault: str) -> None:
    path = tmp_path / POINTS
    path.write_bytes(point_line(_row("p1")) + line + point_line(_row("p2")))
    with pytest.raises(InputError, match=rf"points\.jsonl:2: not a finished point: {fault}; remove the line"):
        read_points(path)


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        (b'"recall":0.5', b'"recall":"abc"', 'recall is "abc", not a number'),
        (b'"recall":0.5', b'"recall":true', "recall is true, not a number"),
        (b'"recall":0.5', b'"recall":NaN', "recall is nan, not finite"),
        (b'"recall":0.5', b'"recall":1e999', "recall is inf, not finite"),
        (b'"recall":0.5', b'"recall":0.9', "changed since it was written"),
        (b'"throughput_tokens_per_s":100.0', b'"throughput_tokens_per_s":1e99', "changed since it was written"),
        (b'"bound":"hbm"', b'"bound":7', "bound is 7, not text"),
        (b'"overloaded":false', b'"overloaded":0', "overloaded is 0, not true or false"),
        (b'"system":"quest"', b'"system":"dense"', "changed since it was written"),
        (b'"status":"ok"', b'"status":"good"', 'status is "good", not one of ok, does_not_fit, failed'),
        (b'"point_key":"p2"', b'"point_key":["p2"]', "point_key is"),
        (b'"crc32":', b'"crc":', "it lacks crc32"),
    ],
)
def test_a_line_edited_by_hand_is_refused_with_its_fault(
    tmp_path: Path, before: bytes, after: bytes, fault: str
) -> None:
    row = _row("p2", recall=0.5, throughput_tokens_per_s=100.0, bound="hbm", system="quest")
    row["overloaded"] = False
    with _folder(tmp_path / "run") as folder:
        folder.append([_row("p1"), row])
    path = tmp_path / "run" / POINTS
    first, second = path.read_bytes().splitlines(keepends=True)
    assert before in second
    with _folder(tmp_path / "run") as folder:
        assert folder.rows["p2"] == row
    edited = first + second.replace(before, after)
    path.write_bytes(edited)
    with (
        pytest.raises(InputError, match=re.escape(f"points.jsonl:2: not a finished point: {fault}")),
        _folder(tmp_path / "run"),
    ):
        pass
    assert path.read_bytes() == edited


def test_a_second_writer_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    with (
        _folder(tmp_path / "run"),
        pytest.raises(InputError, match=f"being written by process {os.getpid()} on"),
        _folder(tmp_path / "run"),
    ):
        pass
    with _folder(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).exists()
    assert not (tmp_path / "run" / LOCK).exists()


def test_the_lock_of_a_killed_writer_is_taken_over(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom simulator.results import RunFolder\n"
        "folder = RunFolder(Path(sys.argv[1]), 'a' * 64, {}, {})\nfolder.__enter__()\n"
        "from simulator.metrics import COLUMNS\n"
        "folder.append([dict.fromkeys(COLUMNS) | {'point_key': 'p1', 'status': 'ok'}])\nos.kill(os.getpid(), 9)\n"
    )
    repository = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], env=environment, check=False)
    assert killed.returncode == -9
    assert (tmp_path / "run" / LOCK).exists()
    with _folder(tmp_path / "run") as folder:
        assert list(folder.rows) == ["p1"]


def test_a_folder_of_another_experiment_is_refused_and_left_alone(tmp_path: Path) -> None:
    with _folder(tmp_path / "run") as folder:
        folder.append([_row("p1")])
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(InputError, match=r"another experiment \(aaaaaaaa, this one is bbbbbbbb\)"):
        _folder(tmp_path / "run", "b" * 64).__enter__()
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("text")
    with pytest.raises(InputError, match="not a run folder"):
        _folder(tmp_path).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_output_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(InputError, match=r"cannot write .*file/run"):
        _folder(tmp_path / "file" / "run").__enter__()


def test_discard_leaves_nothing_of_a_new_folder_but_keeps_an_old_one(tmp_path: Path) -> None:
    with _folder(tmp_path / "runs" / "new") as folder:
        folder.discard()
    assert list(tmp_path.iterdir()) == []
    with _folder(tmp_path / "old") as folder:
        folder.append([_row("p1")])
    with _folder(tmp_path / "old") as folder:
        folder.discard()
    assert (tmp_path / "old" / POINTS).exists()


def test_not_a_number_never_reaches_a_file(tmp_path: Path) -> None:
    with _folder(tmp_path / "run") as folder, pytest.raises(ValueError, match="not JSON compliant"):
        folder.append([_row("p1", recall=float("nan"))])


def test_the_table_has_typed_columns_in_a_fixed_order_even_when_null(tmp_path: Path) -> None:
    rows = [_row("p1", **{"policy.gather_ctas": 16, "policy.fetch_cap": 1}), _row("p2", **{"policy.fetch_cap": 0.5})]
    write_table(tmp_path / TABLE, rows)
    table = pq.read_table(tmp_path / TABLE)
    assert table.column_names == [*COLUMNS, "policy.gather_ctas"]
    types = {name: str(table.schema.field(name).type) for name in table.column_names}
    assert (types["recall"], types["t_other_s"], types["bound"]) == ("double", "double", "string")
    assert (types["policy.fetch_cap"], types["policy.gather_ctas"], types["point_key"]) == ("double", "int64", "string")
    assert table["policy.gather_ctas"].to_pylist() == [16, None]


def test_the_same_rows_make_the_same_bytes(tmp_path: Path) -> None:
    rows = [_row(f"p{i}", recall=i / 7, bound="h2d") for i in range(50)]
    write_table(tmp_path / "a.parquet", rows)
    write_table(tmp_path / "b.parquet", rows)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_a_manifest_that_is_absent_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no manifest\.json"):
        read_manifest(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises(InputError, match=r"manifest\.json"):
            read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps({"state": "finished"}))
    assert read_manifest(tmp_path) == {"state": "finished"}
