"""A trace whose arrays do not have the content hash that it states is refused, whatever the cache holds."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.oasis_sim.conftest import Oasis

POINT = ("--system", "oasiskv", "--context", "1024", "--budget", "256", "--batch-size", "2", "--json")


@pytest.fixture
def true_folder(tiny_trace: Path, tmp_path: Path) -> Path:
    return extracted(tiny_trace, tmp_path / "true.zarr")


def extracted(trace: Path, folder: Path) -> Path:
    with zipfile.ZipFile(trace) as archive:
        archive.extractall(folder)
    return folder


def mass_chunk(folder: Path) -> Path:
    array = min(folder.glob("*/p*/block_mass"))
    return min(path for path in (array / "c").rglob("*") if path.is_file())


def other_masses(folder: Path) -> None:
    """Well-formed, so that only the hash can tell: what the first step's row holds is given to other blocks."""
    chunk = mass_chunk(folder)
    meta = json.loads(min(folder.glob("*/p*/block_mass/zarr.json")).read_text())
    shape = meta["chunk_grid"]["configuration"]["chunk_shape"]
    raw = pa.decompress(chunk.read_bytes(), decompressed_size=int(np.prod(shape)), codec="zstd", asbytes=True)
    array = np.frombuffer(raw, np.uint8).reshape(shape).copy()
    array[0, ..., :32] = array[0, ..., :32][..., ::-1]
    chunk.write_bytes(pa.compress(array.tobytes(), codec="zstd", asbytes=True))


def truncated(folder: Path) -> None:
    mass_chunk(folder).write_bytes(mass_chunk(folder).read_bytes()[:-20])


def missing(folder: Path) -> None:
    mass_chunk(folder).unlink()


def reversed_bytes(folder: Path) -> None:
    mass_chunk(folder).write_bytes(mass_chunk(folder).read_bytes()[::-1])


def other_acceptance(folder: Path) -> None:
    path = next(folder.glob("*/zarr.json"))
    value = json.loads(path.read_text())
    value["attributes"]["group"]["drafter"]["name"] = "another"
    path.write_text(json.dumps(value))


def assert_refused(oasis: Oasis, trace: str, *verb: str) -> None:
    done = oasis(*verb)
    assert done.code == 2, done.err
    assert done.out == ""
    assert done.err.count("\n") == 1
    assert f"oasis-sim trace check {trace}" in done.err
    assert oasis("trace", "check", trace).code == 2


def test_a_tampered_copy_never_answers_for_the_true_trace(
    oasis: Oasis, true_folder: Path, tiny_trace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OASIS_SIM_CACHE", str(tmp_path / "own-cache"))
    other_masses(extracted(tiny_trace, tmp_path / "copy.zarr"))
    assert_refused(oasis, "copy.zarr", "run", "--trace", "copy.zarr", *POINT, "--out", "a")
    first = oasis("run", "--trace", "true.zarr", *POINT, "--out", "b")
    monkeypatch.setenv("OASIS_SIM_CACHE", str(tmp_path / "empty-cache"))
    fresh = oasis("run", "--trace", "true.zarr", *POINT, "--out", "c")
    assert first.document["recall"] == fresh.document["recall"]


@pytest.mark.parametrize("tamper", [other_masses, truncated, missing, reversed_bytes, other_acceptance])
def test_no_damaged_copy_is_answered_from_the_cache(
    oasis: Oasis, true_folder: Path, tiny_trace: Path, tmp_path: Path, tamper: Callable[[Path], None]
) -> None:
    assert oasis("run", "--trace", "true.zarr", *POINT, "--out", "a").code == 0
    tamper(extracted(tiny_trace, tmp_path / "copy.zarr"))
    assert_refused(oasis, "copy.zarr", "run", "--trace", "copy.zarr", *POINT, "--out", "b")


def test_a_zip_with_a_wrong_checksum_is_not_answered_from_the_cache(
    oasis: Oasis, tiny_trace: Path, tmp_path: Path
) -> None:
    assert oasis("run", "--trace", str(tiny_trace), *POINT, "--out", "a").code == 0
    data = bytearray(tiny_trace.read_bytes())
    with zipfile.ZipFile(tiny_trace) as archive:
        entry = next(item for item in archive.infolist() if "/block_mass/c/" in item.filename)
    data[entry.header_offset + 30 + len(entry.filename) + entry.compress_size // 2] ^= 0xFF
    (tmp_path / "copy.zarr.zip").write_bytes(data)
    assert_refused(oasis, "copy.zarr.zip", "run", "--trace", "copy.zarr.zip", *POINT, "--out", "b")


@pytest.mark.parametrize(
    "verb",
    [
        ("sweep", "--trace", "copy.zarr", *POINT, "--out", "a"),
        ("trace", "overlap", "copy.zarr", "--out", "a"),
        ("trace", "synth", "--from", "copy.zarr", "--context", "2048", "--out", "a"),
        ("trace", "pack", "copy.zarr", "a", "--compact"),
    ],
    ids=lambda verb: "-".join(verb[:2]),
)
def test_every_verb_that_computes_from_a_trace_refuses_it(
    oasis: Oasis, tiny_trace: Path, tmp_path: Path, verb: tuple[str, ...]
) -> None:
    other_masses(extracted(tiny_trace, tmp_path / "copy.zarr"))
    assert_refused(oasis, "copy.zarr", *verb)
    assert not Path("a").exists()
