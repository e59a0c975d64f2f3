"""`oasis-sim calibrate`: measure this machine into a hardware profile, or check the cost model against a table."""

from __future__ import annotations

from pathlib import Path

from oasis_sim.output import milliseconds, print_json, print_rows, share
from traces.errors import EnvironmentMissing, InputError


def calibrate(
    out: str | None, name: str | None, base: str | None, pinned_gib: int, numa_node: int | None, as_json: bool
) -> int:
    """Measure and write the profile. Raises EnvironmentMissing without a GPU, torch or triton."""
    if out is None:
        raise InputError("calibrate writes a profile: name it with --out PROFILE.yaml (or compare with --check TABLE)")
    target = Path(out)
    if target.suffix not in (".yaml", ".yml"):
        raise InputError(f"--out {out}: a profile is a .yaml file")
    if target.exists():
        raise InputError(f"--out {out}: exists already; a calibration needs a new file")
    if not target.absolute().parent.is_dir():
        raise InputError(f"--out {out}: the folder {target.absolute().parent} does not exist")
    if pinned_gib < 1:
        raise InputError(f"--pinned-gib must be at least 1, got {pinned_gib}")
    try:
        from realhw import calibrate as measuring
    except ImportError as error:
        missing = error.name or str(error)
        raise EnvironmentMissing(f"calibrate needs {missing}: pip install '.[gpu]' in a clone") from error
    profile = measuring.calibrate(measuring.CalibrateOptions(target, name, base, pinned_gib, numa_node))
    if as_json:
        print_json({"profile": str(profile), "measurements": str(profile.with_suffix(".jsonl"))})
    else:
        print(f"{profile}\nnext: oasis-sim sweep --hardware {profile}")
    return 0


def check(table: str, hardware: str, as_json: bool) -> int:
    """Compare the cost model with a table of measured GEMM or decode-attention times."""
    from simulator.catalog import load_hardware
    from simulator.kernel_check import check_table

    result = check_table(table, load_hardware(hardware))
    if as_json:
        print_json(result.flat())
        return 0
    print(f"{result.kernel} of {table} against the cost model of {result.hardware}")
    print(f"{result.num_from_table:,} of {result.overall.num_rows:,} rows from the profile's own measured tables")
    for label, part in (("all rows", result.overall), ("beyond 2 x L2", result.beyond_l2)):
        if part.num_rows:
            print(
                f"  {label:<14} {part.num_rows:>7,} rows  median {share(part.median_abs_error)}  "
                f"p90 {share(part.p90_abs_error)}  bias {share(part.bias)}"
            )
    print("worst rows")
    print_rows(
        [
            {
                **{key: value for key, value in row.items() if not key.endswith("_s") and key != "error"},
                "measured ms": milliseconds(row["measured_s"]),
                "predicted ms": milliseconds(row["predicted_s"]),
                "error": share(row["error"]),
            }
            for row in result.worst
        ]
    )
    return 0
