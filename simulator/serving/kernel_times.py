"""Kernel times by the sizes that they depend on, remembered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from simulator import cost, draft_heads
from simulator.fetch_path import selections_s
from simulator.specs.experiment import EngineSpec, PlacementSpec
from simulator.specs.hardware import HardwareSpec
from simulator.specs.model import ModelSpec
from simulator.specs.policy import KV_BYTES_PER_ELEMENT, PolicySpec
from simulator.step_layout import StepRules

REMEMBERED = 65_536
"""Times kept of each kernel: memory stays bounded over any run."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What stays the same from iteration to iteration. `model` is one GPU's part."""

    model: ModelSpec
    hardware: HardwareSpec
    policy: PolicySpec
    placement: PlacementSpec
    engine: EngineSpec


class KernelTimes:
    """Seconds of each kernel by the sizes it depends on; bounded, filled as they are asked for."""

    def __init__(self, setting: Setting, rules: StepRules, corrected_share: float) -> None:
        hardware, model, policy = setting.hardware, setting.model, setting.policy
        element = KV_BYTES_PER_ELEMENT[policy.kv_dtype]
        dense, rows = policy.selector == "all", 1 + cost.draft_rows(policy)

        def remembered(function: Callable[..., Any], *fixed: object) -> Callable[..., Any]:
            return lru_cache(maxsize=REMEMBERED)(partial(function, hardware, model, *fixed))

        self.qkv_s = remembered(cost.qkv_s)
        self.ffn_s = remembered(cost.o_ffn_s)
        self.allreduce_s = remembered(cost.layer_allreduces_s)
        self.collectives_s = remembered(step_collectives_per_layer_s)
        self.lm_head_s = remembered(cost.lm_head_s)
        self.sampling_s = remembered(cost.sampling_s)
        self.selections_s = remembered(selections_s, policy, rules, corrected_share)
        self.draft_s = remembered(draft_heads.draft_s, policy)
        self.attention_s = lru_cache(maxsize=REMEMBERED)(
            partial(cost.attention_s, hardware, model, rows=rows, kv_bytes_per_element=element, dense_table=dense)
        )
        self.window_attention_s = lru_cache(maxsize=REMEMBERED)(
            partial(cost.attention_s, hardware, model, rows=rows, kv_bytes_per_element=element, dense_table=True)
        )


def step_collectives_per_layer_s(hardware: HardwareSpec, model: ModelSpec, rows: int, batch_size: int) -> float:
    """As in a closed batch, the collectives of a step are spread over its layers."""
    return cost.step_collectives_s(hardware, model, rows, batch_size) / model.num_layers
