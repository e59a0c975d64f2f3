"""The command line: declares verbs and flags, and imports nothing heavier than the CLI library.

A verb's work, with its imports, is in `oasis_sim.verbs`; a verb returns its exit code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from oasis_sim.arguments import (
    Device,
    Drafter,
    DraftModel,
    Dtype,
    Experiment,
    Given,
    Jobs,
    Json,
    Out,
    Prompts,
    Quiet,
    Set,
    Values,
    out_option,
    takes,
)
from oasis_sim.flags import COMPARE_FLAGS, EXPERIMENT_FLAGS, REPRODUCE_FLAGS
from oasis_sim.interruption import EXIT_INTERRUPTED, exit_code_of_interruption, listening
from oasis_sim.streams import prepare_streams
from oasis_sim.trace_cli import trace_app

app = typer.Typer(
    name="oasis-sim",
    help="Does lookahead sparse prefetch of KV blocks pay for your model, GPU, link and workload?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(trace_app, name="trace")
draft_app = typer.Typer(help="Draft heads that guess the next tokens.", no_args_is_help=True)
app.add_typer(draft_app, name="draft")


@app.command()
@takes(EXPERIMENT_FLAGS)
def run(
    given: Given,
    experiment: Experiment = None,
    set_: Set = None,
    out: Out = None,
    timeline: Annotated[
        int | None, typer.Option("--timeline", metavar="STEPS", help="Also write timeline.json of so many first steps.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Simulate one point and say what binds it. A timeline opens in Perfetto (ui.perfetto.dev) or chrome://tracing."""
    from oasis_sim.verbs.run import run as verb

    return verb(experiment, given, set_ or [], out, json, quiet, timeline)


