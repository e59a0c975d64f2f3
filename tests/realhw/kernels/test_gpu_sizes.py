"""The kernels at the sizes that the harness runs them: Qwen3-8B heads, 32K tokens, bfloat16."""

import pytest
import torch

from realhw.kernels.attention import reference as attention_reference
from realhw.kernels.attention.api import attention_scratch, choose_splits, decode_attention
from realhw.kernels.gather.api import gather_blocks
from realhw.kernels.gather.config import GatherConfig
from realhw.kernels.score import reference as score_reference
from realhw.kernels.score.api import make_scores, score_blocks
from realhw.kernels.topk import reference as topk_reference
from realhw.kernels.topk.api import topk_blocks

pytestmark = pytest.mark.gpu
BATCH, HEADS, GROUP, HEAD_DIM, BLOCK = 4, 8, 4, 128, 16


def random(*shape):
    return torch.randn(*shape, device="cuda").bfloat16()


@pytest.mark.parametrize("width", [129, 2048])
def test_attention_at_size(width):
    query, pool = random(BATCH, 2, HEADS * GROUP, HEAD_DIM), random(BATCH * HEADS * width, 2, BLOCK, HEAD_DIM)
    table = torch.randperm(pool.shape[0], device="cuda").int().view(BATCH, HEADS, width)
    counts = torch.full((BATCH, HEADS), width, dtype=torch.int32, device="cuda")
    last = torch.tensor([16, 1, 7, 15], dtype=torch.int32, device="cuda")
    splits = choose_splits(BATCH * HEADS, width * BLOCK, 64, 132)
    assert splits > 1
    scratch = attention_scratch(BATCH, HEADS, HEAD_DIM, splits, "cuda")
    truth = attention_reference.decode_attention(query, pool, table, counts, last)
    for _ in range(3):
        out = torch.full_like(query, float("nan"))
        decode_attention(query, pool, table, counts, last, out, scratch, splits)
        assert float((out.double() - truth).norm() / truth.norm()) < 5e-3


@pytest.mark.parametrize("n_max", [2048, 2060])
def test_scores_and_top_k_at_size(n_max):
    metadata = random(BATCH, HEADS, n_max, 2, HEAD_DIM).sort(dim=3).values.contiguous()
    query = random(BATCH, HEADS * GROUP, HEAD_DIM)
    num_blocks = torch.tensor([n_max, 2047, 1000, 65], dtype=torch.int32, device="cuda")
    scores = make_scores(BATCH, HEADS, n_max, "cuda").fill_(float("nan"))
    score_blocks(query, metadata, num_blocks, scores)
    truth = score_reference.score_blocks(query, metadata, num_blocks, torch.float64)
    finite = torch.isfinite(truth)
    assert torch.equal(torch.isfinite(scores), finite)
    assert float((scores - truth)[finite].norm() / truth[finite].norm()) < 1e-5
    expected = topk_reference.topk_blocks(scores, num_blocks, 128)
    for num_warps in (0, 1, 2, 8):
        ids = torch.full((BATCH, HEADS, 128), -77, dtype=torch.int32, device="cuda")
        topk_blocks(scores, num_blocks, ids, num_warps)
        assert torch.equal(ids, expected)


@pytest.mark.parametrize("config", [GatherConfig(), GatherConfig(32, 1 << 15, 8), GatherConfig(6, 0, 4)])
def test_gather_at_size_is_bit_exact(config):
    host = torch.empty(1, 1, 1, 4096, 2, BLOCK, HEAD_DIM, dtype=torch.bfloat16, pin_memory=True)
    host.view(torch.int32).random_()
    pool = torch.zeros(2048, 2, BLOCK, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    entries = torch.zeros(1500, 3, dtype=torch.int32, device="cuda")
    entries[:, 1] = torch.randint(0, 4096, (1500,), device="cuda")
    entries[:, 2] = torch.randperm(2047, device="cuda")[:1500]
    gather_blocks(host, pool, entries, torch.tensor([1500], dtype=torch.int32, device="cuda"), 0, 2048, config)
    expected = host.view(4096, -1)[entries[:, 1].cpu().long()].view(torch.int16)
    assert torch.equal(pool[entries[:, 2].long()].view(1500, -1).view(torch.int16).cpu(), expected)
