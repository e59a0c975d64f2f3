"""One point: a system on a model, a GPU, a trace and a workload."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from simulator.specs.base import Fraction, Name, NonNegativeInt, PositiveInt, Spec
from simulator.specs.serving import ServingSpec

MAX_OVERHEAD_S = 60.0
"""A step that waits a minute for the CPU is a mistake in the unit."""


MAX_BATCH_SIZE = 10_000_000
"""Bytes of so many requests still are integers that every file format holds."""


class WorkloadSpec(Spec):
    batch_size: Annotated[int, Field(gt=0, le=MAX_BATCH_SIZE, strict=True)] = 32
    """Requests decoded together (closed batch), per replica."""
    context_tokens: PositiveInt | None = None
    """KV length at the first decode step. Null: the trace group's own."""
    output_tokens: PositiveInt = 128
    """Decode steps simulated. Past the trace's last row, demand rows repeat."""


class PlacementSpec(Spec):
    host_numa: Literal["local", "far", "interleave"] = "local"
    """Socket whose DRAM holds the full KV, or through which it comes, seen from the GPU."""
    kv_tier: Literal["host", "remote", "nvme", "nvme-of"] = "host"
    """Where the full KV lives: the host's DRAM, DRAM of another machine behind the network, the host's drives, or
    drives behind the network."""
    remote_path: Literal["staged", "direct"] = "staged"
    """How blocks come from beyond the host: into host memory and on as if they had been there, or by the NIC or drive
    into their slots in HBM."""
    nic_numa: Literal["local", "far"] = "local"
    """Socket of the NIC that serves a GPU, seen from the GPU."""
    tensor_parallel: PositiveInt = 1
    """GPUs of one replica: heads, feed-forward and vocabulary are split, two all-reduces a layer join them."""
    num_gpus: PositiveInt | None = None
    """GPUs of the host in use, a multiple of `tensor_parallel`: data-parallel replicas, each with its own batch,
    sharing switches, sockets and DRAM. Null: one replica."""


IN_HOST_MEMORY = PlacementSpec()
"""The default: one GPU, its KV in DRAM of its socket."""


class EngineSpec(Spec):
    software_overhead_s: Annotated[float, Field(ge=0, le=MAX_OVERHEAD_S, strict=True)] = 0.0
    """CPU time per step that the GPU waits for. 0 is an assumption: a captured graph with asynchronous scheduling."""
    hbm_utilization: Fraction = 0.9
    """Share of HBM that may be used. Source: vLLM's default gpu_memory_utilization."""


class MappingSpec(Spec):
    rule: Literal["auto", "identity", "depth-cyclic"] = "auto"
    """How another model's trace serves: layers by relative depth, KV heads cyclically. auto: identity when the
    geometry is the trace's own, else depth-cyclic, and the result says which."""
    layers: Literal["shared", "all"] = "shared"
    """Trace layers drawn from: those recorded at every block size of the trace (comparable across block sizes),
    or all that the block size at hand has."""


class ObjectiveSpec(Spec):
    maximize: str = "throughput_tokens_per_s"
    """Result column that `best` maximises."""
    min_recall: Fraction | None = None
    """Least recall of an admissible point. Null: that of uncapped on-demand retrieval at the same budget and block
    size, minus 0.01 (an assumption)."""


class ExperimentSpec(Spec):
    """Everything that decides one point's result. Names refer to the catalog or are paths."""

    name: Name | None = None
    """Label of the run folder; does not change a result."""
    system: Name = "oasiskv"
    model: Name = "Qwen3-8B"
    hardware: Name = "h100-sxm"
    trace: Name = "smollm2-135m-reasoning"
    trace_group: Name | None = None
    """Request of the trace that is replayed. Null: the first whose context is `workload.context_tokens`, if given; in
    a serving run, for each request the one nearest in context."""
    mapping: MappingSpec = MappingSpec()
    policy: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the system's policy (keys of PolicySpec)."""
    workload: WorkloadSpec = WorkloadSpec()
    """The closed batch; a serving run has requests of its own."""
    serving: ServingSpec | None = None
    """Null: a closed batch is decoded. Any key of it makes the point a serving run."""
    placement: PlacementSpec = PlacementSpec()
    engine: EngineSpec = EngineSpec()
    objective: ObjectiveSpec = ObjectiveSpec()
    seed: NonNegativeInt = 0
    """Draws each request's offset into the demand rows, and the random predictor."""
