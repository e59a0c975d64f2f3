"""One decode run that can be asked of a GPU: its flow, and the block ids that drive it."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from realhw.flows import Flow, Transport
from realhw.geometry import geometry
from realhw.kernels.gather.config import DEFAULT as GATHER
from realhw.kernels.gather.config import GatherConfig
from realhw.recorded_rankings import find_rankings
from realhw.step_trace import Int32, StepTrace, synthetic_step_trace
from traces.errors import InputError

NUM_OFFSETS = 8
"""Distinct starting rows; request b starts at the (b % 8)-th."""
RECORDED_STRIDE = 9
"""Rows between the starting rows in a recorded trace: odd, so that requests fill their blocks at different steps."""
FIRST_RECORDED_ROW = 8
"""Drafts have no prediction for the first positions of a request."""
SYNTHETIC = "synthetic"
SYSTEMS = ("dense", "quest", "retrieval", "prefetch-previous", "oasiskv")


@dataclass(frozen=True, slots=True)
class Point:
    """One decode run."""

    system: str
    batch_size: int
    context_tokens: int
    """KV length of the row that offset 0 starts at."""
    num_kept: int = 128
    block_size_tokens: int = 16
    fetch_cap: float = 1.0
    lookahead_k: int = 1
    gather_ctas: int = GATHER.num_ctas
    model: str = "Qwen3-8B"
    num_steps: int = 10
    """Of one graph. The more of it is still to come, the slower the host link serves a gather (docs/validation.md)."""
    churn: float = 0.45
    miss: float = 0.15
    """Synthetic ids only."""
    seed: int = 0
    transport: Transport = "gather"
    trace: str = SYNTHETIC
    """`synthetic`, or the name of a recorded trace."""
    trace_group: str | None = None
    """Request of a recorded trace. Null: its first."""
    start_stride: int = 1
    """Rows of synthetic ids between the starting rows of requests; 2: some of them fill a block in every other step."""
    aliased: bool = True
    """Requests may share the pinned KV of others where all of it is larger than the pinned buffer."""
    repeat: int = 0
    """Tells runs of the same point apart."""

    def __post_init__(self) -> None:
        if self.system not in SYSTEMS:
            raise InputError(f"system {self.system!r}: the harness runs {', '.join(SYSTEMS)}")

    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def flow(self) -> Flow:
        """The system's flow: dense, quest, retrieval (on demand), prefetch-previous, oasiskv (draft row and head)."""
        common: dict[str, Any] = {
            "num_kept": self.num_kept, "block_size_tokens": self.block_size_tokens,
            "gather": GatherConfig(num_ctas=self.gather_ctas), "transport": self.transport,
        }  # fmt: skip
        if self.system in ("dense", "quest"):
            return Flow(self.system, **common)  # type: ignore[arg-type]
        if self.system == "retrieval":
            return Flow("on-demand", fetch_cap=self.fetch_cap, **common)
        k = self.lookahead_k
        if self.system == "prefetch-previous":
            return Flow("lookahead", fetch_cap=self.fetch_cap, lookahead_k=k, **common)
        slack = max(1, math.ceil(round(k * self.fetch_cap * self.num_kept, 9)))
        return Flow(
            "lookahead", slack_blocks=slack, fetch_cap=self.fetch_cap, lookahead_k=k, draft_rows=k, draft_head=True,
            **common,
        )  # fmt: skip

    def step_trace(self, folder: Path | None = None) -> StepTrace:
        """The point's block ids: synthetic, or of a recorded trace (its export in `folder`, else the trace itself).

        Raises InputError where the trace does not serve the point.
        """
        shift = self.lookahead_k if self.system == "prefetch-previous" else 0
        start = np.arange(self.batch_size, dtype=np.int32) % NUM_OFFSETS
        if self.trace == SYNTHETIC:
            return self._synthetic(start, shift)
        ranking = f"draft{self.lookahead_k}" if self.system == "oasiskv" else "true"
        rankings = find_rankings(self.trace, self.trace_group, folder)
        offsets = (FIRST_RECORDED_ROW + start * RECORDED_STRIDE + shift).astype(np.int32)
        found = rankings.step_trace(self.model, self.block_size_tokens, ranking, shift, offsets, self.num_kept)
        if int(found.kv_len[0]) != self.context_tokens:
            raise InputError(
                f"trace {self.trace}: starts at {int(found.kv_len[0])} tokens, the point says {self.context_tokens}"
            )
        return found

    def _synthetic(self, start: Int32, shift: int) -> StepTrace:
        g = geometry(self.model)
        ranked = min(self.num_kept, -(-self.context_tokens // self.block_size_tokens) - 1)
        rows = self.num_steps + NUM_OFFSETS * self.start_stride + 8
        base = _synthetic_rankings(
            rows, g.num_layers, g.num_kv_heads, ranked, self.context_tokens, self.block_size_tokens, self.churn,
            self.miss, self.seed,
        )  # fmt: skip
        offsets = (start * self.start_stride + shift).astype(np.int32)
        return StepTrace(base.true, base.true if shift else base.predicted, shift, base.kv_len, offsets)


@lru_cache(maxsize=4)
def _synthetic_rankings(
    rows: int, layers: int, heads: int, ranked: int, context: int, block: int, churn: float, miss: float, seed: int
) -> StepTrace:
    return synthetic_step_trace(
        rows, layers, heads, ranked, context, block, np.zeros(1, dtype=np.int32), churn=churn, miss=miss, seed=seed
    )


def trace_hash(trace: StepTrace) -> str:
    """Hash of everything that drives a run; the GPU's and the prediction's must be equal."""
    digest = hashlib.sha256()
    for array in (trace.true, trace.predicted, trace.kv_len, trace.offsets):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
