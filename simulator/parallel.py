"""Tensor parallelism as a view of the model: what one GPU of a replica computes and holds."""

from __future__ import annotations

from dataclasses import replace

from simulator.mapping import Mapping
from simulator.specs.experiment import PlacementSpec
from simulator.specs.hardware import HardwareSpec
from simulator.specs.model import ModelSpec
from traces.errors import InputError


def shard(model: ModelSpec, tensor_parallel: int) -> ModelSpec:
    """The share of `model` that each of `tensor_parallel` GPUs has; its costs, bytes and pools are one GPU's.

    Divided: query heads, KV heads (at least one: fewer than GPUs are replicated), columns of the feed-forward and of
    every expert, vocabulary rows; the last two are rounded up, as padded weights are. Replicated: the router, the
    latent cache of MLA and the projections into its ranks. Source: Megatron-LM (arXiv 1909.08053) section 3, as vLLM
    splits these models. Raises InputError where heads do not divide.
    """
    if tensor_parallel == 1:
        return model
    if model.tensor_parallel != 1:
        raise ValueError(f"{model.name} is one of {model.tensor_parallel} shards already")
    _require_heads(model, tensor_parallel)
    moe = model.moe
    if moe is not None:
        moe = moe.model_copy(update={"moe_intermediate": -(-moe.moe_intermediate // tensor_parallel)})
    return model.model_copy(
        update={
            "tensor_parallel": tensor_parallel,
            "num_q_heads": model.num_q_heads // tensor_parallel,
            "num_kv_heads": max(1, model.num_kv_heads // tensor_parallel),
            "intermediate": -(-model.intermediate // tensor_parallel),
            "vocab": -(-model.vocab // tensor_parallel),
            "moe": moe,
        }
    )


def rank_mappings(mapping: Mapping, tensor_parallel: int) -> tuple[Mapping, ...]:
    """Each GPU's part of a mapping of the whole model: the KV heads that it holds, in the order of GPUs."""
    num_heads = len(mapping.head_of)
    held = max(1, num_heads // tensor_parallel)
    first = [rank * num_heads // tensor_parallel for rank in range(tensor_parallel)]
    return tuple(replace(mapping, head_of=mapping.head_of[head : head + held]) for head in first)


def gpus_in_use(hardware: HardwareSpec, placement: PlacementSpec) -> int:
    """`placement.num_gpus` as a number. Raises InputError: no whole replicas, or one larger than the NVLink domain."""
    size, domain = placement.tensor_parallel, int(hardware.nvlink.domain_gpus.value)
    if size > domain:
        without = " (no NVLink)" if hardware.nvlink.bytes_per_s.value == 0 else ""
        raise InputError(
            f"placement.tensor_parallel {size} exceeds the {domain} GPUs of a {hardware.name} NVLink domain{without}"
        )
    num_gpus = placement.num_gpus or size
    if num_gpus % size:
        below = num_gpus // size * size
        nearest = f"{below} and {below + size}" if below else str(size)
        raise InputError(
            f"placement.num_gpus {num_gpus} is no multiple of placement.tensor_parallel {size}; nearest: {nearest}"
        )
    return num_gpus


def _require_heads(model: ModelSpec, tensor_parallel: int) -> None:
    q, kv = model.num_q_heads, model.num_kv_heads
    fits = [n for n in range(1, q + 1) if q % n == 0 and (kv % n == 0 or n % kv == 0)]
    if tensor_parallel not in fits:
        below = max(n for n in fits if n <= tensor_parallel)
        above = [n for n in fits if n > tensor_parallel][:1]
        raise InputError(
            f"placement.tensor_parallel {tensor_parallel} does not divide the {q} query and {kv} KV heads of "
            f"{model.name}; nearest {'are' if above else 'is'} {' and '.join(map(str, (below, *above)))}"
        )