@app.command()
@takes(EXPERIMENT_FLAGS)
def sweep(
    given: Given,
    experiment: Experiment = None,
    set_: Set = None,
    out: Out = None,
    jobs: Jobs = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Simulate a grid and explain its best point. Any flag takes a comma list.

    Without arguments: the systems on the shipped trace, Qwen3-8B and an H100, over fetch cap, block size, lookahead
    and NUMA placement. Repeating a sweep resumes it.
    """
    from oasis_sim.verbs.sweep import sweep as verb

    return verb(experiment, given, set_ or [], out, json, quiet, jobs)


@app.command()
def record(
    prompts: Prompts,
    model: Annotated[
        str, typer.Option("--model", help="smollm2-135m, gemma3-270m, a .gguf file, a folder or a Hugging Face name.")
    ],
    out: Annotated[str, out_option("FOLDER", "New folder for the trace.")],
    name: Annotated[str | None, typer.Option("--name", help="Name of the trace.")] = None,
    context: Annotated[
        int | None, typer.Option("--context", metavar="TOKENS", help="KV length at the first step; cuts the prompt.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", help="Decode steps recorded.")] = None,
    block_sizes: Annotated[
        str | None, typer.Option("--block-sizes", metavar="P,P", help="Recorded for all layers, with mass.")
    ] = None,
    extra_block_sizes: Annotated[
        str | None, typer.Option("--extra-block-sizes", metavar="P,P", help="Recorded for the extra layers only.")
    ] = None,
    extra_layers: Annotated[str | None, typer.Option("--extra-layers", metavar="L,L")] = None,
    layers: Annotated[
        str | None,
        typer.Option("--layers", metavar="L,L", help="Of --block-sizes. Default: all with full attention."),
    ] = None,
    kv_heads: Annotated[str | None, typer.Option("--kv-heads", metavar="H,H", help="Default: all.")] = None,
    extras: Annotated[
        str | None,
        typer.Option("--with", metavar="X,X", help="mean, prev_layer, query_cos, prefill_mass, prompt_window_mass."),
    ] = None,
    max_budget: Annotated[
        int | None, typer.Option("--max-budget", metavar="TOKENS", help="Largest budget the trace can replay.")
    ] = None,
    draft_distances: Annotated[
        int | None, typer.Option("--draft-distances", metavar="N", help="Draft rows for distances 1 to N.")
    ] = None,
    drafter: Drafter = None,
    draft_model: DraftModel = None,
    sparse_policy: Annotated[
        str | None,
        typer.Option("--sparse-policy", metavar="KEY=VALUE,...", help="Also drafts over this policy's working set."),
    ] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0: greedy.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N")] = None,
    stop_at_eos: Annotated[bool | None, typer.Option("--stop-at-eos/--decode-on")] = None,
    device: Device = None,
    dtype: Dtype = None,
    set_: Annotated[
        Values,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other option of RecordOptions (docs/trace-format.md)."),
    ] = None,
    quiet: Quiet = False,
) -> int:
    """Record an attention trace of a real model.

    Any Hugging Face causal LM decodes the prompts with dense attention; needs torch and transformers.
    """
    from oasis_sim.verbs.record import record as verb

    options = {
        "model": model,
        "name": name,
        "context_tokens": context,
        "steps": steps,
        "block_sizes_tokens": block_sizes,
        "extra_block_sizes_tokens": extra_block_sizes,
        "extra_layers": extra_layers,
        "layers": layers,
        "kv_heads": kv_heads,
        "extras": extras,
        "sparse_policy": sparse_policy,
        "max_budget_tokens": max_budget,
        "draft_distances": draft_distances,
        "drafter": drafter,
        "draft_model": draft_model,
        "temperature": temperature,
        "seed": seed,
        "stop_at_eos": stop_at_eos,
        "device": device,
        "dtype": dtype,
    }
    return verb(prompts, out, options, set_ or [], quiet)


@app.command()
def quality(
    prompts: Prompts,
    model: Annotated[str, typer.Option("--model", help="smollm2-135m, a .gguf file, a folder or a Hugging Face name.")],
    out: Annotated[str, out_option("FOLDER", "Results; finished prompts are not repeated.")],
    context: Annotated[int | None, typer.Option("--context", metavar="TOKENS", help="Cuts longer prompts.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", help="Positions measured per prompt.")] = None,
    fetch_caps: Annotated[str | None, typer.Option("--fetch-caps", metavar="C,C")] = None,
    budgets: Annotated[str | None, typer.Option("--budgets", metavar="TOKENS,TOKENS")] = None,
    block_sizes: Annotated[str | None, typer.Option("--block-sizes", metavar="P,P")] = None,
    predictors: Annotated[
        str | None, typer.Option("--predictors", help="Of: current, previous, draft1 ..., oracle, random.")
    ] = None,
    drafter: Drafter = None,
    draft_model: DraftModel = None,
    device: Device = None,
    dtype: Dtype = None,
    deadline: Annotated[
        float | None, typer.Option("--deadline-s", metavar="S", help="End by then; repeat the command for the rest.")
    ] = None,
    set_: Annotated[
        Values,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other option of realhw.quality_options.QualityOptions."),
    ] = None,
    quiet: Quiet = False,
) -> int:
    """Decode a real model densely and with each policy's working set: KL, perplexity ratio and agreement per policy."""
    from oasis_sim.verbs.quality import quality as verb

    options = {
        "model": model,
        "context_tokens": context,
        "steps": steps,
        "fetch_caps": fetch_caps,
        "budgets_tokens": budgets,
        "block_sizes_tokens": block_sizes,
        "predictors": predictors,
        "drafter": drafter,
        "draft_model": draft_model,
        "device": device,
        "dtype": dtype,
        "deadline_s": deadline,
    }
    return verb(prompts, out, options, set_ or [], quiet)


@app.command()
def calibrate(
    out: Annotated[str | None, out_option("PROFILE.yaml", "Profile to write.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Of the profile. Default: from the device.")] = None,
    base: Annotated[
        str | None, typer.Option("--base", metavar="NAME", help="Catalog profile for what is not measured here.")
    ] = None,
    pinned_gib: Annotated[int, typer.Option("--pinned-gib", metavar="GIB", help="Host memory to pin.")] = 2,
    numa_node: Annotated[int | None, typer.Option("--numa-node", metavar="N", help="Bind CPU and memory.")] = None,
    check: Annotated[
        str | None,
        typer.Option("--check", metavar="TABLE.parquet", help="Compare the cost model with a table instead."),
    ] = None,
    hardware: Annotated[
        str, typer.Option("--hardware", metavar="NAME", help="Whose cost model --check uses.")
    ] = "h100-sxm",
    json: Json = False,
) -> int:
    """Measure this machine's kernels, links and overheads into a hardware profile that run and sweep take by path."""
    from oasis_sim.verbs import calibrate as verb

    if check is not None:
        return verb.check(check, hardware, json)
    return verb.calibrate(out, name, base, pinned_gib, numa_node, json)


@app.command()
def validate(
    out: Annotated[str, out_option("FOLDER", "For points, table and summary.")],
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="CAMPAIGN.jsonl|FOLDER|FILE.yaml",
            help="Measured points; or a sweep's folder or an experiment, some of whose points run on this GPU. "
            "Default: the built-in points.",
        ),
    ] = None,
    hardware: Annotated[
        str, typer.Option("--hardware", metavar="NAME", help="Profile that predicts: calibrate this GPU first.")
    ] = "h200-sxm-calibrated",
    commit: Annotated[str | None, typer.Option("--commit", help="Revision that the points ran at.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit 1 past a threshold, or where any block differs.")
    ] = False,
    max_median: Annotated[float | None, typer.Option("--max-median", help="Of |TPOT error|. Default 0.03.")] = None,
    max_p95: Annotated[float | None, typer.Option("--max-p95", help="Of |TPOT error|. Default 0.08.")] = None,
    points: Annotated[int, typer.Option("--points", metavar="N", help="How many to run of a sweep.")] = 12,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Draws the random ones of them.")] = 0,
    json: Json = False,
) -> int:
    """Compare decode steps that ran on a GPU with the simulator: moved blocks exactly, then time.

    With a campaign's file no GPU is needed. Of a sweep the extremes run, each system's best, and random points.
    """
    from oasis_sim.verbs.validate import validate as verb

    return verb(source, hardware, out, commit, check, max_median, max_p95, json, points, seed)


