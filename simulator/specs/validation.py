"""One clear line for data that does not fit a spec: where, the dotted key, the problem, the nearest valid names."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import ValidationError

from simulator.specs.base import Spec
from traces.errors import InputError

SpecT = TypeVar("SpecT", bound=Spec)


def validated(kind: type[SpecT], data: Any, where: str = "", key_prefix: str = "") -> SpecT:
    """`data` as a `kind`. Raises InputError with the first fault: `where`, dotted key, problem and value.

    `key_prefix`: what the keys of `data` are called in front (`policy` makes `policy.fetch_cap`).
    """
    try:
        return kind.model_validate(data)
    except ValidationError as e:
        raise InputError(f"{where}: " * bool(where) + first_fault(kind, e, key_prefix)) from None


def first_fault(kind: type[Spec], error: ValidationError, key_prefix: str = "") -> str:
    """The first fault of a pydantic error in one line; an unknown key names the nearest valid ones."""
    fault = error.errors(include_url=False)[0]
    above = f"{key_prefix}." if key_prefix else ""
    key = (above + ".".join(str(part) for part in fault["loc"])).rstrip(".")
    if fault["type"] == "extra_forbidden":
        prefix = above + "".join(f"{part}." for part in fault["loc"][:-1])
        siblings = _keys_at(kind, fault["loc"][:-1])
        return f"unknown key {key!r}: {suggest(key, (prefix + name for name in siblings))}"
    problem = " ".join(fault["msg"].removeprefix("Value error, ").split())
    problem = problem[:1].lower() + problem[1:] if problem[:2].istitle() else problem
    if fault["type"] == "missing":
        return f"{key}: required key is missing"
    if not key or fault["type"] == "value_error":
        return f"{key}: {problem}" if key else problem
    return f"{key}: {problem}, got {_short(fault['input'])}"


def unknown_name(kind: str, name: str, names: Iterable[str], otherwise: str = "") -> InputError:
    """The error for a name that nothing has; `otherwise` is what else would have been taken."""
    return InputError(f"unknown {kind} {name!r}: {suggest(name, names)}{f' (or {otherwise})' if otherwise else ''}")


def suggest(name: str, names: Iterable[str]) -> str:
    """'did you mean a, b?' for near misses (case apart), else 'one of' all of them."""
    by_folded = {known.casefold(): known for known in names}
    near = difflib.get_close_matches(name.casefold(), by_folded, n=3, cutoff=0.6)
    if not near:
        tail = name.casefold().rsplit(".", 1)[-1]
        near = [folded for folded in by_folded if len(tail) > 2 and tail in folded][:3]
    if near:
        return f"did you mean {', '.join(by_folded[folded] for folded in near)}?"
    return f"one of {', '.join(by_folded.values())}"


def submodel(annotation: Any) -> type[Spec] | None:
    """The Spec inside an annotation (`Spec | None`, `tuple[Spec, ...]`), if any."""
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return annotation
    for inner in typing.get_args(annotation):
        found = submodel(inner)
        if found is not None:
            return found
    return None


def _keys_at(kind: type[Spec], loc: tuple[int | str, ...]) -> tuple[str, ...]:
    for part in loc:
        if isinstance(part, int) or part not in kind.model_fields:
            continue
        inner = submodel(kind.model_fields[part].annotation)
        if inner is not None:
            kind = inner
    return tuple(kind.model_fields)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
