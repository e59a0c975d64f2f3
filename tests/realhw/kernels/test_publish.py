import pytest
import torch

from realhw.kernels.publish.api import publish_fetches
from realhw.kernels.publish.reference import fetch_codes
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
