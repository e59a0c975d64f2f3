import pytest
import torch

from realhw.kernels.plan.api import (
    BLOCK,
    DUE,
    LEAVES,
    PlanShape,
    admit,
    make_moves,
    make_slots,
    plan_scratch,
    plan_step,
)
from realhw.kernels.plan.reference import NEVER, HeadSlots
from traces.errors import InputError

BATCH, HEADS, LAYERS, LAYER = 2, 1, 2, 1


def make_rankings(num_rows, ranked, max_blocks, seed):
    """Rows that change slowly: each is the row before with a few swaps, so that plans hit, miss and come back."""
    random = torch.Generator().manual_seed(seed)
    out = torch.empty(num_rows, LAYERS, HEADS, ranked, dtype=torch.int32)
    for layer in range(LAYERS):
        for head in range(HEADS):
            order = torch.randperm(max_blocks, generator=random)
            for row in range(num_rows):
                for _ in range(4):
                    i, j = torch.randint(0, max_blocks, (2,), generator=random).tolist()
                    order[[i, j]] = order[[j, i]]
                out[row, layer, head] = order[:ranked].int()
    return out


def expected_step(head, step, lookahead, ranking, kv_start, block_size, allowed, num_steps):
    """What one head's step moves: fetched (block, slot), evicted, attended slots of the table that it leaves."""
    kv_len = kv_start + step

    def enter(at, length):
        filled = (length - 1) // block_size - 1 if at > 0 and length > 1 and (length - 1) % block_size == 0 else None
        evicted, slot = head.enter(at, filled)
        return -1 if slot is None else slot, evicted

    fetched, evicted = [], []
    if lookahead == 0:
        fill_slot, evicted = enter(step, kv_len)
    if step + lookahead < num_steps and ranking is not None:
        num_blocks, then = -(-kv_len // block_size), -(-(kv_len + lookahead) // block_size)
        placed, gone = head.plan(step, step + lookahead, ranking, num_blocks - 1, allowed, then - num_blocks)
        fetched, evicted = fetched + placed, evicted + gone
    if lookahead:
        fill_slot, gone = enter(step + 1, kv_len + 1)
        evicted = evicted + gone
    return fetched, evicted, fill_slot, head.attended(step if lookahead == 0 else step + 1)


@pytest.mark.parametrize(
    ("lookahead", "num_kept", "slack", "ranked", "cap", "max_blocks"),
    [
        (0, 8, 0, 8, 99, 30), (1, 8, 0, 12, 2, 30), (1, 7, 3, 7, 3, 30), (3, 16, 5, 20, 4, 30), (2, 5, 0, 9, 99, 30),
        pytest.param(1, 128, 7, 128, 6, 1030, marks=pytest.mark.gpu),
        pytest.param(0, 128, 0, 160, 999, 1030, marks=pytest.mark.gpu),
    ],
)  # fmt: skip
def test_plans_equal_the_plain_rules_step_by_step(lookahead, num_kept, slack, ranked, cap, max_blocks, device):
    num_steps, block_size = 9, 4
    kv_start = torch.tensor([4 * max_blocks - 19, 4 * max_blocks - 30], dtype=torch.int32)
    rows = torch.tensor([0, 3], dtype=torch.int32)
    rankings = make_rankings(num_steps + 4, ranked, max_blocks, seed=lookahead)
    rankings[5, :, :, -2:] = -1
    shape = PlanShape(num_kept, num_kept + slack, block_size, max_blocks, num_steps)
    slots = make_slots(BATCH, HEADS, shape, device)
    heads = [HeadSlots(num_kept, num_kept + slack) for _ in range(BATCH * HEADS)]
    first = torch.full((BATCH, HEADS, num_kept), -1, dtype=torch.int32)
    for b in range(BATCH):
        for h in range(HEADS):
            head = heads[b * HEADS + h]
            head.admit(rankings[int(rows[b]), LAYER, h].tolist(), -(-int(kv_start[b]) // block_size) - 1)
            kept = [i for i in head.block if i >= 0]
            first[b, h, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
    admit(slots, first.to(device))
    assert slots[:, :, BLOCK].reshape(BATCH * HEADS, -1).tolist() == [head.block for head in heads]
    allowed = [cap + step % 2 for step in range(num_steps)]
    scratch = plan_scratch(BATCH, HEADS, shape, device)
    table = torch.full((BATCH, HEADS, num_kept + slack + 1), -5, dtype=torch.int32, device=device)
    counts = torch.full((BATCH, HEADS), -5, dtype=torch.int32, device=device)
    fill_slot = torch.full_like(counts, -5)
    clock = torch.tensor([0], dtype=torch.int32, device=device)
    gpu = [x.to(device) for x in (rankings, rows, torch.tensor(allowed, dtype=torch.int32), clock, kv_start)]
    num_moved = num_evicted = num_filled = 0
    for step in range(num_steps):
        moves = make_moves(BATCH * HEADS, shape, device)
        gpu[3][0] = step - 1
        plan_step(
            shape, slots, *gpu, table, counts, fill_slot, moves, scratch,
            offset=1, layer=LAYER, lookahead_k=lookahead, num_steps=num_steps,
        )  # fmt: skip
        fetched, evicted = set(), set()
        for bh, head in enumerate(heads):
            b, h = divmod(bh, HEADS)
            due = min(step + lookahead, num_steps - 1)
            moved, gone, fills, attended = expected_step(
                head, step, lookahead, rankings[int(rows[b]) + due, LAYER, h].tolist(), int(kv_start[b]), block_size,
                allowed[step], num_steps,
            )  # fmt: skip
            fetched |= {(bh, block, slot) for block, slot in moved}
            evicted |= {(bh, block) for block in gone}
            assert int(fill_slot[b, h]) == fills
            num_filled += fills >= 0
            base = bh * (num_kept + slack + 1)
            count = int(counts[b, h])
            assert table[b, h, :count].tolist() == [base + s for s in attended] + [base + num_kept + slack]
            state = slots[b, h]
            assert state[BLOCK].tolist() == head.block
            assert state[LEAVES].tolist() == head.leaves
            held = [s for s in range(num_kept + slack) if head.block[s] >= 0]
            assert state[DUE][held].tolist() == [head.due[s] for s in held]
        got = [tuple(x) for x in moves.fetch[: int(moves.counts[0])].tolist()]
        gone = [tuple(x) for x in moves.evict[: int(moves.counts[1])].tolist()]
        assert len(got) == len(set(got))
        assert len(gone) == len(set(gone))
        assert (set(got), set(gone)) == (fetched, evicted)
        num_moved, num_evicted = num_moved + len(got), num_evicted + len(gone)
    assert num_moved > 6
    assert num_evicted > 5
    assert num_filled >= 2


def test_negative_rows_issue_no_plan(device):
    shape = PlanShape(4, 4, 4, 16, 8)
    slots = make_slots(1, 1, shape, device)
    admit(slots, torch.tensor([[[3, 1, 2, 0]]], dtype=torch.int32, device=device))
    moves = make_moves(1, shape, device)
    table, counts = (torch.zeros(1, 1, n, dtype=torch.int32, device=device) for n in (5, 1))

    def vector(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    rankings = torch.full((1, 1, 1, 4), 9, dtype=torch.int32, device=device)
    plan_step(
        shape, slots, rankings, vector(-5), vector(4, 4), vector(0), vector(50), table, counts[:, :, 0],
        counts[:, :, 0].clone(), moves, plan_scratch(1, 1, shape, device),
        offset=0, layer=0, lookahead_k=1, num_steps=8,
    )  # fmt: skip
    assert moves.counts.tolist() == [0, 0]
    assert slots[0, 0, BLOCK].tolist() == [0, 1, 2, 3]
    assert slots[0, 0, LEAVES].tolist() == [NEVER] * 4
    assert table[0, 0].tolist() == [0, 1, 2, 3, 4]


def test_keys_that_overflow_are_refused(device):
    shape = PlanShape(4, 4, 4, 1 << 20, 1 << 14)
    with pytest.raises(InputError, match="overflow a 30-bit victim key"):
        plan_step(
            shape, make_slots(1, 1, shape, device), *(torch.zeros(1, 1, 1, 4, dtype=torch.int32, device=device),),
            *(torch.zeros(1, dtype=torch.int32, device=device) for _ in range(4)),
            torch.zeros(1, 1, 5, dtype=torch.int32, device=device),
            torch.zeros(1, 1, dtype=torch.int32, device=device),
            torch.zeros(1, 1, dtype=torch.int32, device=device), make_moves(1, shape, device),
            plan_scratch(1, 1, shape, device), offset=0, layer=0, lookahead_k=1, num_steps=4,
        )  # fmt: skip
