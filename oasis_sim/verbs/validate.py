"""`oasis-sim validate`: decode points that ran on a GPU against what the simulator says of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oasis_sim.interruption import points_kept, told_on_interruption
from oasis_sim.output import milliseconds, print_json, share
from traces.errors import CheckFailed, EnvironmentMissing, InputError, refuse_file

if TYPE_CHECKING:
    from realhw.decode_point import Point
    from realhw.picks import Pick

GOALS = {"median_abs_error": 0.03, "p95_abs_error": 0.08}
"""What `--check` demands of |TPOT error| where nothing else is given."""
CAMPAIGN = "campaign.jsonl"


def validate(
    source: str | None, hardware: str, out: str, commit: str | None, check: bool, max_median: float | None,
    max_p95: float | None, as_json: bool, num_points: int = 12, seed: int = 0,
) -> int:  # fmt: skip
    """Compare a campaign's file, or run points on this machine's GPU into `out` first: some of a sweep's folder or of
    an experiment, or the default ones.

    Raises EnvironmentMissing where points must run and there is no GPU or no torch, CheckFailed past a threshold or
    where any block id differs.
    """
    from realhw import validation
    from simulator.catalog import load_hardware

    load_hardware(hardware)  # before points run
    folder = Path(out)
    refuse_file(folder, "--out")
    if num_points < 1:
        raise InputError(f"--points must be at least 1, got {num_points}")
    keys = None
    if source is not None:
        _require_source(Path(source))
    if source is not None and Path(source).suffix == ".jsonl":
        campaign = Path(source)
    else:
        picks = None if source is None else _pick(source, folder, num_points, seed, as_json)
        campaign, keys = _run_points(folder, picks)
    summary = validation.compare(campaign, hardware, folder, commit, _nothing if as_json else _print_point, keys)
    pictures = _draw(folder)
    if as_json:
        print_json({**summary, "pictures": [str(path) for path in pictures]})
    else:
        _print_summary(summary, folder, pictures)
    if check:
        _require(summary, {"median_abs_error": max_median, "p95_abs_error": max_p95})
    return 0


def _require_source(path: Path) -> None:
    """Raises InputError for what is neither a campaign's file, an experiment's nor a sweep's folder."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if path.is_dir() and (path / CAMPAIGN).is_file() and not (path / "manifest.json").exists():
        raise InputError(f"{path}: is a folder of measured points, not of a sweep; pass {path / CAMPAIGN}")
    if path.is_dir() if path.suffix == ".jsonl" else path.is_file() and path.suffix not in (".yaml", ".yml"):
        raise InputError(f"{path}: pass a campaign's .jsonl file, an experiment's .yaml file or a sweep's folder")


def _nothing(_: dict[str, Any]) -> None:
    return None


