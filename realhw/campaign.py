"""Run decode points for real and write what happened, one JSON line a point: `python -m realhw.campaign --out FILE`.

A point that is already in the file is skipped, so an interrupted campaign resumes; one that does not fit is recorded
with what it needed. Block ids come from a seeded synthetic trace whose hash is recorded with the results.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from realhw.device import device_info
from realhw.flows import Flow, footprint
from realhw.geometry import geometry
from realhw.kernels.gather.api import GatherConfig
from realhw.runner import DecodeRunner
from realhw.step_trace import StepTrace, moved_hash, synthetic_step_trace
from realhw.weights import ModelWeights, random_weights

NUM_OFFSETS = 8
"""Distinct starting rows; request b starts at row b % 8."""
HBM_SHARE = 0.93


@dataclass(frozen=True, slots=True)
class Point:
    """One decode run."""

    system: str
    batch_size: int
    context_tokens: int
    num_kept: int = 128
    block_size_tokens: int = 16
    fetch_cap: float = 1.0
    lookahead_k: int = 1
    gather_ctas: int = 8
    model: str = "Qwen3-8B"
    num_steps: int = 16
    churn: float = 0.45
    miss: float = 0.15
    seed: int = 0

    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def flow(self) -> Flow:
        """The system's flow: dense, quest, retrieval (on demand), prefetch-previous, oasiskv (draft row and head)."""
        common: dict[str, Any] = {
            "num_kept": self.num_kept, "block_size_tokens": self.block_size_tokens,
            "gather": GatherConfig(num_ctas=self.gather_ctas),
        }  # fmt: skip
        if self.system in ("dense", "quest"):
            return Flow(self.system, **common)  # type: ignore[arg-type]
        if self.system == "retrieval":
            return Flow("on-demand", fetch_cap=self.fetch_cap, **common)
        k = self.lookahead_k
        if self.system == "prefetch-previous":
            return Flow("lookahead", fetch_cap=self.fetch_cap, lookahead_k=k, **common)
        slack = max(1, int(np.ceil(round(k * self.fetch_cap * self.num_kept, 9))))
        return Flow(
            "lookahead", slack_blocks=slack, fetch_cap=self.fetch_cap, lookahead_k=k, draft_rows=k, draft_head=True,
            **common,
        )  # fmt: skip

    def trace(self) -> StepTrace:
        shift = self.lookahead_k if self.system == "prefetch-previous" else 0
        return make_trace(self, shift)


