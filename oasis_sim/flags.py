"""The flags that set keys of an experiment, each declared once: name, key, placeholder and help.

Imports nothing but the standard library: `oasis_sim.cli` reads this before any work.
"""

from __future__ import annotations

from typing import NamedTuple


class Flag(NamedTuple):
    """A flag whose text sets one key of an experiment."""

    name: str
    key: str
    metavar: str
    help: str

    @property
    def parameter(self) -> str:
        """The flag as a Python parameter, e.g. `batch_size`."""
        return self.name.removeprefix("--").replace("-", "_")


EXPERIMENT_FLAGS = (
    Flag("--system", "system", "NAME", "See: oasis-sim catalog systems."),
    Flag("--model", "model", "NAME", "Catalog name or Hugging Face config.json."),
    Flag("--hardware", "hardware", "NAME", "Catalog name or profile YAML."),
    Flag("--trace", "trace", "NAME", "Catalog name or path of a trace."),
    Flag("--fetch-cap", "policy.fetch_cap", "SHARE", "New blocks per step, share of K."),
    Flag("--block-size", "policy.block_size_tokens", "TOKENS", "Tokens per KV block."),
    Flag("--lookahead", "policy.lookahead_k", "STEPS", "Steps between plan and use."),
    Flag("--numa", "placement.host_numa", "WHERE", "Host DRAM: local, far or interleave."),
    Flag("--budget", "policy.kv_budget_tokens", "TOKENS", "Tokens that attention reads per head."),
    Flag("--batch-size", "workload.batch_size", "N", "Requests decoded together."),
    Flag("--context", "workload.context_tokens", "TOKENS", "KV length at the first decode step."),
    Flag("--min-recall", "objective.min_recall", "SHARE", "Least recall of the best point."),
    Flag("--maximize", "objective.maximize", "COLUMN", "What the best point maximises."),
    Flag("--seed", "seed", "N", "Seed of request offsets and random predictors."),
)
COMPARE_FLAGS = (
    Flag("--systems", "system", "A,B", "Default: all that the trace serves."),
    Flag("--system", "system", "A,B", "The same as --systems."),
    *(flag for flag in EXPERIMENT_FLAGS if flag.key != "system"),
)
REPRODUCE_FLAGS = (
    Flag("--model", "model", "NAME", "Another model."),
    Flag("--hardware", "hardware", "NAME", "Another GPU."),
    Flag("--batch", "workload.batch_size", "N", "Requests in flight, all systems."),
    Flag("--context", "workload.context_tokens", "TOKENS", "Mean KV length."),
    Flag("--tensor-parallel", "placement.tensor_parallel", "N", "GPUs of one replica."),
)
FLAG_KEYS = {flag.name: flag.key for flag in EXPERIMENT_FLAGS + COMPARE_FLAGS + REPRODUCE_FLAGS}
