"""The cache gives back what was stored, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from simulator import cache
from traces.errors import InputError

PARTS = {"kind": "demand", "version": 1, "cap": 0.05}
ARRAYS = {"hit": np.arange(6, dtype=np.int32).reshape(2, 3), "recall": np.array([0.5, 1 / 3])}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def stored_file(folder: Path) -> Path:
    (path,) = (path for path in folder.rglob("*") if path.is_file())
    return path


def test_key_depends_on_content_not_on_order() -> None:
    assert cache.cache_key({"a": 1, "b": [1, 2]}) == cache.cache_key({"b": [1, 2], "a": 1})
    assert cache.cache_key({"a": 1}) != cache.cache_key({"a": 2})
    known = "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"
    assert cache.cache_key({"a": 1}) == known, 'sha256 of {"a":1}: keys hold across versions of Python'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, np.int32(3)])
def test_key_refuses_what_has_no_canonical_form(value) -> None:
    with pytest.raises(InputError, match="cache key"):
        cache.cache_key({"a": value})


def test_arrays_come_back_exactly(folder: Path) -> None:
    assert cache.load_arrays(PARTS) is None
    assert cache.store_arrays(PARTS, ARRAYS, {"slots": 5, "name": "é"})
    loaded = cache.load_arrays(PARTS)
    assert loaded is not None
    arrays, meta = loaded
    assert meta == {"slots": 5, "name": "é"}
    assert arrays.keys() == ARRAYS.keys()
    assert all(
        np.array_equal(arrays[name], ARRAYS[name]) and arrays[name].dtype == ARRAYS[name].dtype for name in arrays
    )
    assert stored_file(folder).name == f"{cache.cache_key(PARTS)}.npz"
    assert cache.load_arrays(PARTS | {"version": 2}) is None


def test_json_comes_back_exactly() -> None:
    value = {"tpot": 0.1, "rows": [1, None, "x"]}
    assert cache.load_json(PARTS) is None
    assert cache.store_json(PARTS, value)
    assert cache.load_json(PARTS) == value


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9, 0.999])
def test_truncated_file_is_as_good_as_none(folder: Path, share: float) -> None:
    cache.store_arrays(PARTS, ARRAYS, {})
    path = stored_file(folder)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert cache.load_arrays(PARTS) is None
    assert cache.store_arrays(PARTS, ARRAYS, {})
    assert cache.load_arrays(PARTS) is not None


def test_flipped_bytes_never_change_a_number(folder: Path) -> None:
    cache.store_arrays(PARTS, ARRAYS, {})
    path = stored_file(folder)
    whole = path.read_bytes()
    num_rejected = 0
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        loaded = cache.load_arrays(PARTS)
        num_rejected += loaded is None
        assert loaded is None or all(np.array_equal(loaded[0][name], ARRAYS[name]) for name in ARRAYS)
    assert num_rejected > 10


def test_file_of_other_parts_is_not_taken(folder: Path) -> None:
    cache.store_arrays(PARTS, ARRAYS, {})
    cache.store_json(PARTS, 3)
    other = PARTS | {"cap": 0.1}
    key = cache.cache_key(other)
    (folder / key[:2]).mkdir(exist_ok=True)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        os.replace(path, folder / key[:2] / f"{key}{path.suffix}")
    assert cache.load_arrays(other) is None
    assert cache.load_json(other) is None


def test_tampered_json_is_not_taken(folder: Path) -> None:
    cache.store_json(PARTS, {"tpot": 0.25})
    path = stored_file(folder)
    path.write_text(path.read_text().replace("0.25", "0.26"))
    assert cache.load_json(PARTS) is None


def test_folder_that_cannot_be_made_is_not_used(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "file" / "cache"))
    assert not cache.store_arrays(PARTS, ARRAYS, {})
    assert cache.load_arrays(PARTS) is None


def test_failed_write_leaves_nothing(folder: Path, monkeypatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", full_disk)
    assert not cache.store_arrays(PARTS, ARRAYS, {})
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_folder_is_named_by_the_environment_or_the_user_cache(folder: Path, monkeypatch) -> None:
    assert cache.cache_folder() == folder
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, "")
    assert cache.cache_folder().name == "oasis-sim"