def make_trace(point: Point, shift: int) -> StepTrace:
    """The point's block ids; requests cycle through `NUM_OFFSETS` starting rows."""
    g = geometry(point.model)
    ranked = min(point.num_kept, -(-point.context_tokens // point.block_size_tokens) - 1)
    rows = point.num_steps + NUM_OFFSETS + 8
    base = _rankings(
        rows, g.num_layers, g.num_kv_heads, ranked, point.context_tokens, point.block_size_tokens, point.churn,
        point.miss, point.seed,
    )  # fmt: skip
    offsets = (np.arange(point.batch_size) % NUM_OFFSETS + shift).astype(np.int32)
    return StepTrace(base.true, base.true if shift else base.predicted, shift, base.kv_len, offsets)


@lru_cache(maxsize=4)
def _rankings(
    rows: int, layers: int, heads: int, ranked: int, context: int, block: int, churn: float, miss: float, seed: int
) -> StepTrace:
    return synthetic_step_trace(
        rows, layers, heads, ranked, context, block, np.zeros(1, dtype=np.int32), churn=churn, miss=miss, seed=seed
    )


def trace_hash(trace: StepTrace) -> str:
    digest = hashlib.sha256()
    for array in (trace.true, trace.predicted, trace.kv_len, trace.offsets):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


class Campaign:
    """Runs points on one GPU, sharing the model's weights and the pinned host KV between them."""

    def __init__(self, out: Path, host_gib: int) -> None:
        self._out = out
        self._host_bytes = host_gib << 30
        self._weights: ModelWeights | None = None
        self._host: torch.Tensor | None = None
        out.parent.mkdir(parents=True, exist_ok=True)
        self._done = set()
        if out.exists():
            self._done = {json.loads(line).get("key") for line in out.read_text().splitlines() if line.endswith("}")}
        else:
            self._write(
                {"device": device_info().as_dict(), "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
            )

    def _write(self, row: dict[str, Any]) -> None:
        with self._out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")

    def run(self, point: Point, repeats: int = 2, profile: bool = True) -> dict[str, Any]:
        """Run a point unless the file has it; returns its row."""
        if point.key() in self._done:
            return {"key": point.key(), "status": "skipped"}
        row: dict[str, Any] = {"key": point.key(), "point": asdict(point)}
        g, flow = geometry(point.model), point.flow()
        need = footprint(g, flow, point.batch_size, point.context_tokens, point.num_steps)
        have = int(HBM_SHARE * torch.cuda.get_device_properties(0).total_memory)
        if need.hbm_bytes > have:
            row.update(status="does_not_fit", need_bytes=need.hbm_bytes, have_bytes=have)
        else:
            began = time.perf_counter()
            row.update(self._measure(point, flow, repeats, profile))
            row["wall_s"] = round(time.perf_counter() - began, 2)
        self._write(row)
        return row

    def _host_kv(self, point: Point, blocks: int) -> torch.Tensor:
        """Pinned KV of as many requests as the buffer holds; a batch beyond them shares them."""
        g = geometry(point.model)
        if self._host is None:
            self._host = torch.empty(self._host_bytes // 2, dtype=torch.bfloat16, pin_memory=True)
            chunk = torch.randn(1 << 27, device="cuda").bfloat16()
            for part in torch.split(self._host, 1 << 27):
                part.copy_(chunk[: len(part)])
        per_request = g.num_layers * g.num_kv_heads * blocks * g.block_bytes(point.block_size_tokens) // 2
        requests = max(1, min(point.batch_size, len(self._host) // per_request))
        shape = (requests, g.num_layers, g.num_kv_heads, blocks, 2, point.block_size_tokens, g.head_dim)
        return self._host[: requests * per_request].view(shape)

    def _measure(self, point: Point, flow: Flow, repeats: int, profile: bool) -> dict[str, Any]:
        g = geometry(point.model)
        if self._weights is None or self._weights.geometry != g:
            self._weights = random_weights(g, "cuda")
        trace = point.trace()
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
                "finite": bool(torch.isfinite(runner.logits).all()),
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
        moved = runner.moved(t)
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


CELLS = (
    (32, 16384), (16, 16384), (16, 4096), (8, 32768), (64, 4096), (32, 4096), (16, 32768), (64, 16384), (8, 16384),
    (1, 16384), (32, 32768), (1, 4096),
)  # fmt: skip
"""(batch size, context) of the default campaign; K is an eighth of the context."""
POLICIES = (
    ("oasiskv", 0.05),
    ("dense", 1.0),
    ("quest", 1.0),
    ("prefetch-previous", 0.1),
    ("oasiskv", 0.1),
    ("retrieval", 1.0),
    ("oasiskv", 0.02),
)


def default_points() -> list[Point]:
    """Every policy in every cell, then other block sizes, lookahead and grids in the first cell."""
    points = [
        Point(system, batch, context, context // 8 // 16, fetch_cap=cap)
        for batch, context in CELLS
        for system, cap in POLICIES
    ]
    batch, context = CELLS[0]
    kept = context // 8 // 16
    extra = [
        Point("oasiskv", batch, context, kept, fetch_cap=0.05, lookahead_k=2),
        Point("oasiskv", batch, context, kept // 2, 32, fetch_cap=0.05),
        Point("oasiskv", batch, context, kept, fetch_cap=0.05, gather_ctas=16),
        Point("retrieval", batch, context, kept, fetch_cap=0.05),
        Point("prefetch-previous", batch, context, kept, fetch_cap=0.3),
    ]
    head = len(POLICIES)
    return [*points[:head], *extra, *points[head:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--host-gib", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=500.0, help="start no point after this many seconds")
    parser.add_argument("--first", type=int, default=0, help="skip points before this index")
    parser.add_argument("--every", type=int, default=1, help="take every n-th point")
    parser.add_argument("--profile-every", type=int, default=4, help="time the parts of every n-th point (0: of none)")
    options = parser.parse_args()
    campaign, began = Campaign(options.out, options.host_gib), time.perf_counter()
    for number, point in enumerate(default_points()[options.first :: options.every]):
        if time.perf_counter() - began > options.limit_s:
            print("time is up; run again to go on", flush=True)
            break
        row = campaign.run(point, profile=bool(options.profile_every) and number % options.profile_every == 0)
        mean = 1e3 * float(np.median(np.array(row["step_s"])[:, 4:])) if row["status"] == "ok" else 0.0
        fetched = float(np.mean(row["fetched"][4:-2])) if "fetched" in row else 0.0
        print(
            f"{time.perf_counter() - began:6.1f} {point.system} b{point.batch_size} c{point.context_tokens} "
            f"cap{point.fetch_cap} k{point.lookahead_k} P{point.block_size_tokens} {row['status']} {mean:.3f} ms "
            f"fetched/layer {fetched:.0f} wall {row.get('wall_s', 0)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
