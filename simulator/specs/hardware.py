"""A hardware profile: one GPU, its host link, its host and how fast its kernels run, each figure with a source.

`oasis-sim calibrate` writes this schema as YAML; the catalog ships profiles of it in `simulator/data/hardware`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from simulator.specs.base import Figure, PositiveFloat, PositiveInt, Spec

KernelKind = Literal["gemm", "attention", "score", "topk"]
SideKind = Literal["gemm", "attention", "score", "topk", "ce_h2d", "ce_d2h", "gather"]


class GpuFigures(Spec):
    hbm_bytes: Figure
    hbm_bytes_per_s: Figure
    """Nominal."""
    hbm_read_bytes_per_s: Figure
    """What a streaming read of GBs sustains."""
    bf16_flops: Figure
    """Nominal dense."""
    bf16_sustained_flops: Figure
    """What a large matrix product sustains."""
    l2_bytes: Figure
    num_sms: Figure


class MeasuredGemm(Spec):
    """One [m, k] x [k, n] product in bf16, timed in a graph on the device."""

    m: PositiveInt
    n: PositiveInt
    k: PositiveInt
    seconds: PositiveFloat


class TimedKernel(Spec):
    """One attention, scoring, top-K or plan launch in bf16, timed in a graph on the device."""

    kind: Literal["attention", "score", "topk", "plan"]
    heads: PositiveInt
    """Batch x KV heads."""
    size: PositiveInt
    """Tokens per KV head (attention), blocks (score, topk), slots (plan)."""
    rows: PositiveInt = 1
    """Query rows per request (attention)."""
    head_dim: PositiveInt | None = None
    """Elements of a key (attention, score); null: the time does not ask for it."""
    kept: PositiveInt | None = None
    """K (topk, plan); these kernels pad K and size to powers of two."""
    seconds: PositiveFloat


class KernelFigures(Spec):
    """Time of a kernel inside a captured graph: `t0` + bytes / rate (and flops / rate where larger)."""

    table: str | None = None
    """Measured GEMM and dense decode-attention tables (`h100_sxm`, `h200_sxm`), used where they reach."""
    gemms: tuple[MeasuredGemm, ...] = ()
    """Products timed by calibration: they come before the table and the fit for their (n, k), linear in m between."""
    timed: tuple[TimedKernel, ...] = ()
    """Launches timed by calibration: they come before the table and the fits, bilinear in heads and size between."""
    switch_s: Figure | None = None
    """What a launch costs more after another kernel than after itself; added to every kernel. Null: not charged."""
    side_streams_s: Figure | None = None
    """What a layer's forks to side streams and joins with them cost the compute stream. Null: not charged."""
    small_kernel_s: Figure | None = None
    """A kernel that is mostly its launch (activation, KV append): two per layer. Null: not charged."""
    gemm_t0_s: Figure
    gemm_bytes_per_s: Figure
    attention_t0_s: Figure
    attention_bytes_per_s: Figure
    """Split-K GQA decode attention over the working set or the whole KV."""
    score_t0_s: Figure
    score_bytes_per_s: Figure
    topk_t0_s: Figure
    topk_s_per_score: Figure
    """Seconds per block score, over batch x KV heads x blocks."""
    plan_t0_s: Figure
    plan_s_per_slot: Figure
    """Residency plan (diff, cap, victims): seconds per slot, over batch x KV heads x K."""
    scatter_bytes_per_s: Figure
    """HBM-to-HBM scatter of packed blocks into slots, counting bytes written."""
    sampling_t0_s: Figure
    sampling_bytes_per_s: Figure


