import pytest
import torch

from realhw.kernels.attention import reference
from realhw.kernels.attention.api import AttentionConfig, attention_scratch, choose_splits, decode_attention
from traces.errors import InputError

HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def make_case(rows, group, block_size, head_dim, width, dtype, device, generator):
    batch, heads, num_blocks = 2, 2, 23
    query = torch.randn(batch, rows, heads * group, head_dim, device=device, generator=generator).to(dtype)
    pool = torch.randn(num_blocks, 2, block_size, head_dim, device=device, generator=generator).to(dtype)
    table = torch.randint(0, num_blocks, (batch, heads, width), device=device, generator=generator, dtype=torch.int32)
    counts = torch.tensor([[width, 1], [2, max(1, width - 1)]], dtype=torch.int32, device=device)
    last = torch.tensor([block_size, 1], dtype=torch.int32, device=device)
    return query, pool, table, counts, last


@pytest.mark.parametrize(
    ("rows", "group", "block_size", "head_dim", "width", "splits", "dtype"),
    [
        (2, 4, 16, 32, 9, 3, HALF),
        (1, 3, 4, 16, 7, 1, torch.float32),
        (2, 1, 5, 16, 11, 2, torch.float32),
        (1, 16, 64, 16, 2, 4, HALF),
    ],
)
def test_attention_matches_fp64_within_what_eager_loses(
    rows, group, block_size, head_dim, width, splits, dtype, device, generator
):
    query, pool, table, counts, last = make_case(rows, group, block_size, head_dim, width, dtype, device, generator)
    used = set()
    for b in range(2):
        for h in range(2):
            used |= set(table[b, h, : int(counts[b, h])].tolist())
    for block in set(range(pool.shape[0])) - used:
        pool[block] = float("nan")
    truth = reference.decode_attention(query, pool, table, counts, last)
    eager = reference.decode_attention(query, pool, table, counts, last, dtype)
    scratch = attention_scratch(2, 2, head_dim, splits, device)
    scratch.acc.fill_(float("nan"))
    scratch.ml.fill_(float("nan"))
    for _ in range(2):  # the second launch needs arrivals to be zero again
        out = torch.full_like(query, float("nan"))
        config = AttentionConfig(block_n=32, num_warps=2)
        decode_attention(query, pool, table, counts, last, out, scratch, splits, config)
        error = (out.double() - truth).norm() / truth.norm()
        lost = (eager.double() - truth).norm() / truth.norm()
        assert error <= 2 * lost + 1e-6
    assert int(scratch.arrivals.abs().sum()) == 0


def test_every_row_reads_the_same_keys(device, generator):
    """A draft row with the first row's query gives the first row's output."""
    query, pool, table, counts, last = make_case(2, 2, 4, 16, 5, torch.float32, device, generator)
    query[:, 1] = query[:, 0]
    out = torch.full_like(query, float("nan"))
    decode_attention(query, pool, table, counts, last, out, attention_scratch(2, 2, 16, 1, device), 1)
    assert torch.equal(out[:, 0], out[:, 1])


def test_splits_follow_the_grid_and_the_work():
    assert choose_splits(512, 2048, 64, 132) == 1
    assert choose_splits(256, 2048, 64, 132) == 2
    assert choose_splits(8, 2048, 64, 132) == 16
    assert choose_splits(8, 64, 64, 132) == 1
    assert choose_splits(256, 2048, 64, 132, rows=1) == 4


def test_too_many_rows_are_refused(device):
    query = torch.zeros(1, 5, 4, 16, device=device)
    table = torch.zeros(1, 1, 1, dtype=torch.int32, device=device)
    ones = torch.ones(1, dtype=torch.int32, device=device)
    with pytest.raises(InputError, match="rows x query heads per KV head: 20"):
        decode_attention(
            query, torch.zeros(1, 2, 4, 16, device=device), table, ones.view(1, 1), ones, query.clone(),
            attention_scratch(1, 1, 16, 1, device), 1,
        )  # fmt: skip
