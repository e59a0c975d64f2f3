"""A campaign of decode points that ran on a GPU, each beside its prediction: points, table and summary in a folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from realhw.decode_point import Point
from realhw.geometry import geometry
from realhw.predictions import predict
from realhw.validation_summary import is_contended, summarise
from simulator.catalog import load_hardware
from traces.errors import InputError

POINTS, TABLE, SUMMARY, PAGE = "points.jsonl", "points.parquet", "summary.json", "points.md"


def read_campaign(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[int]]:
    """(head with device and start, rows of the points that ran, numbers of lines that are torn).

    A kill may tear the last line; its point runs again. Raises InputError for what is no campaign.
    """
    torn, found = [], []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                found.append(json.loads(line))
            except ValueError:
                torn.append(number)
        if not found:
            raise InputError(f"{path}: is no campaign of decode points (empty or torn)")
        head, *rows = found
        ran = [row for row in rows if row["status"] == "ok"]
        if not head["device"]["name"]:
            raise KeyError("device")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: is no campaign of decode points ({type(error).__name__}: {error})") from error
    if not ran:
        raise InputError(f"{path}: no point of this campaign ran")
    for row in ran:
        _require_comparable(path, row)
    keys = [row["key"] for row in ran]
    twice = [key for key, count in Counter(keys).items() if count > 1]
    if twice:
        raise InputError(f"{path}: point {twice[0]} is there {keys.count(twice[0])} times")
    return head, ran, torn


def _require_comparable(path: Path, row: dict[str, Any]) -> None:
    """Raises InputError for a point whose times are no times, or whose record of what moved is not whole."""
    try:
        point = Point(**row["point"])
        flow, layers = point.flow(), geometry(point.model).num_layers
        steps = np.array(row["step_s"], dtype=np.float64)
        if steps.ndim != 2 or steps.shape[1] != point.num_steps or not (np.isfinite(steps) & (steps > 0)).all():
            raise InputError(f"step_s is not {point.num_steps} positive times of each run")
        if row.get("finite") is False:
            raise InputError("the run's logits were not finite")
        for name in ("fetched", "evicted", "fetched_hash", "evicted_hash") if flow.moves else ():
            if len(row.get(name) or ()) != point.num_steps:
                raise InputError(f"{name} is not there for each of {point.num_steps} steps")
            if any(len(step) != layers for step in row[name]):
                raise InputError(f"{name} is not of {point.num_steps} steps and {layers} layers")
    except (TypeError, ValueError, KeyError) as error:
        raise InputError(f"{path}: point {row.get('key')}: {type(error).__name__}: {error}") from error
    except InputError as error:
        raise InputError(f"{path}: point {row.get('key')}: {error}") from error


def other_device(device: str, profile: str, profile_device: str | None) -> str | None:
    """What every output says where the profile is not of the device that ran; null where it is."""
    if device == profile_device:
        return None
    return f"measured on {device}, predicted with profile {profile} of {profile_device or 'no device: a catalog entry'}"


def compare(
    campaign: Path, hardware_name: str, out: Path, commit: str | None, on_point: Callable[[dict[str, Any]], None],
    keys: Sequence[str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Predict a campaign's points (of `keys` alone where given); writes points as it goes, then table and summary.

    Returns the summary. Raises InputError for a file that is no campaign, an unknown profile, or a trace that is not
    the one that ran.
    """
    head, rows, torn = read_campaign(campaign)
    rows = [row for row in rows if keys is None or row["key"] in keys]
    hardware = load_hardware(hardware_name)
    device = head["device"]["name"]
    warning = other_device(device, hardware.name, hardware.device)
    predictions = []
    out.mkdir(parents=True, exist_ok=True)
    with (out / POINTS).open("w", encoding="utf-8") as file:
        for row in rows:
            found = predict(row, hardware)
            predictions.append(found | {"device": device, "warning": warning})
            file.write(json.dumps(predictions[-1]) + "\n")
            file.flush()
            on_point(predictions[-1])
    provenance = {
        "device": device,
        "driver": head["device"]["driver"],
        "date": head["started"],
        "commit": commit,
        "profile": hardware.name,
        "profile_date": hardware.date,
        "profile_device": hardware.device,
        "warning": warning,
        "fetched_blocks_compared": sum(row["fetched_blocks"] for row in predictions),
        "torn_lines": torn,
    }
    summary = summarise(predictions, provenance)
    _write_parquet(predictions, out / TABLE)
    (out / PAGE).write_text(page(predictions, summary), encoding="utf-8")
    (out / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def page(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """All points as a Markdown table, worst first."""
    lines = [f"{len(rows)} points on {summary['device']}, driver {summary['driver']}, profile {summary['profile']}", ""]
    if summary["warning"]:
        lines += [f"**Other device**: {summary['warning']}", ""]
    lines += [
        "| system | model | transport | batch | context | K × block | cap | k | ids | transfer / compute | "
        "measured ms | predicted ms | error | P99 error | plans that differ |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: -abs(row["error"])):
        size = row["policy.block_size_tokens"]
        kept = "all" if row["policy.kv_budget_tokens"] is None else f"{row['policy.kv_budget_tokens'] // size} × {size}"
        ratio = f"{row['transfer_over_compute']:.2f}" + (" contended" if is_contended(row) else "")
        p99_error = row["predicted_p99_s"] / row["measured_p99_s"] - 1
        lines.append(
            f"| {row['system']} | {row['model']} | {row['policy.transport']} | {row['workload.batch_size']} | "
            f"{row['workload.context_tokens']:,} | {kept} | {row['policy.fetch_cap']:g} | "
            f"{row['policy.lookahead_k']} | {row['trace']} | {ratio} | {1e3 * row['measured_tpot_s']:.3f} | "
            f"{1e3 * row['predicted_tpot_s']:.3f} | "
            f"{row['error']:+.1%} | {p99_error:+.1%} | {row['byte_mismatches']} |"
        )
    return "\n".join(lines) + "\n"


def _write_parquet(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plain columns only: parts become `predicted.t_qkv_s` and `measured.qkv`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = []
    for row in rows:
        plain = {name: value for name, value in row.items() if not name.endswith("_parts_s")}
        for kind in ("predicted", "measured"):
            plain |= {f"{kind}.{part}": value for part, value in (row.get(f"{kind}_parts_s") or {}).items()}
        flat.append(plain)
    names = list(dict.fromkeys(name for row in flat for name in row))
    pq.write_table(pa.table({name: [row.get(name) for row in flat] for name in names}), path)
