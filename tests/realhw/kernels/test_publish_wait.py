import pytest
import torch

from realhw.kernels.publish.api import publish_fetches
from realhw.kernels.publish.reference import fetch_codes
from realhw.kernels.wait.api import wait_flag
from traces.errors import InputError


def pinned(*shape, dtype, device):
    return torch.full(shape, -1, dtype=dtype, pin_memory=device == "cuda")


@pytest.mark.parametrize("count", [0, 1, 300, 2500])
def test_the_cpu_reads_exactly_the_published_entries(count, device, generator):
    fetch = torch.randint(0, 1 << 20, (2600, 3), dtype=torch.int32, device=device, generator=generator)
    length = torch.tensor([count], dtype=torch.int32, device=device)
    codes, known = pinned(2700, dtype=torch.int64, device=device), pinned(1, dtype=torch.int32, device=device)
    publish_fetches(fetch, length, codes, known)
    if device == "cuda":
        torch.cuda.synchronize()
    assert int(known) == count
    assert torch.equal(codes[:count], fetch_codes(fetch, length).cpu())
    assert bool((codes[count:] == -1).all()), "an entry past the count was written"


def test_too_little_room_is_refused(device):
    fetch = torch.zeros(5, 3, dtype=torch.int32, device=device)
    codes, known = pinned(4, dtype=torch.int64, device=device), pinned(1, dtype=torch.int32, device=device)
    with pytest.raises(InputError, match=r"codes: shape \(4,\), need \[>= 5\]"):
        publish_fetches(fetch, fetch[0, :1], codes, known)


def test_a_set_flag_ends_the_wait_and_names_no_failure(device):
    flag, failed = torch.ones(1, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    wait_flag(flag, failed, 5)
    assert int(failed) == 0


def test_on_a_cpu_a_flag_that_is_not_set_is_refused():
    zero = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(InputError, match="flag: 0 on a CPU"):
        wait_flag(zero, zero.clone(), 1)


@pytest.mark.gpu
def test_the_first_wait_that_gives_up_is_named():
    flag, failed = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    wait_flag(flag, failed, 7, most_tries=1000)
    wait_flag(flag, failed, 8)
    assert int(failed) == 7


@pytest.mark.gpu
def test_a_copy_enqueued_while_a_graph_waits_ends_the_wait():
    flag, failed = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    one, out = torch.ones(1, dtype=torch.int32).pin_memory(), torch.zeros(1, dtype=torch.int32, device="cuda")
    wait_flag(one.cuda(), failed, 1)
    graph, copies = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        wait_flag(flag, failed, 3)
        torch.add(flag, 1, out=out)
    graph.replay()
    with torch.cuda.stream(copies):
        flag.copy_(one, non_blocking=True)
    torch.cuda.synchronize()
    assert int(failed) == 0
    assert int(out) == 2
