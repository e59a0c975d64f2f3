"""Flags and `--set` become dotted keys of the experiment, each with the list of its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oasis_sim.flags import FLAG_KEYS
from traces.errors import InputError

Settings = dict[str, list[Any]]


def command_line_settings(flags: Mapping[str, Sequence[str]], assignments: Sequence[str]) -> Settings:
    """Values of each key that flags and `--set KEY=VALUE[,VALUE...]` give.

    Raises InputError for a malformed assignment, an empty value and a key given twice.
    """
    settings: Settings = {}
    givers: dict[str, str] = {}
    for flag, texts in flags.items():
        for text in texts:
            _add(settings, givers, FLAG_KEYS[flag], flag, text)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise InputError(f"--set {assignment}: expected KEY=VALUE, e.g. --set policy.transport=ce-batched")
        _add(settings, givers, key.strip(), f"--set {key.strip()}", text)
    return settings


def _add(settings: Settings, givers: dict[str, str], key: str, giver: str, text: str) -> None:
    if key in settings:
        also = givers[key] if givers[key] != giver else "twice"
        raise InputError(f"{key} is given by {giver} and by {also}" if also != "twice" else f"{giver} is given twice")
    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        raise InputError(f"{giver}: empty value in {text!r}")
    settings[key], givers[key] = [parse_value(part) for part in parts], giver


def parse_value(text: str) -> Any:
    """A scalar as YAML would read it, except that `1e-3` is a number."""
    words = {"null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def flatten(tree: Mapping[str, Any], where: str) -> Settings:
    """Dotted keys of a YAML mapping, each with the list of its values (`key: [a, b]` sweeps).

    `where` names the file in errors. Raises InputError for a key that is not text, an empty list, a list of lists
    and a key given both nested and dotted.
    """
    settings: Settings = {}
    _flatten(tree, "", where, settings)
    return settings


MAX_DEPTH = 1
"""A key is `section.key` at most."""
SECTIONS = ("mapping", "policy", "workload", "serving", "placement", "engine", "objective")
"""A section that is there without keys says nothing."""


def _flatten(tree: Mapping[Any, Any], prefix: str, where: str, settings: Settings) -> None:
    for name, value in tree.items():
        if not isinstance(name, str):
            raise InputError(f"{where}: key {name!r} is not text")
        key = prefix + name
        if key.count(".") > MAX_DEPTH:
            raise InputError(f"{where}: key {key} is nested too deeply; an experiment has sections of plain keys")
        if value is None and not prefix and name in SECTIONS:
            continue
        if isinstance(value, Mapping):
            _flatten(value, f"{key}.", where, settings)
            continue
        if key in settings:
            raise InputError(f"{where}: key {key} is given twice, nested and dotted")
        values = value if isinstance(value, list) else [value]
        if not values:
            raise InputError(f"{where}: key {key} has an empty list")
        if any(isinstance(item, list | Mapping) for item in values):
            raise InputError(f"{where}: key {key} has a list inside its list; a swept key takes plain values")
        settings[key] = values