class LinkFigures(Spec):
    """Host link of one GPU."""

    h2d_bytes_per_s: Figure
    d2h_bytes_per_s: Figure
    duplex_h2d_bytes_per_s: Figure
    """H2D while D2H runs."""
    duplex_d2h_bytes_per_s: Figure
    ce_op_s: Figure
    """Copy-engine time per operation, back to back in a graph."""
    ce_batched_op_s: Figure
    """The same inside one batched submission."""
    ce_enqueue_s: Figure
    """CPU time to enqueue one copy: bounds `ce-per-block`."""
    plan_to_host_s: Figure
    """From the plan's last write to a copy engine's start on its ids: D2H, CPU wake-up, enqueue."""
    gather_t0_s: Figure
    """Launch of a gather kernel in a graph."""
    gather_bytes_per_s: Figure
    """Ceiling of SM reads of pinned host memory."""
    gather_cta_bytes_per_s: Figure
    """One thread block's rate: bytes in flight / read latency."""
    gather_latency_s: Figure
    """Read latency of local pinned memory."""
    gather_ctas: PositiveInt | None = None
    """Thread blocks of the gather that was timed: what a policy has that names none. Null: its own default."""


class HostFigures(Spec):
    dram_bytes: Figure
    """Per host, pinnable for KV."""
    num_sockets: Figure
    gpus_per_socket: Figure
    gpus_per_switch: Figure
    """GPUs that share one PCIe switch uplink."""
    switch_bytes_per_s: Figure
    dram_bytes_per_s: Figure
    """Per socket, for device reads."""
    inter_socket_bytes_per_s: Figure
    """One direction, shared by all far traffic."""
    far_latency_s: Figure
    """Added to a read that crosses sockets."""
    far_h2d_bytes_per_s: Figure
    """One GPU's copy-engine ceiling from the far socket."""
    pack_bytes_per_s: Figure
    """CPU packing of scattered blocks into one staging buffer (`ce-contiguous`)."""


class NvlinkFigures(Spec):
    """Links between the GPUs of a host."""

    bytes_per_s: Figure
    """One GPU, one direction; 0: none."""
    domain_gpus: Figure
    """GPUs that reach each other at that rate: the largest tensor-parallel replica. 1 without NVLink."""
    allreduce_t0_s: Figure
    """One phase of an all-reduce in a graph: launch, and a barrier across the GPUs."""


class MessageRate(Spec):
    """What one stream of messages of a size reaches."""

    message_bytes: PositiveInt
    bytes_per_s: Figure


class NicFigures(Spec):
    """Network adapters of a host, one direction each way at full rate, and the memory behind them."""

    per_socket: Figure
    bytes_per_s: Figure
    """Large messages."""
    messages: tuple[MessageRate, ...] = Field(min_length=1)
    """By message size, ascending: seconds a message are linear between, and beyond the ends."""
    t0_s: Figure
    """From a posted request to its first byte."""
    pool_bytes: Figure
    """Memory of other machines that a host may keep KV in."""


class NvmeFigures(Spec):
    """Drives of one socket together, or of a storage target behind the network."""

    bytes: Figure
    read_bytes_per_s: Figure
    write_bytes_per_s: Figure
    read_iops: Figure
    write_iops: Figure
    t0_s: Figure
    """From a posted read to its first byte."""


class PairRate(Spec):
    """How two kinds of work slow each other, from a graph of just these two."""

    kernel: KernelKind
    beside: SideKind
    gather_ctas: int | None = Field(default=None, gt=0)
    """Grid of the gather when `beside` is gather."""
    batch_size: PositiveInt | None = None
    """Requests that the kernels served; null: not told, holds where no row of the pair names a batch."""
    kv_heads: PositiveInt | None = None
    """KV heads of a request that the kernels served: work of the same heads slows alike. Null: of any number."""
    kernel_rate: Figure
    """Rate of `kernel` while both run, 1 = alone."""
    beside_rate: Figure
    """Rate of the other."""
    launch_wait_s: Figure | None = None
    """How long each launch of a gather beside the kernel waits for a multiprocessor; null: part of `beside_rate`."""
    kernel_s: PositiveFloat | None = None
    """One launch of the kernel, where `launch_wait_s` is told."""


class HardwareSpec(Spec):
    name: str
    device: str
    """As the driver names it."""
    driver: str | None = None
    date: str | None = None
    """Of the calibration; null for a catalog profile put together from public figures."""
    gpu: GpuFigures
    kernels: KernelFigures
    link: LinkFigures
    host: HostFigures
    nvlink: NvlinkFigures
    nic: NicFigures
    nvme: NvmeFigures
    pairs: tuple[PairRate, ...] = ()
    """Pairs not listed do not slow each other."""
