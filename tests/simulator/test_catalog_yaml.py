"""YAML reader: numbers as YAML 1.2 has them, duplicate keys and syntax errors named by file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.yaml_io import load_yaml, parse_yaml
from traces.errors import InputError


def test_numbers_and_empty_files(tmp_path: Path) -> None:
    assert parse_yaml("{a: 1e9, b: 1e-6, c: -2.5E+3, d: 16, e: 1.5, f: e9}", "x") == {
        "a": 1e9, "b": 1e-6, "c": -2500.0, "d": 16, "e": 1.5, "f": "e9",
    }  # fmt: skip
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing\n", encoding="utf-8")
    assert load_yaml(file) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", r"x\.yaml, line 3: key 'a' given twice \(first on line 1\)"),
        ("a:\n  b: 1\n  b: 1\n", r"x\.yaml, line 3: key 'b' given twice"),
        ("a: [1,\nb: 2\n", r"x\.yaml, line \d"),
        ("a: b: c\n", r"x\.yaml, line 1: mapping values are not allowed"),
        ("a: !!python/object:os.system x\n", r"x\.yaml, line 1: could not determine a constructor"),
        ("a: \x00\n", r"x\.yaml: not valid YAML"),
    ],
)
def test_faults_name_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        load_yaml(file)
    assert "\n" not in str(caught.value)


def test_same_key_in_two_mappings_and_merges_are_fine() -> None:
    assert parse_yaml("base: &b {x: 1}\nmore: {<<: *b, y: 2}\n", "x") == {"base": {"x": 1}, "more": {"x": 1, "y": 2}}


def test_missing_file() -> None:
    with pytest.raises(InputError, match=r"no/such\.yaml: cannot be read: No such file"):
        load_yaml("no/such.yaml")
