"""`--set KEY=VALUE` for verbs whose options are one Spec: keys are its field names."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from oasis_sim.settings import parse_value
from traces.errors import InputError


def assigned(
    assignments: Sequence[str], taken: Collection[str], lists: Collection[str] = (), flag: str = "--set"
) -> dict[str, Any]:
    """Values of assignments to `flag`; those of `lists` hold several, with commas.

    Raises InputError for one that is malformed, given twice or in `taken` (it has a flag or is filled in).
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise InputError(f"{flag} {assignment}: expected KEY=VALUE")
        if name in values or name in taken:
            raise InputError(f"{flag} {name} is given twice")
        values[name] = tuple(parse_value(part) for part in text.split(",")) if name in lists else parse_value(text)
    return values


def whole_numbers(name: str, text: Any) -> tuple[int, ...]:
    """Numbers with commas between them. Raises InputError naming the option."""
    try:
        return tuple(int(part) for part in str(text).split(","))
    except ValueError:
        raise InputError(f"{name}: expected whole numbers with commas between them, got {text!r}") from None
