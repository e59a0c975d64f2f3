"""`python -m` of the harness and the tables: what is missing or wrong is one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from traces import one_line

REPOSITORY = Path(__file__).parents[2]
ENTRY_POINTS = [
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    for path in sorted((REPOSITORY / "realhw").rglob("*.py"))
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
]
WITHOUT_TORCH = ("realhw.recorded_rankings",)


def _module(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, timeout=120,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("module", ENTRY_POINTS)
def test_without_torch_one_line_names_the_extra(module: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')\n")
    done = _module(tmp_path, module, "--help")
    if module in WITHOUT_TORCH:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.stderr == "error: this module needs torch: pip install '.[gpu]' in a clone\n"
        assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["realhw.recorded_rankings", "nonesuch", "--out", "new"], "error: trace 'nonesuch' is neither a shipped"),
        (["analysis.overlap_tables", "absent"], "error: absent/overlap.parquet: not readable as parquet"),
        (["simulator.prefix_reuse", "absent"], "error: absent: cannot be read: No such file"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = _module(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("error", [ValueError("a fault"), ModuleNotFoundError("no module", name="realhw.nonesuch")])
def test_a_fault_of_ours_keeps_its_traceback(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    one_line._end(type(error), error, None)
    assert str(error) in capsys.readouterr().err
