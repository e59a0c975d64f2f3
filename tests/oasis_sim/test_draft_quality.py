"""`draft train` and `quality` on the command line: bad input is one line and exit code 2, nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from oasis_sim.cli import main
from oasis_sim.options import assigned
from traces.errors import InputError


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.fixture
def questions(tmp_path: Path) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "1 + 1", "answer": "2"}\n')
    return str(path)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"name": "a", "text": "one two"}\n')
    return str(path)


def test_draft_train_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path, questions: str) -> None:
    train = ("draft", "train", questions, "--model", "none", "-q")
    there = tmp_path / "there.safetensors"
    there.write_bytes(b"")
    assert "exists already" in fails(capsys, *train, "--out", str(there))
    new = str(tmp_path / "new.safetensors")
    assert "unknown key 'epoch'" in fails(capsys, *train, "--out", new, "--set", "epoch=3")
    assert "--set epochs is given twice" in fails(capsys, *train, "--out", new, "--epochs", "2", "--set", "epochs=3")
    assert "epochs: input should be greater than 0" in fails(capsys, *train, "--out", new, "--epochs", "0")
    assert not Path(new).exists()


def test_quality_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path, prompts: str) -> None:
    out = str(tmp_path / "out")
    measure = ("quality", prompts, "--model", "none", "--out", out, "-q")
    assert "no multiple of block size 16" in fails(capsys, *measure, "--budgets", "100")
    assert "predictors: 'guess' is none of" in fails(capsys, *measure, "--predictors", "previous,guess")
    assert "policy.fetch_cap" in fails(capsys, *measure, "--fetch-caps", "0.1,2")
    assert "unknown key 'step'" in fails(capsys, *measure, "--set", "step=3")
    assert "is a file" in fails(capsys, "quality", prompts, "--model", "none", "--out", prompts)
    assert not Path(out).exists()


def test_assignments() -> None:
    assert assigned(["a=1", "b=x,2"], (), ("b",)) == {"a": 1, "b": ("x", 2)}
    with pytest.raises(InputError, match="expected KEY=VALUE"):
        assigned(["a"], ())
    with pytest.raises(InputError, match="a is given twice"):
        assigned(["a=1", "a=2"], ())
