"""Run decode points for real and write what happened, one JSON line a point: `python -m realhw.campaign --out FILE`.

A point that is already in the file is skipped, so an interrupted campaign resumes; one that does not fit is recorded
with what it needed and the largest batch that fits. Block ids come from a seeded synthetic trace or from a recorded
one, whose hash is recorded with the results.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from realhw.decode_point import Point, trace_hash
from realhw.device import device_info, require_gpu
from realhw.flows import Flow, footprint, largest_batch
from realhw.geometry import geometry
from realhw.host_kv import HostKv, request_bytes
from realhw.point_list import default_points, smoke_points
from realhw.runner import DecodeRunner
from realhw.step_trace import moved_hash
from realhw.weights import ModelWeights, random_weights
from traces.errors import InputError, OasisError

HBM_SHARE = 0.93
"""Of the GPU's memory; the rest is the CUDA context, Triton's and the allocator's."""


class Campaign:
    """Runs points on one GPU, sharing the model's weights and the pinned host KV between them.

    out: JSON lines, kept and continued where they exist. traces: folder of `realhw.recorded_rankings` exports, for a
    machine without a trace reader. Raises EnvironmentMissing without a usable GPU, InputError for another's file.
    """

    def __init__(self, out: Path, host_gib: int, traces: Path | None = None) -> None:
        self._out, self._traces, self._host_bytes = out, traces, host_gib << 30
        self._device, self._info = require_gpu(), device_info()
        self._weights: ModelWeights | None = None
        self._host: HostKv | None = None
        out.parent.mkdir(parents=True, exist_ok=True)
        self._done = self._resume()

    def _resume(self) -> set[str]:
        """Keys of the points that the file has; a torn last line goes."""
        device = self._info.as_dict()
        text = self._out.read_text(encoding="utf-8") if self._out.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if not whole:
            self._out.write_text("", encoding="utf-8")
            self._write({"device": device, "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
            return set()
        if whole != text:
            self._out.write_text(whole, encoding="utf-8")
        head, *rows = [json.loads(line) for line in whole.splitlines()]
        if head.get("device", {}).get("name") != device["name"]:
            raise InputError(f"{self._out}: campaign of {head.get('device', {}).get('name')}, here is {device['name']}")
        return {row["key"] for row in rows if row["status"] != "failed"}

    def _write(self, row: dict[str, Any]) -> None:
        with self._out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
            out.flush()
            os.fsync(out.fileno())

    def run(self, point: Point, repeats: int = 3, profile: bool = True) -> dict[str, Any]:
        """Run a point unless the file has it; returns its row. A point that fails is recorded and run again later."""
        if point.key() in self._done:
            return {"key": point.key(), "status": "skipped"}
        row: dict[str, Any] = {"key": point.key(), "point": asdict(point)}
        g, flow, began = geometry(point.model), point.flow(), time.perf_counter()
        size = (point.context_tokens, point.num_steps)
        need = footprint(g, flow, point.batch_size, *size).hbm_bytes
        have = int(HBM_SHARE * self._info.hbm_bytes)
        if need > have:
            row.update(status="does_not_fit", need_bytes=need, have_bytes=have)
            row["largest_batch"] = largest_batch(g, flow, *size, have)
        else:
            try:
                row.update(self._measure(point, flow, repeats, profile))
            except (RuntimeError, OasisError) as error:
                row.update(status="failed", error=f"{type(error).__name__}: {error}".splitlines()[0])
        row["wall_s"] = round(time.perf_counter() - began, 2)
        self._write(row)
        return row

    def _host_kv(self, point: Point, num_blocks: int) -> torch.Tensor:
        """Pinned KV of the batch; where the buffer is smaller, requests share it, unless the point says otherwise."""
        g, size = geometry(point.model), point.block_size_tokens
        need = self._host_bytes
        if not point.aliased:
            need = max(need, point.batch_size * request_bytes(g, num_blocks, size))
        if self._host is None or self._host.num_bytes < need:
            if self._host is not None:
                self._host.close()
                self._host = None
            self._host = HostKv(need)
        held = self._host.num_bytes if not point.aliased else self._host_bytes
        return self._host.view(g, point.batch_size, num_blocks, size, held)

    def _measure(self, point: Point, flow: Flow, repeats: int, profile: bool) -> dict[str, Any]:
        g = geometry(point.model)
        if self._weights is None or self._weights.geometry != g:
            self._weights = None  # one model's weights at a time
            self._weights = random_weights(g, self._device)
        trace = point.step_trace(self._traces)
        blocks = -(-(int(trace.kv_len[trace.offsets].max()) + point.num_steps) // point.block_size_tokens)
        host = self._host_kv(point, blocks) if flow.moves else None
        runner = DecodeRunner(self._weights, flow, trace, point.num_steps, host)
        try:
            runner.prepare()
            runner.run()
            seconds = [runner.step_seconds(runner.run()) for _ in range(repeats)]
            row: dict[str, Any] = {
                "status": "ok", "step_s": [[round(s, 9) for s in steps] for steps in seconds],
                "trace": trace_hash(trace), "aliased_requests": None if host is None else host.shape[0],
                "finite": bool(torch.isfinite(runner.buffers.logits).all()),
            }  # fmt: skip
            if flow.moves:
                row.update(read_moves(runner))
            if profile:
                runner.prepare(mark_parts=True)
                runner.run()
                row["parts_s"] = part_seconds(runner.run())
        finally:
            del runner
            gc.collect()
            torch.cuda.empty_cache()
        return row


def read_moves(runner: DecodeRunner) -> dict[str, Any]:
    """Counts [T][L] and order-free hashes [T][L] of what the plans fetched and evicted, read back from the GPU."""
    fetched, evicted, fetch_hash, evict_hash = [], [], [], []
    for t in range(runner.num_steps):
        moved = runner.buffers.moved(t)
        fetched.append([len(f) for f, _ in moved])
        evicted.append([len(e) for _, e in moved])
        fetch_hash.append([moved_hash(f) for f, _ in moved])
        evict_hash.append([moved_hash(e) for _, e in moved])
    return {"fetched": fetched, "evicted": evicted, "fetched_hash": fetch_hash, "evicted_hash": evict_hash}


def part_seconds(marks: list[tuple[str, float]]) -> list[dict[str, float]]:
    """Seconds of each step by part: a mark ends the part that it names; two marks `step` are a step's ends."""
    steps: list[dict[str, float]] = []
    for (previous, before), (label, at) in pairwise(marks):
        if previous == "step":
            steps.append({})
        if label != "step":
            steps[-1][label] = steps[-1].get(label, 0.0) + at - before
    return [{name: round(value, 9) for name, value in step.items()} for step in steps]


def describe(row: dict[str, Any]) -> str:
    """One line about a row."""
    p = row["point"]
    text = (
        f"{p['model']} {p['system']} {p['transport']} b{p['batch_size']} c{p['context_tokens']} cap{p['fetch_cap']} "
        f"k{p['lookahead_k']} P{p['block_size_tokens']} {p['trace']} {row['status']}"
    )
    if row["status"] == "ok":
        text += f" {1e3 * float(np.median(np.array(row['step_s'])[:, -8:])):.3f} ms"
        if "fetched" in row:
            text += f" fetched/layer {float(np.mean(row['fetched'][-3:])):.0f}"
        if "differing_plans" in row:
            text += f" differing plans {row['differing_plans']}"
    return f"{text} {row.get('error', '')} wall {row['wall_s']}"


def check_moves(row: dict[str, Any], traces: Path | None) -> None:
    """Add how many plans of a row differ from the simulator's rules."""
    from realhw.expected_moves import expected_moves, mismatches

    point = Point(**row["point"])
    row["differing_plans"] = mismatches(row, expected_moves(point.flow(), point.step_trace(traces), point.num_steps))


def read_points(path: Path) -> list[Point]:
    """Points of a file with one JSON object a line. Raises InputError for anything else."""
    try:
        return [Point(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: holds no points ({error})") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--traces", type=Path, help="folder of realhw.recorded_rankings exports")
    parser.add_argument("--host-gib", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=500.0, help="start no point after this many seconds")
    parser.add_argument("--first", type=int, default=0, help="skip points before this index")
    parser.add_argument("--every", type=int, default=1, help="take every n-th point")
    parser.add_argument("--profile-every", type=int, default=4, help="time the parts of every n-th point (0: of none)")
    parser.add_argument("--smoke", action="store_true", help="one point of each flow, its moves checked at once")
    parser.add_argument("--points", type=Path, help="one point a line, as `oasis-sim validate` writes them")
    options = parser.parse_args()
    points: Sequence[Point] = smoke_points() if options.smoke else default_points()
    if options.points is not None:
        points = read_points(options.points)
    campaign, began = Campaign(options.out, options.host_gib, options.traces), time.perf_counter()
    for number, point in enumerate(points[options.first :: options.every]):
        if time.perf_counter() - began > options.limit_s:
            print("time is up; run again to go on", flush=True)
            break
        row = campaign.run(point, profile=bool(options.profile_every) and number % options.profile_every == 0)
        if row["status"] == "skipped":
            continue
        if options.smoke and "fetched" in row:
            check_moves(row, options.traces)
        print(f"{time.perf_counter() - began:6.1f} {describe(row)}", flush=True)


if __name__ == "__main__":
    main()
