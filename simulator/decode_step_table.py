"""First proof of the step model: decode steps measured on an H200, to whose totals no figure was fitted.

Measured: Qwen3-8B geometry, 36 layers, random weights, K = 128 blocks of 16, two rows per request (one draft row,
no draft head, no sampling), several steps in one graph, H200 SXM, torch 2.11, Triton 3.6, naive Triton kernels and
torch.topk. The profile holds the component times of the same runs. `python -m simulator.decode_step_table` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from simulator import catalog, cost
from simulator import step_layout as at
from simulator.engine_rates import engine_rates
from simulator.links import fetch_cost
from simulator.specs.experiment import PlacementSpec
from simulator.specs.hardware import HardwareSpec
from simulator.specs.policy import PolicySpec
from simulator.step_layout import StepRules, StepWork
from simulator.step_work import RunWork
from simulator.timeline import play
from simulator.topology import HostTopology

Stack = Literal["compute", "compute + selection", "copy engine", "gather"]
NUM_STEPS = 24


@dataclass(frozen=True, slots=True)
class Measured:
    batch_size: int
    context_tokens: int
    stack: Stack
    fetched_blocks: int
    """Per KV head and step, of K = 128."""
    step_us: float


MEASURED = (
    Measured(16, 32768, "compute", 0, 5858),
    Measured(16, 32768, "compute + selection", 0, 7847),
    Measured(16, 32768, "copy engine", 6, 7997),
    Measured(16, 32768, "gather", 6, 8318),
    Measured(32, 16384, "copy engine", 6, 9568),
    Measured(32, 16384, "gather", 6, 12467),
    Measured(64, 16384, "compute", 0, 9966),
    Measured(64, 16384, "compute + selection", 0, 14451),
    Measured(64, 16384, "copy engine", 6, 16528),
    Measured(64, 16384, "gather", 6, 22302),
    Measured(64, 16384, "copy engine", 28, 78800),
    Measured(64, 16384, "gather", 28, 92200),
)


def predict_us(hardware: HardwareSpec, row: Measured) -> float:
    """Mean microseconds of a steady step of the model for one measured row."""
    model = catalog.load_model("Qwen3-8B")
    gather = row.stack == "gather"
    policy = PolicySpec(
        kv_budget_tokens=2048, transport="gather" if gather else "ce-contiguous", gather_ctas=16, draft_head="ngram"
    )
    shape = (NUM_STEPS, model.num_layers)
    dur = np.zeros((NUM_STEPS, at.NUM_DURATIONS))
    rows, blocks = 2 * row.batch_size, row.context_tokens // 16
    dur[:, at.QKV] = cost.qkv_s(hardware, model, rows)
    dur[:, at.FFN] = cost.o_ffn_s(hardware, model, rows)
    dur[:, at.LM_HEAD] = cost.lm_head_s(hardware, model, rows)
    selection = row.stack != "compute"
    if selection:
        dur[:, at.SIDE_SCORE] = cost.score_s(hardware, model, policy, row.batch_size, blocks)
        dur[:, at.SIDE_TOPK] = cost.topk_s(hardware, model, policy, row.batch_size, blocks)
    num_bytes = row.batch_size * model.num_kv_heads * row.fetched_blocks * model.block_bytes(16)
    link = fetch_cost(hardware, policy.transport, policy.gather_ctas, "local")
    # The measured copy moved contiguous bytes, so nothing is packed; the harness' plan did not travel to the CPU.
    rate = link.bytes_per_s if gather else hardware.link.h2d_bytes_per_s.value
    transfer_s = link.t0_s + (0.0 if gather else link.op_s) + num_bytes / rate if num_bytes else 0.0
    attention_s = cost.attention_s(hardware, model, row.batch_size, 2048, 2, 2)
    work = StepWork(
        durations_s=dur,
        attention_s=np.full(shape, attention_s),
        scatter_s=np.zeros(shape),
        selects=np.full(model.num_layers, selection),
        first_s=np.zeros(shape),
        prefetch_s=np.full(shape, transfer_s),
        write_s=np.zeros(shape),
        waits_for_slots=np.ones(shape, dtype=np.bool_),
        remote_first_s=np.zeros(shape),
        remote_prefetch_s=np.zeros(shape),
    )
    rules = StepRules(model.num_layers, int(selection), on_demand=False, urgent=False, plan_waits=selection)
    nothing = np.zeros(NUM_STEPS)
    run = RunWork(rules, work, nothing, nothing, rate, nothing, nothing)
    rates = engine_rates(hardware, policy.transport, 16, row.batch_size, model.num_kv_heads)
    result = play([run], rates, HostTopology(hardware, 1, PlacementSpec()))
    return float(result.step_s[0, NUM_STEPS // 2 :].mean() * 1e6)


def compare(hardware: HardwareSpec) -> list[tuple[Measured, float, float]]:
    """(row, predicted microseconds, signed relative error)."""
    return [(row, us, us / row.step_us - 1) for row in MEASURED for us in [predict_us(hardware, row)]]


def main() -> None:
    print(
        f"{'batch':>5} {'context':>7} {'what runs':<20} {'fetch':>5} {'measured us':>11} {'model us':>9} {'error':>7}"
    )
    for row, us, error in compare(catalog.load_hardware("h200-sxm")):
        print(
            f"{row.batch_size:>5} {row.context_tokens:>7} {row.stack:<20} {row.fetched_blocks:>5} "
            f"{row.step_us:>11.0f} {us:>9.0f} {error:>+7.1%}"
        )


if __name__ == "__main__":
    main()