def _simulated(source: str, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Rows of a finished sweep, or of an experiment that is simulated into `folder`/sweep; and the objective."""
    from oasis_sim.request import many_points
    from oasis_sim.run_points import run_points
    from simulator.executors import num_usable_cores

    if not Path(source).is_dir():
        request = many_points(source, {}, ())
        rows, _, _ = run_points("sweep", request, str(folder / "sweep"), num_usable_cores(), quiet=True)
        return rows, request.maximize
    from analysis.load import load_run

    run = load_run(Path(source))
    rows = [{str(key): value for key, value in row.items()} for row in run.results.to_dict("records")]
    return rows, run.objective


def _pick(source: str, folder: Path, num_points: int, seed: int, quiet: bool) -> list[Pick]:
    from realhw.picks import pick, runnable

    rows, maximize = _simulated(source, folder)
    found, left_out = runnable(rows)
    if not found:
        why = "; ".join(f"{reason} ({count})" for reason, count in left_out.most_common(5))
        raise InputError(f"{source}: none of its {len(rows)} points runs on the harness: {why}")
    picks = pick(found, num_points, maximize, seed)
    if not quiet:
        print(f"{len(picks)} of {len(rows)} points of {source}, seed {seed}; {len(found)} can run here")
        for reason, count in left_out.most_common():
            print(f"  left out {count:>4}: {reason}")
        for one in picks:
            print(f"  {_describe(one.point)}  simulated {milliseconds(one.simulated_tpot_s):>10}  {one.reason}")
    return picks


def _describe(point: Point) -> str:
    return (
        f"{point.system:<18} batch {point.batch_size:>3}  context {point.context_tokens:>6}  "
        f"K {point.num_kept:>4} × {point.block_size_tokens:<3} cap {point.fetch_cap:<5g} k {point.lookahead_k} "
        f"{point.transport}"
    )


def _run_points(folder: Path, picks: Sequence[Pick] | None) -> tuple[Path, list[str] | None]:
    """Run points that the campaign's file in `folder` lacks; returns it and the keys of the picks (null: all)."""
    from dataclasses import asdict

    from realhw.point_list import default_points

    points = default_points() if picks is None else [one.point for one in picks]
    target = folder / CAMPAIGN
    try:
        _require_gpu()
    except EnvironmentMissing as error:
        if picks is None:
            raise
        folder.mkdir(parents=True, exist_ok=True)
        wanted = folder / "picks.jsonl"
        wanted.write_text("".join(json.dumps(asdict(point)) + "\n" for point in points), encoding="utf-8")
        raise EnvironmentMissing(
            f"{error}; the points are in {wanted}: run `python -m realhw.campaign --points {wanted} --out "
            "campaign.jsonl` on a machine with one, then `oasis-sim validate campaign.jsonl`, which needs none"
        ) from error
    from realhw.campaign import Campaign

    runs = Campaign(target, host_gib=8)
    num_done = 0
    with told_on_interruption(lambda: points_kept(num_done, len(points), target)):
        for point in points:
            runs.run(point)
            num_done += 1
    return target, None if picks is None else [point.key() for point in points]


def _require_gpu() -> None:
    try:
        from realhw.device import require_gpu
    except ImportError as error:
        missing = error.name or error
        raise EnvironmentMissing(f"to run points validate needs {missing}: pip install '.[gpu]' in a clone") from error
    require_gpu()


def _draw(folder: Path) -> list[Path]:
    from analysis.validation_plots import draw_all

    return draw_all(folder)


def _print_point(row: dict[str, Any]) -> None:
    print(
        f"{row['system']:<18} batch {row['workload.batch_size']:>3}  context {row['workload.context_tokens']:>6}  "
        f"cap {row['policy.fetch_cap']:<5} measured {milliseconds(row['measured_tpot_s']):>10}  "
        f"predicted {milliseconds(row['predicted_tpot_s']):>10}  {row['error']:+7.1%}"
        + (f"  {row['byte_mismatches']} PLANS DIFFER" if row["byte_mismatches"] else "")
    )


def _print_summary(summary: dict[str, Any], folder: Path, pictures: Sequence[Path]) -> None:
    print(f"\n{summary['num_points']} points of {summary['device']}, profile {summary['profile']}")
    if summary["warning"]:
        print(f"  OTHER DEVICE: {summary['warning']}")
    if summary["torn_lines"]:
        lines = ", ".join(map(str, summary["torn_lines"]))
        print(f"  NOT READ: torn lines of the campaign's file ({lines}); their points are not compared")
    print(
        f"  blocks, slots and victims: {summary['byte_mismatches']} plans differ "
        f"({summary['fetched_blocks_compared']:,} fetched blocks compared)"
    )
    for label, part in (("all points", summary), ("contended", summary["contended"])):
        print(
            f"  |TPOT error| {label:<11} median {share(part['median_abs_error'])}, p95 {share(part['p95_abs_error'])}, "
            f"bias {share(part['bias'])} ({part['num_points']} points)"
        )
    print(
        f"  |error| of a step's median {share(summary['p50_median_abs_error'])}, "
        f"of its 99th percentile {share(summary['p99_median_abs_error'])} (median over points)"
    )
    for name, part in summary["components"].items():
        if "bias_of_tpot" in part:
            print(
                f"  {name:<15} {part['bias_of_tpot']:+7.1%} of TPOT, |error| {share(part['median_abs_error_of_tpot'])} "
                f"({part['num_points']} points with timed parts)"
            )
    tau = summary["kendall_tau"]
    print(
        f"  choosing by prediction costs {share(summary['regret'])}; Kendall tau {'–' if tau is None else f'{tau:.2f}'}"
    )
    print(f"  repeat spread of the measurements {share(summary['repeat_spread'])}")
    names = ["points.jsonl", "points.parquet", "points.md", "summary.json", *(path.name for path in pictures)]
    print(f"written to {folder} ({', '.join(names)})")


def _require(summary: dict[str, Any], given: dict[str, float | None]) -> None:
    failures = []
    if summary["byte_mismatches"]:
        failures.append(f"{summary['byte_mismatches']} plans moved other blocks than replay")
    if summary["torn_lines"]:
        failures.append(f"{len(summary['torn_lines'])} torn lines were not read")
    for name, goal in GOALS.items():
        limit = given[name] if given[name] is not None else goal
        if summary[name] is None or summary[name] > limit:
            failures.append(f"{name} {share(summary[name])} above {limit:.1%}")
    if failures:
        raise CheckFailed("validate --check: " + "; ".join(failures))
