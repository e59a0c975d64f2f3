"""`oasis-sim validate`: decode points that ran on a GPU against what the simulator says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oasis_sim.output import milliseconds, print_json, share
from traces.errors import CheckFailed, EnvironmentMissing, InputError

GOALS = {"median_abs_error": 0.03, "p95_abs_error": 0.08}
"""What `--check` demands of |TPOT error| where nothing else is given."""


def validate(
    campaign: str | None, hardware: str, out: str, commit: str | None, check: bool, max_median: float | None,
    max_p95: float | None, as_json: bool,
) -> int:  # fmt: skip
    """Compare a campaign's file, or run the default points on this machine's GPU into `out` first.

    Raises EnvironmentMissing without torch (or, to run points, without a GPU), CheckFailed past a threshold or where
    any block id differs.
    """
    from simulator.catalog import load_hardware

    load_hardware(hardware)  # before torch, whose import takes seconds
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {out}: is no folder")
    try:
        from realhw import predictions
    except ImportError as error:
        missing = error.name or str(error)
        raise EnvironmentMissing(f"validate needs {missing}: pip install 'oasis-sim[gpu]'") from error
    source = Path(campaign) if campaign is not None else _run_points(folder / "campaign.jsonl")
    summary = predictions.compare(source, hardware, folder, commit, (lambda row: None) if as_json else _print_point)
    if as_json:
        print_json(summary)
    else:
        _print_summary(summary, folder)
    if check:
        _require(summary, {"median_abs_error": max_median, "p95_abs_error": max_p95})
    return 0


def _run_points(target: Path) -> Path:
    from realhw.campaign import Campaign
    from realhw.device import require_gpu
    from realhw.point_list import default_points

    require_gpu()
    runs = Campaign(target, host_gib=8)
    for point in default_points():
        runs.run(point)
    return target


def _print_point(row: dict[str, Any]) -> None:
    print(
        f"{row['system']:<18} batch {row['workload.batch_size']:>3}  context {row['workload.context_tokens']:>6}  "
        f"cap {row['policy.fetch_cap']:<5} measured {milliseconds(row['measured_tpot_s']):>10}  "
        f"predicted {milliseconds(row['predicted_tpot_s']):>10}  {row['error']:+7.1%}"
        + (f"  {row['byte_mismatches']} PLANS DIFFER" if row["byte_mismatches"] else "")
    )


def _print_summary(summary: dict[str, Any], folder: Path) -> None:
    print(f"\n{summary['num_points']} points of {summary['device']}, profile {summary['profile']}")
    if summary["device"] != summary["profile_device"]:
        print(f"  the profile is of another device: {summary['profile_device']}")
    print(
        f"  blocks, slots and victims: {summary['byte_mismatches']} plans differ "
        f"({summary['fetched_blocks_compared']:,} fetched blocks compared)"
    )
    for label, part in (("all points", summary), ("contended", summary["contended"])):
        print(
            f"  |TPOT error| {label:<11} median {share(part['median_abs_error'])}, p95 {share(part['p95_abs_error'])}, "
            f"bias {share(part['bias'])} ({part['num_points']} points)"
        )
    tau = summary["kendall_tau"]
    print(
        f"  choosing by prediction costs {share(summary['regret'])}; Kendall tau {'–' if tau is None else f'{tau:.2f}'}"
    )
    print(f"  repeat spread of the measurements {share(summary['repeat_spread'])}")
    print(f"written to {folder} (points.jsonl, points.parquet, summary.json)")


def _require(summary: dict[str, Any], given: dict[str, float | None]) -> None:
    failures = []
    if summary["byte_mismatches"]:
        failures.append(f"{summary['byte_mismatches']} plans moved other blocks than replay")
    for name, goal in GOALS.items():
        limit = given[name] if given[name] is not None else goal
        if summary[name] is None or summary[name] > limit:
            failures.append(f"{name} {share(summary[name])} above {limit:.1%}")
    if failures:
        raise CheckFailed("validate --check: " + "; ".join(failures))
