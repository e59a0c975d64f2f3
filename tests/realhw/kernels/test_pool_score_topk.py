import pytest
import torch

from realhw.kernels.pool import reference as pool_reference
from realhw.kernels.pool.api import append_token, pool_blocks
from realhw.kernels.score import reference as score_reference
from realhw.kernels.score.api import ScoreConfig, make_scores, score_blocks
from realhw.kernels.topk import reference as topk_reference
from realhw.kernels.topk.api import split_width, topk_blocks, topk_table
from simulator.timed_kernels import topk_width
from traces.errors import InputError

# The interpreter's dot does not know bfloat16.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


@pytest.mark.parametrize(("block_size", "head_dim", "dtype"), [(16, 64, HALF), (5, 16, torch.float32)])
def test_pool_blocks_is_bit_exact_with_partial_blocks(block_size, head_dim, dtype, device, generator):
    kv = torch.randn(7, 2, block_size, head_dim, device=device, generator=generator).to(dtype)
    num_tokens = torch.tensor([block_size, 1, 2, block_size, 3, block_size, 1], dtype=torch.int32, device=device)
    for i, n in enumerate(num_tokens.tolist()):
        kv[i, 0, n:] = float("nan")
    out = torch.full((7, 2, head_dim), float("nan"), dtype=dtype, device=device)
    pool_blocks(kv, num_tokens, out)
    assert torch.equal(out, pool_reference.pool_blocks(kv, num_tokens))


@pytest.mark.parametrize("whole", [False, True])
def test_append_token_fills_blocks_as_the_reference_and_as_pooling(whole, device, generator):
    batch, heads, block_size, head_dim = 3, 2, 5, 16
    slots = 5 if whole else 3
    pool = torch.full((batch * heads * slots, 2, block_size, head_dim), float("nan"), device=device)
    metadata = torch.full((batch, heads, 5, 2, head_dim), float("nan"), device=device)
    pool_ref, metadata_ref = pool.clone(), metadata.clone()
    fill_slot = torch.tensor([[0, 1], [1, -1], [0, 0]], dtype=torch.int32, device=device)
    start = torch.tensor([1, 6, 11], dtype=torch.int32, device=device)
    for step in range(block_size + 1):
        key, value = torch.randn(2, batch, heads, head_dim, device=device, generator=generator)
        where = None if whole else fill_slot
        append_token(key, value, pool, metadata, start + step, slots, where)
        pool_reference.append_token(key, value, pool_ref, metadata_ref, start + step, slots, where)
        if step == block_size - 1:
            at = torch.tensor([0, 1, 2]) if whole else torch.tensor([slots - 1] * 3)
            full = torch.stack([pool.view(batch, heads, slots, 2, -1)[b, :, at[b]] for b in range(batch)])
            pooled = torch.empty(batch * heads, 2, head_dim, device=device)
            counts = torch.full((batch * heads,), block_size, dtype=torch.int32, device=device)
            pool_blocks(full.view(-1, 2, block_size, head_dim).contiguous(), counts, pooled)
            kept = torch.stack([metadata[b, :, b] for b in range(batch)])
            assert torch.equal(kept.reshape(-1, 2, head_dim), pooled)
    assert torch.equal(pool.nan_to_num(-9), pool_ref.nan_to_num(-9))
    assert torch.equal(metadata.nan_to_num(-9), metadata_ref.nan_to_num(-9))


