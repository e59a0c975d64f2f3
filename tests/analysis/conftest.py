"""A synthetic sweep for the plots: made-up closed forms, no simulator, every name says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from simulator.metrics import BREAKDOWN, COLUMNS

HBM_BYTES_PER_S = 3.0e12
LINK_BYTES_PER_S = 50e9
WEIGHT_BYTES = 16e9
KV_BYTES_PER_TOKEN = 147_456
CONTEXT, BUDGET, BATCH = 4096, 512, 32
NUMA_SHARE = {"local": 1.0, "far": 0.6, "interleave": 0.8}
CHURN = {"oasiskv": 0.20, "oasiskv-oracle": 0.16, "prefetch-previous": 0.22, "retrieval": 0.25}
PENALTY = {"oasiskv": 0.010, "oasiskv-oracle": 0.0, "prefetch-previous": 0.035, "retrieval": 0.0, "quest": 0.0}


def synthetic_row(
    system: str,
    cap: float | None = None,
    block: int | None = None,
    k: int | None = None,
    numa: str | None = None,
    batch: int = BATCH,
    **more: Any,
) -> dict[str, Any]:
    """One made-up point: HBM time = (weights + KV) / bandwidth, link time = moved / bandwidth, overlap by system."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    dense = system == "dense"
    size = block or 16
    moves = system in CHURN
    share = min(cap if cap is not None else 1.0, CHURN.get(system, 0.0) * (1 + 0.06 * (size / 8 - 1)))
    kv_read = batch * KV_BYTES_PER_TOKEN * (CONTEXT if dense else BUDGET * 1.1 + CONTEXT / size)
    link_rate = LINK_BYTES_PER_S * NUMA_SHARE[numa or "local"]
    moved = batch * KV_BYTES_PER_TOKEN * BUDGET * share if moves else 0.0
    link_s = moved / link_rate
    parts = dict.fromkeys(BREAKDOWN, 0.0)
    parts["t_qkv_s"], parts["t_ffn_s"], parts["t_lm_head_s"] = (
        WEIGHT_BYTES * s / HBM_BYTES_PER_S for s in (0.13, 0.79, 0.08)
    )
    parts["t_attention_s"] = kv_read * (1.0 if dense else 0.7) / HBM_BYTES_PER_S
    parts["t_sampling_s"] = 3e-5
    if not dense:
        parts["t_score_s"] = kv_read * 0.3 / HBM_BYTES_PER_S
        parts["t_plan_s"] = 4e-5 * 36 * (16 / size)
    if system.startswith("oasiskv"):
        parts["t_draft_s"] = 2.5e-4 * (1 + 0.3 * (k or 1))
    busy = sum(parts.values())
    parts["t_exposed_wait_s"] = link_s if system == "retrieval" else max(0.0, link_s - busy * (1 - 0.15 / (k or 1)))
    step_s = sum(parts.values())
    base = 0.965 - 0.0009 * size
    starve = max(0.0, CHURN.get(system, 0.0) - share) * 0.25 if moves else 0.0
    recall = 1.0 if dense else 1e-9 + base - PENALTY.get(system, 0.0) * (1 + 0.3 * ((k or 1) - 1)) - starve
    row |= {
        "point_key": f"synthetic-{system}-{cap}-{block}-{k}-{numa}-{batch}",
        "status": "ok",
        "system": system,
        "model": "Qwen3-8B",
        "hardware": "h100-sxm",
        "trace": "synthetic-for-tests",
        "trace_group": "g0",
        "mapping": "depth-cyclic",
        "workload.batch_size": batch,
        "workload.context_tokens": CONTEXT,
        "workload.output_tokens": 128,
        "policy.kv_budget_tokens": None if dense else BUDGET,
        "policy.block_size_tokens": block,
        "policy.fetch_cap": cap,
        "policy.lookahead_k": k,
        "placement.host_numa": numa,
        "placement.num_gpus": 1,
        "seed": 0,
        "throughput_tokens_per_s": batch / step_s,
        "tpot_mean_s": step_s,
        "tpot_p50_s": step_s,
        "tpot_p99_s": step_s * 1.05,
        "exposed_transfer_s": parts["t_exposed_wait_s"],
        "hidden_fraction": 1 - parts["t_exposed_wait_s"] / link_s if link_s else None,
        "hit_rate": 1 - starve if not dense else 1.0,
        "recall": recall,
        "recall_upper": recall,
        "churn": share if moves else 0.0,
        "h2d_bytes_per_token": moved / batch,
        "d2h_bytes_per_token": KV_BYTES_PER_TOKEN if moves else 0.0,
        "link_utilization": link_s / step_s,
        "hbm_bytes_peak": 4e10,
        "host_bytes_peak": 2e10 if moves else 0.0,
        "bound": "h2d" if link_s > busy else "hbm",
        "kv_bytes_read_per_token": kv_read / batch,
        "hbm_ceiling_tokens_per_s": batch * HBM_BYTES_PER_S / (WEIGHT_BYTES + kv_read),
        "h2d_ceiling_tokens_per_s": batch / link_s if link_s else None,
        "compute_ceiling_tokens_per_s": 30_000.0,
        "link_busy_s": link_s,
        "min_recall": base - 0.01,
        "bound_detail": "synthetic",
        **parts,
    }
    return row | more


def synthetic_sweep() -> pd.DataFrame:
    """Six systems; caps x blocks x k x NUMA where a system heeds them, null where it does not."""
    blocks, caps, ks = (8, 16, 32, 64), (0.02, 0.05, 0.1, 0.2, 1.0), (1, 2, 4)
    rows = [synthetic_row("dense")]
    rows += [synthetic_row("quest", block=p) for p in blocks]
    rows += [synthetic_row("retrieval", block=p, numa=n) for p in blocks for n in NUMA_SHARE]
    rows += [synthetic_row("prefetch-previous", c, p, 1, n) for c in caps for p in blocks for n in NUMA_SHARE]
    for system in ("oasiskv", "oasiskv-oracle"):
        rows += [synthetic_row(system, c, p, k, n) for c in caps for p in blocks for k in ks for n in NUMA_SHARE]
    return pd.DataFrame(rows)


def write_results(folder: Path, frame: pd.DataFrame) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), folder / "results.parquet")
    (folder / "config.yaml").write_text(yaml.safe_dump({"objective": {"maximize": "throughput_tokens_per_s"}}))
    (folder / "manifest.json").write_text(json.dumps({"git_sha": "0" * 40, "seed": 0, "note": "synthetic, for tests"}))
    return folder


@pytest.fixture(scope="session")
def sweep_frame() -> pd.DataFrame:
    return synthetic_sweep()


@pytest.fixture(scope="session")
def make_row() -> Callable[..., dict[str, Any]]:
    return synthetic_row


@pytest.fixture(scope="session")
def write_run() -> Callable[[Path, pd.DataFrame], Path]:
    return write_results
