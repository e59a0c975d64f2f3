import pytest
import torch

from realhw.kernels.gather import reference as gather_reference
from realhw.kernels.gather.api import gather_blocks
from realhw.kernels.gather.config import GatherConfig
from realhw.kernels.writeback import reference as writeback_reference
from realhw.kernels.writeback.api import write_back
from traces.errors import InputError


def host_kv(requests, layers, heads, blocks, block_size, head_dim, generator, device):
    kv = torch.randn(requests, layers, heads, blocks, 2, block_size, head_dim, device=device, generator=generator)
    kv = kv.to(torch.bfloat16).cpu()
    return kv.pin_memory() if device == "cuda" else kv


@pytest.mark.parametrize(("num_ctas", "unroll", "block_size"), [(1, 1, 4), (3, 2, 5), (8, 4, 16)])
def test_gather_is_bit_exact_with_duplicates_and_aliases(num_ctas, unroll, block_size, device, generator):
    batch, heads, slots = 3, 2, 4
    host = host_kv(2, 3, heads, 6, block_size, 16, generator, device)
    pool = torch.full((batch * heads * slots, 2, block_size, 16), float("nan"), dtype=torch.bfloat16, device=device)
    moves = [[0, 5, 0], [0, 5, 1], [3, 0, 2], [5, 2, 0], [4, 3, 1], [2, 1, 2], [1, 4, 0]]
    entries = torch.tensor([*moves, [0, 0, 2]], dtype=torch.int32, device=device)
    count = torch.tensor([len(moves)], dtype=torch.int32, device=device)
    expected = pool.clone()
    gather_reference.gather_blocks(host, expected, entries, count, 1, slots)
    gather_blocks(host, pool, entries, count, 1, slots, GatherConfig(num_ctas, unroll * 64 * block_size, 2))
    assert torch.equal(pool.view(torch.int16), expected.view(torch.int16))
    assert torch.equal(pool[0], host[0, 1, 0, 5].to(device))
    assert bool(torch.isnan(pool[2]).all()), "an entry past the count moved"


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("block_size", [4, 5])
def test_write_back_touches_only_what_is_new(per_token, block_size, device, generator):
    heads, slots = 2, 3
    host = host_kv(3, 2, heads, 3, block_size, 8, generator, device)
    expected = host.clone()
    pool = torch.randn(3 * heads * slots, 2, block_size, 8, device=device, generator=generator).to(torch.bfloat16)
    kv_len = torch.tensor([block_size, 2 * block_size, block_size + 1], dtype=torch.int32, device=device)
    before = host.clone()
    write_back(pool, host, kv_len, 1, slots, per_token)
    if device == "cuda":
        torch.cuda.synchronize()
    writeback_reference.write_back(pool, expected, kv_len, 1, slots, per_token)
    assert torch.equal(host.view(torch.int16), expected.view(torch.int16))
    changed = (host != before).flatten(4).any(-1).sum().item()
    assert changed == (3 * heads if per_token else 2 * heads)


def test_a_layer_beyond_the_host_copy_is_refused(device, generator):
    host = host_kv(1, 2, 1, 3, 4, 16, generator, device)
    pool = torch.zeros(2, 2, 4, 16, dtype=torch.bfloat16, device=device)
    entries = torch.zeros(1, 3, dtype=torch.int32, device=device)
    with pytest.raises(InputError, match="layer: 2, need 0 to 1"):
        gather_blocks(host, pool, entries, entries[0, :1], 2, 2)
