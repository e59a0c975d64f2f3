"""What `oasis-sim quality` measures: model, prompts and the grid of policies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Any

from pydantic import Field, model_validator

from realhw.drafters import DrafterName, require_draft_model
from realhw.models import Dtype
from realhw.prompts import Prompt
from simulator.fetch_cap import default_slack_blocks
from simulator.specs.base import NonNegativeInt, PositiveFloat, PositiveInt, Spec
from simulator.specs.policy import PolicySpec
from simulator.specs.validation import validated
from traces.errors import InputError

MIN_DENSE_EXACT_MATCH = 0.3
"""Policies decode freely, and exact match is reported, only where dense decode finds this share of the answers."""


class QualityOptions(Spec):
    """Which model decodes what under which policies. `oasis-sim quality` builds it from its flags."""

    model: str
    prompts: tuple[Prompt, ...] = Field(min_length=1)
    context_tokens: PositiveInt | None = None
    """KV length at the first step; longer prompts lose their middle. Null: each prompt's own length."""
    keep_first_tokens: NonNegativeInt = 32
    steps: PositiveInt = 64
    """Measured positions per prompt; the dense step before them admits the first working set."""
    fetch_caps: tuple[float, ...] = (1.0,)
    budgets_tokens: tuple[PositiveInt, ...] = (512,)
    block_sizes_tokens: tuple[PositiveInt, ...] = (16,)
    predictors: tuple[str, ...] = ("previous", "draft1", "oracle", "random")
    """current, previous, random, oracle, or draft{k}: the draft token's query k steps ahead. oracle: a draft that is
    always right, one step ahead."""
    drafter: DrafterName = "ngram"
    draft_model: str | None = None
    score_levels_per_octave: PositiveInt = 16
    seed: NonNegativeInt = 0
    """Of the random predictor and of the bootstrap."""
    bootstrap_samples: PositiveInt = 1000
    device: str = "cpu"
    dtype: Dtype = "float32"
    """float32 keeps rounding out of small divergences."""
    prompts_per_batch: PositiveInt = 4
    """Prompts of one length that decode side by side."""
    deadline_s: PositiveFloat | None = None
    """Start nothing that is not expected to end within this time; what is left is done by repeating the command."""
    prefill_chunk_tokens: PositiveInt = 2048
    threads: PositiveInt | None = None
    """For residency; null: all cores."""
    command: str | None = None

    @model_validator(mode="after")
    def _draft_model(self) -> QualityOptions:
        require_draft_model(self.drafter, self.draft_model)
        if self.drafter != "ngram" and not any(name.startswith("draft") for name in self.predictors):
            raise ValueError(f"drafter {self.drafter} has nothing to guess: predictors name no draft")
        return self


def policies_of(options: QualityOptions, block_size: int) -> list[PolicySpec]:
    """The grid at one block size, without duplicates: on demand there is no cap to vary."""
    grid: list[PolicySpec] = []
    for name, budget, cap in product(options.predictors, options.budgets_tokens, options.fetch_caps):
        if budget % block_size:
            raise InputError(f"budgets_tokens: {budget} is no multiple of block size {block_size}")
        found = re.fullmatch(r"(current|previous|oracle|random)|draft([1-9]\d{0,2})", name, flags=re.ASCII)
        if found is None:
            raise InputError(f"predictors: {name!r} is none of current, previous, oracle, random, draft1, draft2, …")
        values: dict[str, Any] = {
            "predictor": found[1] or "draft",
            "lookahead_k": int(found[2] or 1),
            "kv_budget_tokens": budget,
            "block_size_tokens": block_size,
            "fetch_cap": cap if name != "current" else 1.0,
            "residency": "exact" if name == "current" else "slack",
        }
        if name != "current":
            slack = default_slack_blocks(values["lookahead_k"], cap, budget // block_size)
            values["slack_blocks"] = max(1, slack)
        policy = validated(PolicySpec, values, key_prefix="policy")
        if policy not in grid:
            grid.append(policy)
    return grid


def predictor_name(policy: PolicySpec) -> str:
    """The grid's name of a policy's predictor."""
    return policy.predictor if policy.predictor != "draft" else f"draft{policy.lookahead_k}"


def num_guesses(grid: Sequence[PolicySpec]) -> int:
    """How many tokens the drafter must guess ahead."""
    return max((policy.lookahead_k for policy in grid if policy.predictor == "draft"), default=0)
