"""What is written in one go appears whole or not at all, and a killed program's remains go with the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from traces.check import check_trace
from traces.errors import InputError
from traces.staging import staged

REPOSITORY = Path(__file__).parents[2]
SYNTH = """
import os, signal, sys
from pathlib import Path
from traces.synth.calibrate import fit_heads
from traces.synth.recipes import load_recipe, recipe_statistics
from traces.synth.synthesise import synthesise
statistics, out = recipe_statistics(load_recipe("qwen3-8b-published")), Path(sys.argv[1])
def made(killed_at):
    def progress(done, total):
        if done == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
    synthesise(statistics, statistics.model, 2048, 70, 0, out, layers=(0,), progress=progress)
fit_heads(statistics, [0])  # once for both processes: most of the time
killed = os.fork()
if not killed:
    made(66)
assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == -signal.SIGKILL
print(*(path.name for path in out.parent.iterdir()), sep="\\n")
made(-1)
"""
PACK = """
import os, signal, sys, zipfile
from pathlib import Path
from traces.compact import pack_compact
from traces.pack import pack
write, entries = zipfile.ZipFile.writestr, []
def counted(*given, **named):
    write(*given, **named)
    entries.append(given)
    if len(entries) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
zipfile.ZipFile.writestr = counted
if sys.argv[4] == "compact":
    pack_compact(sys.argv[3], Path(sys.argv[1]), block_size_tokens=4, max_ranked_blocks=4, draft_sets=(), layers=(0,))
else:
    pack(Path(sys.argv[3]), Path(sys.argv[1]))
"""


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, env=environment, timeout=120, check=False, stdout=subprocess.PIPE, text=True)


def test_a_killed_synthesis_leaves_nothing_in_its_place_and_can_be_repeated(tmp_path: Path) -> None:
    out = tmp_path / "made.zarr"
    done = run(SYNTH, out)
    assert done.returncode == 0
    (left,) = done.stdout.splitlines()
    assert left.startswith(".made.zarr.unfinished-")
    assert [path.name for path in tmp_path.iterdir()] == ["made.zarr"]
    check_trace(out)


@pytest.mark.parametrize("kind", ["plain", "compact"])
def test_a_killed_pack_leaves_no_zip_and_can_be_repeated(trace_folder: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "to" / "made.zip"
    out.parent.mkdir()
    assert run(PACK, out, 5, trace_folder, kind).returncode == -signal.SIGKILL
    assert not out.exists()
    assert run(PACK, out, -1, trace_folder, kind).returncode == 0
    assert list(out.parent.iterdir()) == [out]
    check_trace(out)


def test_what_another_program_is_writing_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with staged(target) as first:
        first.write_text("first")
        with staged(target) as second:
            second.write_text("second")
        assert target.read_text() == "second"
        assert first.read_text() == "first"
    assert target.read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, InputError])
def test_a_fault_leaves_neither_remains_nor_new_parents(tmp_path: Path, error: type[BaseException]) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise error

    with pytest.raises(error), staged(tmp_path / "new" / "er" / "made") as path:
        fail(path)
    assert not list(tmp_path.iterdir())


def test_parents_are_made_and_modes_are_the_users(tmp_path: Path) -> None:
    target = tmp_path / "new" / "made"
    with staged(target) as path:
        path.write_text("whole")
    (tmp_path / "own").write_text("")
    assert target.read_text() == "whole"
    assert target.stat().st_mode == (tmp_path / "own").stat().st_mode


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match=r"file/made: cannot be created: File exists"),
        staged(tmp_path / "file" / "made"),
    ):
        pass


def test_a_full_disk_names_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zarr

    from traces.synth.recipes import load_recipe, recipe_statistics
    from traces.synth.synthesise import synthesise

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zarr.Array, "__setitem__", full)
    statistics = recipe_statistics(load_recipe("qwen3-8b-published"))
    with pytest.raises(InputError, match=r"/made\.zarr/synthesised/.*: No space left on device; nothing is kept"):
        synthesise(statistics, statistics.model, 2048, 8, 0, tmp_path / "made.zarr", layers=(0,))
    assert not list(tmp_path.iterdir())
