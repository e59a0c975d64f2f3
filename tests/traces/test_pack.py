"""Packing is deterministic and all or nothing; shipped traces are found by name."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from traces.catalog import resolve, shipped_traces
from traces.errors import InputError, TraceError
from traces.pack import pack
from traces.reader import open_trace


def test_equal_folders_make_equal_zips(trace_folder: Path, tmp_path: Path) -> None:
    first = pack(trace_folder, tmp_path / "a.zip")
    second = pack(trace_folder, tmp_path / "b.zip")
    assert first.read_bytes() == second.read_bytes()
    for entry in zipfile.ZipFile(first).infolist():
        json = entry.filename.endswith(".json")
        assert entry.compress_type == (zipfile.ZIP_DEFLATED if json else zipfile.ZIP_STORED)


def test_existing_target_stays(trace_folder: Path) -> None:
    target = pack(trace_folder)
    target.write_text("precious")
    with pytest.raises(InputError, match="exists already"):
        pack(trace_folder)
    assert target.read_text() == "precious"
    pack(trace_folder, overwrite=True)
    open_trace(target)


def test_failure_leaves_nothing_behind(trace_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(InputError, match="No space left on device"):
        pack(trace_folder, tmp_path / "out.zip")
    assert {path.name for path in tmp_path.iterdir()} == {trace_folder.name}


def test_only_traces_are_packed(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is not a folder"):
        pack(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match=r"zarr\.json: is missing"):
        pack(tmp_path / "empty")


def test_names_resolve_to_shipped_traces(trace_folder: Path) -> None:
    for name, path in shipped_traces().items():
        assert resolve(name) == str(path)
    assert resolve(trace_folder) == str(trace_folder)
    assert resolve("s3://bucket/trace.zarr.zip") == "s3://bucket/trace.zarr.zip"


def test_misspelt_name_gets_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2-135m-reasoning.zarr.zip").touch()
    (tmp_path / "gemma-long.zarr.zip").touch()
    monkeypatch.setattr("traces.catalog._FOLDER", tmp_path)
    with pytest.raises(InputError, match=r"'smolm2-reasoning' is neither .* nearest: smollm2-135m-reasoning"):
        resolve("smolm2-reasoning")
