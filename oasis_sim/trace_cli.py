"""The verbs of `oasis-sim trace`, as `oasis_sim.cli` declares the others."""

from __future__ import annotations

from typing import Annotated

import typer

from oasis_sim.arguments import Json, Quiet, file_name, out_option

trace_app = typer.Typer(help="Look at, check, pack or synthesise an attention trace.", no_args_is_help=True)


@trace_app.command("info")
def trace_info(trace: Annotated[str, typer.Argument(help="Catalog name or path.")], json: Json = False) -> int:
    """Print what a trace holds: model, requests, steps, block sizes, rankings, where it came from."""
    from oasis_sim.verbs.trace import info

    return info(trace, json)


@trace_app.command("check")
def trace_check(trace: Annotated[str, typer.Argument(help="Catalog name or path.")], json: Json = False) -> int:
    """Check version, shapes, ranges, sums and content hash; the error names file, array and index."""
    from oasis_sim.verbs.trace import check

    return check(trace, json)


@trace_app.command("pack")
def trace_pack(
    trace: Annotated[str, typer.Argument(help="Folder that the recorder wrote; with --compact any trace.")],
    out: Annotated[str, typer.Argument(metavar="TRACE.zip", help="Zip file to write.", callback=file_name)],
    compact: Annotated[
        bool, typer.Option("--compact", help="Blocks of 16, eight layers, the best 64, drafts as nested sets.")
    ] = False,
    layers: Annotated[str | None, typer.Option("--layers", metavar="L,L", help="Of a compact copy.")] = None,
    draft_sets: Annotated[
        str | None,
        typer.Option("--draft-sets", metavar="K,K", help="Exact besides all; 0: none. Default: a quarter and half."),
    ] = None,
    max_budget: Annotated[
        int | None, typer.Option("--max-budget", metavar="TOKENS", help="Of a compact copy. Default: 1,024.")
    ] = None,
    keep: Annotated[str | None, typer.Option("--keep", metavar="X,X", help="Also in it: mean, prev_layer.")] = None,
    json: Json = False,
) -> int:
    """Pack a recorded folder into one zip that readers open directly, or make a compact copy to ship."""
    from oasis_sim.verbs.trace import pack

    return pack(trace, out, compact, layers, draft_sets, max_budget, keep, json)


@trace_app.command("overlap")
def trace_overlap(
    traces: Annotated[list[str], typer.Argument(metavar="TRACE...", help="Catalog names or paths.")],
    out: Annotated[str, out_option("FOLDER", "For tables (parquet) and pictures.")],
    budgets: Annotated[
        str | None, typer.Option("--budgets", metavar="TOKENS,...", help="K·P of the table. Default: 256,512,1024.")
    ] = None,
    detail_budget: Annotated[
        int, typer.Option("--detail-budget", metavar="TOKENS", help="Of misses, fetch caps and most pictures.")
    ] = 512,
    top_blocks: Annotated[
        int, typer.Option("--top-blocks", metavar="K", help="Rows for so many blocks besides; 0: none.")
    ] = 20,
    block_sizes: Annotated[
        str | None, typer.Option("--block-sizes", metavar="P,P", help="Default: all that are recorded.")
    ] = None,
    max_distance: Annotated[int, typer.Option("--max-distance", metavar="K", help="Steps ahead.")] = 4,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Of random blocks under fetch caps.")] = 0,
    pictures: Annotated[bool, typer.Option("--pictures/--no-pictures")] = True,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Compare drafts, earlier queries and chance: overlap and recall per layer and KV head, misses, fetch caps."""
    from oasis_sim.verbs.overlap import overlap

    return overlap(
        traces,
        out,
        budgets=budgets,
        detail_budget=detail_budget,
        top_blocks=top_blocks,
        block_sizes=block_sizes,
        max_distance=max_distance,
        seed=seed,
        pictures=pictures,
        as_json=json,
        quiet=quiet,
    )


@trace_app.command("synth")
def trace_synth(
    source: Annotated[
        str, typer.Option("--from", metavar="TRACE_OR_RECIPE", help="Trace, statistics YAML, or qwen3-8b-published.")
    ],
    out: Annotated[str, out_option("FOLDER", "New folder for the trace.")],
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Geometry to generate. Default: the source's.")
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", metavar="TOKENS", help="KV length at the first step, to 1,048,576.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", help="Decode steps. Default: 128.")] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N")] = 0,
    group: Annotated[str | None, typer.Option("--group", metavar="NAME", help="Request of the source trace.")] = None,
    block_size: Annotated[int, typer.Option("--block-size", metavar="TOKENS", help="Of the source trace.")] = 16,
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="L,L", help="Layers generated. Default: all.")
    ] = None,
    budget: Annotated[
        int | None, typer.Option("--max-budget", metavar="TOKENS", help="Largest budget the trace can replay.")
    ] = None,
    churn: Annotated[
        float | None,
        typer.Option("--churn", metavar="SHARE", help="A recipe's open input: change of the set per step."),
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option("--acceptance", metavar="SHARE,...", help="Right guesses by distance, if not the source's."),
    ] = None,
    save: Annotated[
        str | None, typer.Option("--save-statistics", metavar="FILE.yaml", help="Write what was measured, too.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Make a trace of a geometry and context that nobody recorded, and print what it reached beside its targets."""
    from oasis_sim.verbs.synth import synth

    return synth(
        source,
        out,
        model=model,
        context=context,
        steps=steps,
        seed=seed,
        group=group,
        block_size=block_size,
        layers=layers,
        budget=budget,
        churn=churn,
        acceptance=acceptance,
        save=save,
        as_json=json,
        quiet=quiet,
    )