@pytest.mark.parametrize(
    ("group", "head_dim", "n_max", "dtype"),
    [(4, 32, 37, HALF), (3, 16, 64, torch.float32), (1, 16, 1, HALF)],
)
def test_scores_match_fp64_within_what_fp32_loses(group, head_dim, n_max, dtype, device, generator):
    batch, heads = 2, 3
    query = torch.randn(batch, heads * group, head_dim, device=device, generator=generator).to(dtype)
    bounds = torch.randn(batch, heads, n_max, 2, head_dim, device=device, generator=generator).sort(dim=3).values
    metadata = bounds.to(dtype)
    num_blocks = torch.tensor([n_max, max(1, n_max // 2)], dtype=torch.int32, device=device)
    metadata[1, :, n_max // 2 + 1 :] = float("nan")
    scores = make_scores(batch, heads, n_max, device).fill_(float("nan"))
    score_blocks(query, metadata, num_blocks, scores, ScoreConfig(block_n=16, tiles=2))
    truth = score_reference.score_blocks(query, metadata, num_blocks, torch.float64)
    eager = score_reference.score_blocks(query, metadata, num_blocks)
    finite = torch.isfinite(truth)
    assert torch.equal(torch.isfinite(scores), finite)
    error = (scores - truth)[finite].norm() / truth[finite].norm()
    lost = (eager - truth)[finite].norm() / truth[finite].norm()
    assert error <= 4 * lost + 1e-6


def test_score_reference_equals_the_corner_maximum(device):
    """The bound is the largest dot product over all corners of the box [min, max]."""
    low, high = torch.tensor([-1.0, 0.5]), torch.tensor([2.0, 0.75])
    query = torch.tensor([[[0.5, -3.0]]])
    corners = [(0.5 * a - 3.0 * b) for a in (-1.0, 2.0) for b in (0.5, 0.75)]
    got = score_reference.score_blocks(
        query, torch.stack([low, high]).view(1, 1, 1, 2, 2), torch.tensor([1], dtype=torch.int32)
    )
    assert got.item() == pytest.approx(max(corners))


@pytest.mark.parametrize(("n_max", "k"), [(37, 5), (64, 64), (130, 33), (3, 8), (260, 64)])
def test_topk_ties_go_to_the_lower_id_and_rank_order_holds(n_max, k, device, generator):
    scores = make_scores(2, 2, n_max, device)
    scores[:] = torch.randint(-3, 4, (2, 2, n_max), device=device, generator=generator).float() / 2
    scores[0, 0] = torch.randn(n_max, device=device, generator=generator)
    scores[0, 1, ::2] = -0.0
    num_blocks = torch.tensor([n_max, max(1, n_max - 7)], dtype=torch.int32, device=device)
    ids = torch.full((2, 2, k), -77, dtype=torch.int32, device=device)
    topk_blocks(scores, num_blocks, ids)
    assert torch.equal(ids, topk_reference.topk_blocks(scores, num_blocks, k))


def test_topk_table_adds_the_pool_base_and_the_open_block(device, generator):
    scores = torch.randn(2, 2, 20, device=device, generator=generator)
    num_blocks = torch.tensor([19, 3], dtype=torch.int32, device=device)
    table = torch.full((2, 2, 7), -77, dtype=torch.int32, device=device)
    counts = torch.full((2, 2), -77, dtype=torch.int32, device=device)
    topk_table(scores, num_blocks, table, counts, 20)
    ids = topk_reference.topk_blocks(scores, num_blocks, 6)
    assert counts.tolist() == [[7, 7], [4, 4]]
    for bh in range(4):
        n = int(num_blocks[bh // 2])
        expected = [bh * 20 + i for i in ids.view(4, 6)[bh].tolist() if i >= 0] + [bh * 20 + n]
        assert table.view(4, 7)[bh, : int(counts.view(4)[bh])].tolist() == expected


def test_topk_without_any_block_is_empty(device):
    ids = torch.full((1, 1, 4), -77, dtype=torch.int32, device=device)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    topk_blocks(torch.zeros(1, 1, 8, device=device), none, ids)
    assert ids.flatten().tolist() == [-1] * 4


def test_launchers_name_what_is_wrong(device):
    with pytest.raises(InputError, match="head_dim: 24, need a power of two"):
        pool_blocks(
            torch.zeros(1, 2, 4, 24, device=device),
            torch.ones(1, dtype=torch.int32, device=device),
            torch.zeros(1, 2, 24, device=device),
        )
    with pytest.raises(InputError, match="num_blocks: dtype"):
        topk_blocks(
            torch.zeros(1, 1, 8, device=device),
            torch.zeros(1, device=device),
            torch.zeros(1, 1, 4, dtype=torch.int32, device=device),
        )


def test_the_cost_model_looks_topk_up_at_the_lanes_that_run():
    for blocks in (1, 16, 64, 65, 96, 97, 250, 260, 768, 769, 1025, 2048, 2060, 4110):
        assert topk_width(blocks) == split_width(blocks)
