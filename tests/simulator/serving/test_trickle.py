"""The rest of first sets: in order, in pieces, and not for requests that have stopped."""

from __future__ import annotations

import numpy as np
import simpy

from simulator import catalog
from simulator.serving.decode_batch import DecodeBatch
from simulator.serving.demand_table import DemandTable
from simulator.serving.left_behind import LeftBehind
from simulator.serving.network import PIECE_BYTES, Network, Traffic, Wire
from simulator.serving.request_state import RequestState
from simulator.serving.trickle import Rest, Trickle

BLOCK_BYTES = 8_192
PIECE_BLOCKS = PIECE_BYTES // BLOCK_BYTES
LEFT = LeftBehind(np.zeros(10, np.int64), np.full(10, 3 * PIECE_BLOCKS), np.zeros((1, 1), np.int64))


def play(stops_s: float = 1e9, pulls_blocks: int = 0):
    """Two requests whose rests take three pieces each; the first one stops, and pulls blocks before anything came."""
    env, batch = simpy.Environment(), DecodeBatch(4, 16, DemandTable((), 1, 0), LEFT)
    link = Network(env, Wire(catalog.load_hardware("h100-sxm"), 1), 0.0, Traffic())
    trickle, done, sent = Trickle(env, link, BLOCK_BYTES), {}, [0, 0]
    requests = [RequestState(n, 0.0, 100, 10, prefilled_tokens=100, left_blocks=3 * PIECE_BLOCKS) for n in (0, 1)]

    def count(number, num_bytes):
        sent[number] += num_bytes

    for number, request in enumerate(requests):
        wanted = (lambda: env.now < stops_s) if number == 0 else (lambda: True)
        trickle.add(
            Rest(request, batch, 1e6, wanted, lambda size, number=number: count(number, size),
                 lambda number=number: done.setdefault(number, env.now))
        )  # fmt: skip
    batch.join(requests[0], 7)
    if pulls_blocks:
        batch.came(requests[0], pulls_blocks)
    env.run()
    return batch, requests, done, [size // BLOCK_BYTES for size in sent], PIECE_BLOCKS * BLOCK_BYTES / 12.05e9


def test_rests_go_one_after_another_and_everything_comes():
    batch, requests, done, sent, piece_s = play()
    assert sent == [3 * PIECE_BLOCKS] * 2
    np.testing.assert_allclose([done[0], done[1]], [3 * piece_s, 6 * piece_s])
    # One of them decodes meanwhile, the other has not joined yet.
    assert [batch.left_blocks(request) for request in requests] == [0, 0]


def test_nothing_more_is_sent_for_a_request_that_stopped():
    batch, requests, done, sent, piece_s = play(stops_s=0.5e-3)
    assert sent == [PIECE_BLOCKS, 3 * PIECE_BLOCKS]
    assert set(done) == {1}
    assert batch.left_blocks(requests[0]) == 3 * PIECE_BLOCKS
    np.testing.assert_allclose(done[1], 4 * piece_s)


def test_what_plans_fetched_is_not_sent_again():
    _, _, done, sent, _ = play(pulls_blocks=2 * PIECE_BLOCKS + 5)
    assert sent == [PIECE_BLOCKS - 5, 3 * PIECE_BLOCKS]
    assert set(done) == {0, 1}
