"""A trace is read in full once per state of its files."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from simulator import verified_trace
from simulator.verified_trace import file_state, open_verified
from traces.catalog import resolve
from traces.errors import TraceError
from traces.verification import require_content

NAME = "smollm2-135m-extras"
Reads = list[str]


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Locations that were read in full, in order."""
    monkeypatch.setenv("OASIS_SIM_CACHE", str(tmp_path / "cache"))
    done: Reads = []

    def counted(location: str) -> None:
        done.append(location)
        require_content(location)

    monkeypatch.setattr(verified_trace, "require_content", counted)
    return done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with zipfile.ZipFile(resolve(NAME)) as archive:
        archive.extractall(tmp_path / "trace.zarr")
    return tmp_path / "trace.zarr"


def test_read_once_and_again_after_a_change(reads: Reads, folder: Path) -> None:
    for location in (resolve(NAME), str(folder)):
        first, again = open_verified(location), open_verified(location)
        assert first.content_hash == again.content_hash
    assert reads == [resolve(NAME), str(folder)]
    os.utime(next(folder.rglob("c/**/0")))
    open_verified(str(folder))
    assert reads[2:] == [str(folder)]


def test_a_change_that_keeps_size_and_time_is_seen(reads: Reads, folder: Path) -> None:
    open_verified(str(folder))
    chunk = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    before, data = chunk.stat(), bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 0xFF
    chunk.write_bytes(data)
    os.utime(chunk, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (chunk.stat().st_size, chunk.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    for _ in range(2):  # a failure is not remembered as a success
        with pytest.raises(TraceError, match=r"trace\.zarr.*oasis-sim trace check"):
            open_verified(str(folder))
    assert len(reads) == 3


def test_without_a_cache_folder_it_is_read_each_time(
    reads: Reads, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OASIS_SIM_CACHE", str(tmp_path / "file" / "cache"))
    open_verified(str(folder))
    open_verified(str(folder))
    assert len(reads) == 2


def test_what_a_url_holds_is_read_each_time(reads: Reads, folder: Path) -> None:
    url = f"file://{folder}"
    assert file_state(url) is None
    open_verified(url)
    open_verified(url)
    assert reads == [url, url]


@pytest.mark.parametrize("change", ["added", "removed", "renamed"])
def test_state_covers_every_file(folder: Path, change: str) -> None:
    before = file_state(str(folder))
    chunk = next(path for path in folder.rglob("0") if path.is_file())
    if change == "added":
        chunk.with_name("99").write_bytes(b"")
    elif change == "removed":
        chunk.unlink()
    else:
        chunk.rename(chunk.with_name("98"))
    assert file_state(str(folder)) != before
