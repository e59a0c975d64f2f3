"""Arguments and options that several verbs take, and how a verb takes the flags of an experiment's keys."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any

import typer

from oasis_sim.flags import Flag

Experiment = Annotated[
    str | None, typer.Argument(metavar="EXPERIMENT.yaml", help="Keys of the experiment; flags override it.")
]
Values = list[str] | None
Set = Annotated[Values, typer.Option("--set", metavar="KEY=VALUE", help="Any other key, e.g. policy.transport=gather.")]


def out_option(metavar: str, help: str) -> Any:
    """`--out`, which must name something: an empty path would be the current folder."""
    return typer.Option("--out", metavar=metavar, help=help, callback=_named)


def _named(path: str | None) -> str | None:
    if path is not None and not path.strip():
        raise typer.BadParameter("the path is empty; give a name, or . for the current folder")
    return path


def file_name(path: str) -> str:
    """An argument that names a file to write; an empty one would be the current folder."""
    if not path.strip():
        raise typer.BadParameter("the path is empty; give the name of a file")
    return path


Out = Annotated[str | None, out_option("FOLDER", "Default: runs/ and a name by content.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else.")]
Jobs = Annotated[int | None, typer.Option("--jobs", "-j", metavar="N", help="Processes. Default: all cores.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
Prompts = Annotated[str, typer.Argument(metavar="PROMPTS", help="JSONL or text file; - for either on stdin.")]
Drafter = Annotated[str | None, typer.Option("--drafter", help="ngram, random, model or eagle3.")]
DraftModel = Annotated[
    str | None, typer.Option("--draft-model", help="Smaller model, or head: smollm2-135m-eagle3, file or folder.")
]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16 or float16.")]

Verb = Callable[..., int]
Given = dict[str, list[str]]
"""Flags of an experiment's keys that were given, by name, with each text that they were given with."""


def takes(flags: Sequence[Flag]) -> Callable[[Verb], Verb]:
    """Let a verb whose first parameter is `given: Given` be called with `flags`, one optional list each.

    A list only so that a flag given twice can be refused instead of silently overridden.
    """

    def with_flags(verb: Verb) -> Verb:
        @wraps(verb)
        def called(**arguments: Any) -> int:
            texts = {flag.name: arguments.pop(flag.parameter) for flag in flags}
            return verb({name: list(given) for name, given in texts.items() if given}, **arguments)

        signature = inspect.signature(verb, eval_str=True)
        declared = [
            inspect.Parameter(
                flag.parameter,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=None,
                annotation=Annotated[Values, typer.Option(flag.name, metavar=flag.metavar, help=flag.help)],
            )
            for flag in flags
        ]
        own = list(signature.parameters.values())[1:]
        called.__signature__ = signature.replace(parameters=[*declared, *own])  # type: ignore[attr-defined]
        return called

    return with_flags
