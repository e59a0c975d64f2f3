"""What disaggregated serving does not model or cannot do: refused before anything runs."""

from __future__ import annotations

from simulator.specs.experiment import PlacementSpec
from simulator.specs.hardware import HardwareSpec
from simulator.specs.policy import PolicySpec
from simulator.specs.serving import ServingSpec
from traces.errors import InputError


def require_handover(
    serving: ServingSpec, policy: PolicySpec, hardware: HardwareSpec, placement: PlacementSpec, system: str
) -> None:
    """Raises InputError where prompts cannot be prefilled on other hosts this way."""
    mode = serving.disaggregation
    if mode == "none":
        return
    if hardware.nic.per_socket.value < 1:
        raise InputError(f"serving.disaggregation {mode} needs a NIC; a {hardware.name} host has none")
    if placement.kv_tier != "host":
        raise InputError(
            f"placement.kv_tier {placement.kv_tier}: with serving.disaggregation {mode} the KV goes to the decode "
            "host's memory, use host"
        )
    if serving.leaves_some_behind and (not policy.offloads or policy.residency == "streamed"):
        raise InputError(
            f"serving.disaggregation {mode}: system {system} attends to all of its KV and needs all of it first; "
            "use full-push or layer-push"
        )
    if mode == "layer-push" and policy.residency == "drop":
        raise InputError(
            f"serving.disaggregation layer-push: what system {system} keeps is known when the prompt ends; use "
            "full-push"
        )
    if serving.leaves_some_behind and policy.miss_rule == "dense":
        raise InputError(
            f"serving.disaggregation {mode}: which fetches are new is not known with policy.miss_rule: dense; use "
            f"full-push or layer-push (system {system})"
        )
