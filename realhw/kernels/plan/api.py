"""Residency plan of every KV head of one layer: which blocks to fetch into which slots, and what attention reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from realhw.kernels.checks import require_contiguous, require_dtype, require_range, require_shape
from realhw.kernels.plan.kernel import residency_kernel
from realhw.kernels.plan.reference import NEVER
from traces.errors import InputError

BLOCK, DUE, LEAVES, LAST_SELECTED = range(4)
"""Rows of a head's slots."""


@dataclass(frozen=True, slots=True)
class PlanShape:
    """Sizes that a plan needs: K kept blocks, K + slack slots, block size, ids below `max_blocks`, steps at most."""

    num_kept: int
    num_slots: int
    block_size_tokens: int
    max_blocks: int
    max_steps: int

    @property
    def key_bits(self) -> int:
        """Bits of the victim key (last_selected + 1) * 2^b + id."""
        return ((self.max_steps + 2) * self.id_range - 1).bit_length()

    @property
    def id_range(self) -> int:
        return 1 << max(4, (self.max_blocks - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Moves:
    """What plans decided, appended in no particular order. Counts must be zero before the first plan of a step.

    fetch int32 [max, 3]: request * H + head, block, slot; evict int32 [max, 2]: request * H + head, block; counts
    int32 [2]: rows of fetch, rows of evict.
    """

    fetch: torch.Tensor
    evict: torch.Tensor
    counts: torch.Tensor

    @property
    def fetch_count(self) -> torch.Tensor:
        """int32 [1], as `gather_blocks` takes it."""
        return self.counts[:1]


def make_moves(num_heads: int, shape: PlanShape, device: torch.device | str) -> Moves:
    """Room for everything that one plan of `num_heads` heads can move."""
    most = num_heads * (shape.num_kept + 1)
    return Moves(
        torch.empty(most, 3, dtype=torch.int32, device=device),
        torch.empty(most, 2, dtype=torch.int32, device=device),
        torch.zeros(2, dtype=torch.int32, device=device),
    )


def make_slots(batch_size: int, num_kv_heads: int, shape: PlanShape, device: torch.device | str) -> torch.Tensor:
    """Empty slots of one layer, int32 [B, H, 4, S]: block, due, leaves, last_selected."""
    slots = torch.empty(batch_size, num_kv_heads, 4, shape.num_slots, dtype=torch.int32, device=device)
    for row, value in ((BLOCK, -1), (DUE, 0), (LEAVES, NEVER), (LAST_SELECTED, -1)):
        slots[:, :, row] = value
    return slots


def admit(slots: torch.Tensor, ids: torch.Tensor) -> None:
    """Make ids int32 [B, H, n] (−1: none) resident from step 0, ascending in slots 0, 1, …"""
    big = torch.where(ids < 0, torch.full_like(ids, NEVER), ids).sort(dim=-1).values
    slots[:, :, BLOCK, : ids.shape[2]] = torch.where(big == NEVER, torch.full_like(big, -1), big)


def plan_scratch(batch_size: int, num_kv_heads: int, shape: PlanShape, device: torch.device | str) -> torch.Tensor:
    """Work space of `plan_step`."""
    width = shape.id_range + _padded(shape.num_slots)
    return torch.empty(batch_size * num_kv_heads, width, dtype=torch.int32, device=device)


def plan_step(
    shape: PlanShape,
    slots: torch.Tensor,
    rankings: torch.Tensor,
    rows: torch.Tensor,
    allowed: torch.Tensor,
    clock: torch.Tensor,
    kv_start: torch.Tensor,
    table: torch.Tensor,
    counts: torch.Tensor,
    fill_slot: torch.Tensor,
    moves: Moves,
    scratch: torch.Tensor,
    *,
    offset: int,
    layer: int,
    lookahead_k: int,
    num_steps: int,
    num_warps: int = 0,
) -> None:
    """Plan step t = clock[0] + offset of one layer, in place.

    lookahead_k 0 (on demand): let the filled block in, plan with due t, write the table of step t.
    lookahead_k >= 1: plan with due t + k, leaving room for the blocks that fill by then; then let the block filled by
    step t in, write the table of step t + 1.

    slots from `make_slots`; rankings int32 [rows, layers, H, M], rank order, −1 padded: request b's ranking for due
    step u is row rows[b] + u, negative rows issuing no plan; rows int32 [B]; allowed int32 [>= num_steps], new blocks
    per head; kv_start int32 [B], KV length at step 0; table int32 [B, H, >= S + 1] and counts int32 [B, H] as
    `decode_attention` takes them, the pool holding S slots and the open block per head. No plan is due at num_steps
    or later. fill_slot int32 [B, H]: where the append of step t (on demand) or t + 1 puts the block that is now full,
    −1 for none. Raises `InputError`.
    """
    batch, heads, _, num_slots = slots.shape
    for name, tensor in (
        ("slots", slots), ("rankings", rankings), ("rows", rows), ("allowed", allowed), ("clock", clock),
        ("kv_start", kv_start), ("table", table), ("counts", counts), ("fill_slot", fill_slot), ("scratch", scratch),
        ("moves.fetch", moves.fetch), ("moves.evict", moves.evict), ("moves.counts", moves.counts),
    ):  # fmt: skip
        require_dtype(name, tensor, torch.int32)
    require_shape("slots", slots, (batch, heads, 4, shape.num_slots))
    require_shape("rankings", rankings, (*rankings.shape[:2], heads, rankings.shape[3]))
    require_shape("rows", rows, (batch,))
    require_shape("kv_start", kv_start, (batch,))
    require_shape("counts", counts, (batch, heads))
    require_shape("fill_slot", fill_slot, (batch, heads))
    require_shape("moves.counts", moves.counts, (2,))
    require_shape("scratch", scratch, (batch * heads, shape.id_range + _padded(num_slots)))
    require_contiguous(slots=slots, rankings=rankings, table=table, counts=counts, fill_slot=fill_slot, scratch=scratch)
    require_range("num_kept", shape.num_kept, 1, shape.num_slots)
    require_range("layer", layer, 0, rankings.shape[1] - 1)
    require_range("num_steps", num_steps, 1, shape.max_steps)
    if table.shape[:2] != (batch, heads) or table.shape[2] < num_slots + 1:
        raise InputError(f"table: shape {tuple(table.shape)}, need [{batch}, {heads}, >= {num_slots + 1}]")
    if shape.key_bits > 30:
        raise InputError(f"plan: {shape.max_steps} steps of {shape.max_blocks} blocks overflow a 30-bit victim key")
    residency_kernel[(batch * heads,)](
        slots, rankings, rows, allowed, clock, kv_start, table, counts, fill_slot,
        moves.fetch, moves.evict, moves.counts, scratch,
        offset, layer, lookahead_k, num_steps, rankings.stride(0), rankings.stride(1), heads,
        shape.num_kept, num_slots, rankings.shape[3], table.shape[2],
        ON_DEMAND=lookahead_k == 0, P=shape.block_size_tokens, NB=shape.id_range, SP=_padded(num_slots),
        MP=_padded(rankings.shape[3]), KEY_BITS=shape.key_bits,
        num_warps=num_warps or max(1, min(8, _padded(max(num_slots, rankings.shape[3])) // 256)),
    )  # fmt: skip


def _padded(count: int) -> int:
    return max(16, 1 << (count - 1).bit_length())
