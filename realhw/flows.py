"""What a decode step runs: which blocks attention reads, who chooses them, and when missing ones are fetched.

Missing blocks arrive by the zero-copy gather or by copy engines (`realhw.transfers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from realhw.geometry import ModelGeometry
from realhw.kernels.gather.config import DEFAULT as GATHER
from realhw.kernels.gather.config import GatherConfig
from simulator.fetch_cap import allowed_blocks, exact_share
from traces.errors import InputError

Kind = Literal["dense", "quest", "on-demand", "lookahead"]
Transport = Literal["gather", "ce-batched", "ce-contiguous"]


@dataclass(frozen=True, slots=True)
class Flow:
    """One way to decode.

    dense: the whole KV in HBM, all of it read. quest: the same, top-K read. on-demand: K blocks in HBM, missing ones
    fetched before attention. lookahead: a plan of step t fetches for step t + k on side streams.
    """

    kind: Kind
    num_kept: int = 128
    """K blocks per KV head."""
    slack_blocks: int = 0
    block_size_tokens: int = 16
    fetch_cap: float = 1.0
    lookahead_k: int = 1
    """Steps ahead; only with kind lookahead."""
    draft_rows: int = 0
    """Extra rows per request in the layer stack; their query ranks. 0: the real row's query ranks (previous step)."""
    draft_head: bool = False
    """Run an EAGLE-3 head before layer 0, `draft_rows` passes."""
    gather: GatherConfig = GATHER
    transport: Transport = "gather"
    """ce-batched: one submission of contiguous runs. ce-contiguous: the CPU packs, a kernel scatters into the slots."""

    def __post_init__(self) -> None:
        if self.kind != "lookahead" and (self.draft_rows or self.slack_blocks):
            raise InputError(f"flow {self.kind}: draft rows and slack slots belong to lookahead")
        if not self.moves and self.transport != "gather":
            raise InputError(f"flow {self.kind}: moves nothing, transport {self.transport} has no meaning")
        if self.draft_head and not self.draft_rows:
            raise InputError("flow: a draft head needs draft rows")
        if self.lookahead_k < 1 or self.num_kept < 1:
            raise InputError(f"flow: lookahead_k {self.lookahead_k}, K {self.num_kept}, need at least 1")

    @property
    def moves(self) -> bool:
        """Whether blocks come from the host."""
        return self.kind in ("on-demand", "lookahead")

    @property
    def left_multiprocessors(self) -> int:
        """Multiprocessors that products are told to leave free: as many as the default gather beside them holds.

        A larger grid's are not: leaving 8 or more slows products at small batches by 5 %.
        """
        return GATHER.num_ctas if self.kind == "lookahead" and self.transport == "gather" else 0

    @property
    def distance(self) -> int:
        """Steps between a plan and its use; 0 on demand."""
        return self.lookahead_k if self.kind == "lookahead" else 0

    @property
    def num_slots(self) -> int:
        return self.num_kept + self.slack_blocks

    @property
    def rows_per_request(self) -> int:
        return 1 + self.draft_rows

    def allowed(self, num_steps: int) -> list[int]:
        """New blocks per KV head that each step's plan may fetch."""
        share = exact_share(self.fetch_cap)
        return [min(int(n), self.num_kept) for n in allowed_blocks(share, self.num_kept, num_steps)]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a run needs."""

    hbm_bytes: int
    host_bytes: int


def footprint(g: ModelGeometry, flow: Flow, batch_size: int, context_tokens: int, num_steps: int) -> Footprint:
    """HBM and pinned bytes of a run; the host holds each request's whole KV (less where requests share it)."""
    size = flow.block_size_tokens
    heads = batch_size * g.num_kv_heads
    blocks = -(-(context_tokens + num_steps) // size)
    per_head = flow.num_slots + 1 if flow.moves else blocks
    weights = sum(n * k for n, k in g.layer_weight_shapes().values()) * g.num_layers + g.hidden_size * g.vocab_size
    metadata = 0 if flow.kind == "dense" else 4 * g.head_dim * blocks
    kv = g.num_layers * heads * (per_head * g.block_bytes(size) + metadata)
    draft = heads * blocks * g.block_bytes(size) if flow.draft_head else 0
    host = g.num_layers * heads * blocks * g.block_bytes(size) if flow.moves else 0
    staging = 0
    if flow.transport == "ce-contiguous":
        rings = (flow.distance + 1) * (g.num_layers if flow.distance else 1)
        staging = rings * heads * max(flow.allowed(num_steps), default=0) * g.block_bytes(size)
    return Footprint(2 * weights + kv + draft + staging, host)


def largest_batch(g: ModelGeometry, flow: Flow, context_tokens: int, num_steps: int, have_bytes: int) -> int:
    """Most requests whose run fits in `have_bytes` of HBM; 0 when the weights alone do not."""
    one, two = (footprint(g, flow, b, context_tokens, num_steps).hbm_bytes for b in (1, 2))
    return max(0, 1 + (have_bytes - one) // (two - one))
