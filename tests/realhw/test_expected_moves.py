"""What a decode run must move, on the compiled rules and head by head in plain Python."""

from __future__ import annotations

import numpy as np
import pytest

from realhw.expected_moves import expected_moves
from realhw.expected_moves_reference import expected_moves_reference
from realhw.flows import Flow
from realhw.step_trace import synthetic_step_trace

STEPS, LAYERS, HEADS, CONTEXT = 14, 3, 2, 250
FLOWS = {
    "on demand": Flow("on-demand", 8, block_size_tokens=8),
    "on demand, capped": Flow("on-demand", 8, block_size_tokens=8, fetch_cap=0.3),
    "prefetch": Flow("lookahead", 8, block_size_tokens=8, fetch_cap=0.2),
    "slack": Flow("lookahead", 8, slack_blocks=2, block_size_tokens=8, fetch_cap=0.25, draft_rows=1),
    "three ahead": Flow("lookahead", 8, slack_blocks=5, block_size_tokens=8, fetch_cap=0.2, lookahead_k=3),
    "nothing": Flow("lookahead", 8, slack_blocks=1, block_size_tokens=8, fetch_cap=0.0),
    "filling": Flow("lookahead", 16, slack_blocks=6, block_size_tokens=2, fetch_cap=0.1, lookahead_k=2),
}


@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
@pytest.mark.parametrize("shift", [0, 1])
def test_the_compiled_replay_moves_what_the_plain_one_does(flow, shift):
    offsets = np.array([2, 5, 2, 3, 5, 5], dtype=np.int32)
    trace = synthetic_step_trace(
        STEPS + 12,
        LAYERS,
        HEADS,
        24,
        CONTEXT,
        flow.block_size_tokens,
        offsets,
        churn=0.4,
        miss=0.2,
        shift=shift,
        seed=3,
    )
    found, plain = (moves(flow, trace, STEPS) for moves in (expected_moves, expected_moves_reference))
    for name in ("fetched", "evicted", "in_slack", "runs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(plain, name), err_msg=name)
    assert found.fetched_hash == plain.fetched_hash
    assert found.evicted_hash == plain.evicted_hash
    assert found.evicted.sum() > 0, "blocks fill, if nothing else"
    assert (found.fetched.sum() > 0) == (flow.fetch_cap > 0)