@app.command()
@takes(COMPARE_FLAGS)
def compare(
    given: Given,
    experiment: Experiment = None,
    set_: Set = None,
    out: Out = None,
    jobs: Jobs = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Set systems side by side at one setting, each at the best of a small grid of its own.

    Any flag takes a comma list of values to choose from; one value holds for all systems (--batch-size 32: the same
    batch for all). Writes a run folder with a picture.
    """
    from oasis_sim.verbs.compare import compare as verb

    return verb(experiment, given, set_ or [], out, json, quiet, jobs)


@app.command()
@takes(REPRODUCE_FLAGS)
def reproduce(
    given: Given,
    experiment: Annotated[
        str | None, typer.Argument(metavar="EXPERIMENT", help="One experiment of the table. Default: all.")
    ] = None,
    set_: Annotated[Values, typer.Option("--set", metavar="KEY=VALUE", help="Any other key of an experiment.")] = None,
    derive: Annotated[
        bool, typer.Option("--derive", help="Solve the derived inputs from their rows again and print both values.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Set every published figure beside the simulated one, with the inputs that nobody published and their effect.

    With another model, GPU, batch, context or key the same rows are simulated there, without a published figure.
    """
    from oasis_sim.verbs.reproduce import run as verb

    return verb(experiment, given, set_ or [], derive, json, quiet)


@app.command()
def plot(
    folder: Annotated[str, typer.Argument(metavar="RUNS/NAME", help="Folder that run or sweep wrote.")],
    out: Annotated[str | None, out_option("FOLDER", "Default: RUNS/NAME/plots.")] = None,
    formats: Annotated[str, typer.Option("--format", metavar="F,F", help="png, svg or pdf.")] = "png",
) -> int:
    """Draw a finished run, and write its report.

    Roofline, latency breakdown, heat map, response lines and Pareto front, as far as the run has points for them.
    """
    from oasis_sim.verbs.plot import plot as verb

    return verb(folder, out, formats)


@app.command()
def catalog(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="models, hardware, systems or traces.")],
    json: Json = False,
) -> int:
    """List models, hardware, systems or traces."""
    from oasis_sim.verbs.catalog import catalog as verb

    return verb(kind, json)


@draft_app.command("train")
def draft_train(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPTS...", help="JSONL files of questions and answers.")],
    model: Annotated[str, typer.Option("--model", help="smollm2-135m, a .gguf file, a folder or a Hugging Face name.")],
    out: Annotated[str, out_option("HEAD.safetensors", "File to write, a JSON beside it.")],
    epochs: Annotated[int | None, typer.Option("--epochs", metavar="N")] = None,
    max_prompts: Annotated[int | None, typer.Option("--max-prompts", metavar="N", help="Of each split.")] = None,
    new_tokens: Annotated[int | None, typer.Option("--new-tokens", metavar="N", help="Generated per prompt.")] = None,
    max_seconds: Annotated[float | None, typer.Option("--max-seconds", metavar="S", help="Of training.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N")] = None,
    device: Device = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of the base: float32, bfloat16 or float16.")] = None,
    set_: Annotated[
        Values, typer.Option("--set", metavar="KEY=VALUE", help="Any other option of realhw.draft_train.TrainOptions.")
    ] = None,
    quiet: Quiet = False,
) -> int:
    """Train an EAGLE-3-style one-layer head and measure its acceptance by distance on held-out prompts."""
    from oasis_sim.verbs.draft import train

    options = {
        "model": model,
        "epochs": epochs,
        "max_prompts": max_prompts,
        "new_tokens": new_tokens,
        "max_seconds": max_seconds,
        "seed": seed,
        "device": device,
        "dtype": dtype,
    }
    return train(prompts, out, options, set_ or [], quiet)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `oasis-sim`: every way to end becomes an exit code and at most one line on stderr."""
    prepare_streams()
    with listening():
        code = _guard(lambda: _call(arguments))
        if code == EXIT_INTERRUPTED:
            code = exit_code_of_interruption()
    sys.exit(code)


def _call(arguments: Sequence[str] | None) -> int:
    from oasis_sim.shadowing import require_own_packages

    try:
        require_own_packages()
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    code = app(args=None if arguments is None else list(arguments), prog_name="oasis-sim", standalone_mode=False)
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def _guard(work: Callable[[], int]) -> int:
    try:
        return work()
    except Exception as error:
        from oasis_sim.output import report_error

        return report_error(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    main()
