"""Every fault in a trace is one TraceError line that names file, array and (where there is one) index."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from traces.arrays import read_array
from traces.check import check_trace
from traces.errors import OasisError, TraceError
from traces.layout import ArrayLayout
from traces.pack import pack
from traces.reader import FileGroup, open_trace
from traces.store import open_store

Edit = Callable[[Path], None]


def rewrite(name: str, change: Callable[[np.ndarray], None], chunk: str | None = None) -> Edit:
    """Change the first chunk of array `name` in place, compressed as before."""

    def edit(folder: Path) -> None:
        (path,) = (folder / "reasoning" / name / "c").glob(chunk or "0*") if chunk else [first_chunk(folder, name)]
        meta = json.loads((folder / "reasoning" / name / "zarr.json").read_text())
        shape = meta["chunk_grid"]["configuration"]["chunk_shape"]
        dtype = np.dtype(meta["data_type"])
        size = int(np.prod(shape)) * dtype.itemsize
        raw = pa.decompress(path.read_bytes(), decompressed_size=size, codec="zstd", asbytes=True)
        array = np.frombuffer(raw, dtype).reshape(shape).copy()
        change(array)
        path.write_bytes(pa.compress(array.tobytes(), codec="zstd", asbytes=True))

    return edit


def first_chunk(folder: Path, name: str) -> Path:
    return min(path for path in (folder / "reasoning" / name / "c").rglob("*") if path.is_file())


def put(index: tuple[int, ...], value: Any) -> Callable[[np.ndarray], None]:
    def change(array: np.ndarray) -> None:
        array[index] = value

    return change


def edit_json(key: str, change: Callable[[dict[str, Any]], None]) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / key
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))

    return edit


def group_attribute(name: str, value: Any) -> Edit:
    return edit_json("reasoning/zarr.json", lambda v: v["attributes"]["group"].__setitem__(name, value))


def trace_attribute(name: str, value: Any) -> Edit:
    return edit_json("zarr.json", lambda v: v["attributes"]["trace"].__setitem__(name, value))


def meta(array: str, name: str, value: Any) -> Edit:
    return edit_json(f"reasoning/{array}/zarr.json", lambda v: v.__setitem__(name, value))


def replace_chunk(array: str, data: bytes) -> Edit:
    return lambda folder: first_chunk(folder, array).write_bytes(data) and None


def delete(key: str) -> Edit:
    return lambda folder: (folder / key).unlink()


def decoded(change: Callable[[np.ndarray], None]) -> Callable[[np.ndarray], None]:
    """Apply `change` to an array that is stored as differences between steps."""

    def differences(array: np.ndarray) -> None:
        values = np.add.accumulate(array, axis=0, dtype=np.uint8)
        change(values)
        array[...] = np.diff(values, axis=0, prepend=np.uint8(0))

    return differences


def set_bit(row: int, block: int) -> Callable[[np.ndarray], None]:
    def change(array: np.ndarray) -> None:
        array[row, 0, 0, block // 8] ^= 1 << (block % 8)

    return change


BOMB = pa.compress(bytes(1 << 26), codec="zstd", asbytes=True)
LIAR = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 60) + b"\x01\x00\x00"
"""A zstd frame whose header claims an exbibyte."""

FAULTS: dict[str, tuple[Edit, str]] = {
    "version": (trace_attribute("format_version", 2), "format version 2; this oasis-sim reads version 1"),
    "unknown attribute": (trace_attribute("surprise", 1), "zarr.json: attribute surprise"),
    "no layers": (trace_attribute("model", {"name": "x"}), "zarr.json: attribute model.num_layers"),
    "layer beyond the model": (
        edit_json("zarr.json", lambda v: v["attributes"]["trace"]["model"].__setitem__("num_layers", 2)),
        "reasoning: block size 4 lists layer 2 of 2",
    ),
    "not json": (lambda f: (f / "reasoning/zarr.json").write_text("{") and None, "reasoning/zarr.json: is not JSON"),
    "deep json": (
        lambda f: (f / "reasoning/zarr.json").write_text("[" * 200000) and None,
        "reasoning/zarr.json: is not JSON",
    ),
    "foreign zarr": (edit_json("zarr.json", lambda v: v.__setitem__("attributes", {})), "is this an oasis-sim trace"),
    "no root": (delete("zarr.json"), "zarr.json: is missing"),
    "steps beyond the plan": (group_attribute("steps_written", 71), "steps_written 71 exceeds steps_planned 70"),
    "negative steps": (group_attribute("steps_written", -1), "attribute steps_written"),
    "absurd plan": (group_attribute("context_tokens", 2**31 - 1), "kv_len: |absurd"),
    "other context": (group_attribute("context_tokens", 96), r"kv_len\[0\]: does not grow by one"),
    "unknown ranking": (
        edit_json(
            "reasoning/zarr.json",
            lambda v: v["attributes"]["group"]["blocks"]["4"].__setitem__("rankings", ["true", "../../evil"]),
        ),
        "ranking '../../evil' is not one of",
    ),
    "missing array": (delete("reasoning/p4/true/levels/zarr.json"), "p4/true/levels/zarr.json: is missing"),
    "missing chunk": (
        lambda f: first_chunk(f, "p4/draft1/members").unlink(),
        r"reasoning/p4/draft1/members\[0\]: chunk .* is missing",
    ),
    "shape": (meta("p4/block_mass", "shape", [70, 2, 2, 12]), "p4/block_mass: shape is"),
    "few rows": (meta("tokens", "shape", [20]), "reasoning/tokens: has 20 rows, steps_written is 70"),
    "dtype": (meta("tokens", "data_type", "int64"), "tokens: data_type is 'int64', expected 'int32'"),
    "codec": (
        meta("tokens", "codecs", [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "pickle"}]),
        r"tokens: codecs are \['bytes', 'pickle'\]",
    ),
    "codecs of another kind": (meta("tokens", "codecs", "zstd"), "tokens: codecs are"),
    "byte order": (
        meta("tokens", "codecs", [{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "zstd"}]),
        "tokens: byte order is 'big'",
    ),
    "garbage chunk": (replace_chunk("p4/true/levels", b"garbage"), r"p4/true/levels\[0\]: chunk .* is damaged"),
    "bomb": (replace_chunk("p4/true/levels", BOMB), r"p4/true/levels\[0\]: chunk .* (is damaged|holds)"),
    "lying frame": (replace_chunk("p4/true/levels", LIAR), r"p4/true/levels\[0\]: chunk .* (is damaged|holds)"),
    "short chunk": (
        replace_chunk("p4/true/levels", pa.compress(b"ab", codec="zstd", asbytes=True)),
        r"p4/true/levels\[0\]: chunk .* (is damaged|holds)",
    ),
    "kv length": (rewrite("kv_len", put((3,), 200)), r"reasoning/kv_len\[3\]: does not grow by one"),
    "token": (rewrite("tokens", put((5,), -7)), r"reasoning/tokens\[5\]: negative token"),
    "acceptance": (
        rewrite("draft1/accepted", put((4,), 0)),
        r"draft1/accepted\[4\]: does not say whether the guess was right",
    ),
    "extra member": (
        rewrite("p4/true/members", lambda a: a[2, 1, 0].fill(255)),
        r"p4/true/members\[2, 1, 0\]: more members than max_ranked_blocks",
    ),
    "member beyond the draft's prefix": (
        rewrite("p4/draft2/members", lambda a: (set_bit(2, 24)(a), drop_one(a))),
        r"p4/draft2",
    ),
    "draft where there is none": (
        rewrite("p4/draft2/members", set_bit(1, 3)),
        r"p4/draft2\[1, 0, 0, 0\]: the first 2 rows have no draft",
    ),
    "level without a member": (
        rewrite("p4/draft2/levels", put((0, 1, 1, 0), 9)),
        r"p4/draft2/levels\[0, 1, 1, 0\]: level without a member",
    ),
    "rest": (rewrite("p4/true/rest", put((6, 1, 0), 0.999)), r"p4/true/rest\[6, 1, 0\]: mass of the ranked"),
    "rest not finite": (rewrite("p8/true/rest", put((6, 0, 1), np.nan)), r"p8/true/rest\[6, 0, 1\]: is not finite"),
    "rest above one": (rewrite("p5/true/rest", put((7, 0, 1), 1.5)), r"p5/true/rest\[7, 0, 1\]: is outside 0"),
    "mass beyond the end": (
        rewrite("p4/block_mass", decoded(put((0, 0, 0, 30), 200))),
        r"p4/block_mass\[0, 0, 0, 30\]: mass on a block that did not exist",
    ),
    "no mass": (
        rewrite("p4/block_mass", decoded(put((8, 0, 0), 0))),
        r"p4/block_mass\[8, 0, 0\]: a row's largest level",
    ),
    "a level": (rewrite("p8/true/levels", lambda a: np.subtract(a, a > 0, out=a)), "content hash is"),
    "a mass": (
        rewrite("p4/block_mass", decoded(lambda a: np.subtract(a, (a > 1) & (a < 100), out=a, casting="unsafe"))),
        "content hash is",
    ),
    "a token": (rewrite("tokens", put((0,), 99)), "tokens|accepted|content hash is"),
    "hash": (group_attribute("content_hash", "0" * 64), "reasoning/zarr.json: content hash is 0000"),
}


def drop_one(array: np.ndarray) -> None:
    """Flip one member of row 2, so that the count stays within M."""
    row = array[2, 0, 0]
    row[0] ^= 1


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named(trace_folder: Path, fault: str) -> None:
    edit, message = FAULTS[fault]
    check_trace(trace_folder)
    edit(trace_folder)
    with pytest.raises(OasisError, match=message) as caught:
        check_trace(trace_folder)
    text = str(caught.value)
    assert text.startswith(str(trace_folder))
    assert "\n" not in text


@pytest.mark.parametrize("fault", ["version", "garbage chunk", "bomb", "rest", "codec"])
def test_fault_is_named_in_a_zip(trace_folder: Path, tmp_path: Path, fault: str) -> None:
    edit, message = FAULTS[fault]
    zipped = pack(trace_folder)
    edit(trace_folder)
    with zipfile.ZipFile(zipped, "w") as archive:
        for path in sorted(p for p in trace_folder.rglob("*") if p.is_file()):
            archive.write(path, path.relative_to(trace_folder))
    with pytest.raises(TraceError, match=message):
        check_trace(zipped)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_truncated_zip(trace_folder: Path, share: float) -> None:
    zipped = pack(trace_folder)
    data = zipped.read_bytes()
    zipped.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(TraceError, match="is not a readable zip") as caught:
        check_trace(zipped)
    assert "\n" not in str(caught.value)


def test_flipped_bytes_in_a_zip_never_pass_and_never_crash(trace_folder: Path) -> None:
    zipped = pack(trace_folder)
    data = zipped.read_bytes()
    good = open_trace(zipped).content_hash
    rng = np.random.default_rng(0)
    outcomes = []
    for position in rng.integers(0, len(data), size=60):
        broken = bytearray(data)
        broken[position] ^= 0xFF
        zipped.write_bytes(bytes(broken))
        try:
            outcomes.append(str(check_trace(zipped)["content_hash"]))
        except TraceError as error:
            outcomes.append(f"error {error}")
    assert all(outcome == good or (outcome.startswith("error") and "\n" not in outcome) for outcome in outcomes)
    assert sum(outcome != good for outcome in outcomes) > 30


def test_zip_with_deflated_bomb_or_twins_is_refused(trace_folder: Path, tmp_path: Path) -> None:
    key = "reasoning/tokens/c/0"
    twin = tmp_path / "twin.zip"
    with zipfile.ZipFile(pack(trace_folder)) as source, zipfile.ZipFile(twin, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, bytes(1 << 26) if name == key else source.read(name))
    with pytest.raises(TraceError, match=r"reasoning/tokens/c/0: has 67108864 bytes, expected at most"):
        check_trace(twin)
    with zipfile.ZipFile(twin, "a") as target, pytest.warns(UserWarning, match="Duplicate"):
        target.writestr("zarr.json", "{}")
    with pytest.raises(TraceError, match=r"zarr\.json: occurs twice"):
        open_trace(twin)


def test_entry_names_outside_the_trace_are_never_touched(trace_folder: Path, tmp_path: Path) -> None:
    zipped = pack(trace_folder)
    with zipfile.ZipFile(zipped, "a") as archive:
        archive.writestr("../escaped.txt", "x")
    with pytest.raises(TraceError, match=r"\.\./zarr\.json: is missing"):
        open_trace(zipped)
    assert not list(tmp_path.parent.glob("escaped.txt"))


@pytest.mark.parametrize(
    ("location", "message"),
    [("nowhere", "no such file or folder"), ("file:///nowhere/t.zip", "cannot be opened"), ("what://x/t", "what")],
)
def test_missing_places(location: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        open_trace(location)


def test_text_file_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.zip"
    path.write_text("hello")
    with pytest.raises(TraceError, match="is not a readable zip"):
        open_trace(path)


def test_huge_chunks_are_refused_before_they_are_read(trace_folder: Path) -> None:
    store = open_store(trace_folder)
    layout = ArrayLayout("uint8", (1, 1 << 10, 1 << 20))
    path = trace_folder / "reasoning/huge/zarr.json"
    path.parent.mkdir()
    source = json.loads((trace_folder / "reasoning/tokens/zarr.json").read_text())
    source |= {"shape": [64, *layout.row], "data_type": "uint8"}
    source["chunk_grid"]["configuration"]["chunk_shape"] = [64, *layout.chunk_row]
    path.write_text(json.dumps(source))
    with pytest.raises(TraceError, match="reasoning/huge: a chunk of"):
        read_array(store, "reasoning/huge", layout, 64)


def test_damage_shows_up_when_the_array_is_used_not_before(trace_folder: Path) -> None:
    rewrite("p8/true/members", lambda a: a[2, 1, 0].fill(255))(trace_folder)
    group = open_trace(trace_folder).group("reasoning")
    assert isinstance(group, FileGroup)
    group.ranking("true", 4)
    with pytest.raises(TraceError, match=r"p8/true/members\[2, 1, 0\]"):
        group.ranking("true", 8)
