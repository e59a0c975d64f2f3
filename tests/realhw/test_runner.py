"""The decode runner against a plain float64 decode, on a CPU in program order and on a GPU as captured graphs."""

import numpy as np
import pytest
import torch

from realhw.flows import Flow, footprint
from realhw.geometry import ModelGeometry
from realhw.kernels.gather.config import GatherConfig
from realhw.kernels.plan.reference import HeadSlots
from realhw.runner import DecodeRunner
from realhw.step_trace import StepTrace, moved_hash, synthetic_step_trace
from realhw.weights import random_weights
from traces.errors import InputError

pytestmark = pytest.mark.usefixtures("one_thread")
ON_GPU = torch.cuda.is_available()
# The interpreter takes a second per layer and step.
TINY = ModelGeometry("tiny", 3, 32, 4, 2, 16, 48, 40) if ON_GPU else ModelGeometry("tiny", 1, 32, 2, 1, 16, 48, 40)
SIZE, CONTEXT, BATCH = 4, 62, 2
STEPS = 9 if ON_GPU else 4
DTYPE = torch.float32
GATHER = GatherConfig(num_ctas=3, in_flight_bytes=1024, num_warps=2)


@pytest.fixture(scope="module")
def weights(device):
    return random_weights(TINY, device, DTYPE)


@pytest.fixture(scope="module")
def host(device):
    shape = (BATCH, TINY.num_layers, TINY.num_kv_heads, 20, 2, SIZE, TINY.head_dim)
    kv = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    return kv.pin_memory() if device == "cuda" else kv


def make_trace(shift: int = 0, num_ranked: int = 9) -> StepTrace:
    return synthetic_step_trace(
        STEPS + 3, TINY.num_layers, TINY.num_kv_heads, num_ranked, CONTEXT, SIZE, np.array([0, 2]),
        churn=0.4, miss=0.3, shift=shift, seed=5,
    )  # fmt: skip


def attended_ids(flow: Flow, trace: StepTrace, num_steps: int):
    """ids[t][l][b][h]: blocks that attention reads without the open one, by the plain rules; and what plans moved."""
    attended, moved = {}, {}
    for b, offset in enumerate(trace.offsets.tolist()):
        for layer in range(TINY.num_layers):
            for h in range(TINY.num_kv_heads):
                slots = HeadSlots(flow.num_kept, flow.num_slots)
                kv_len = lambda t, o=offset: int(trace.kv_len[o]) + t  # noqa: E731
                slots.admit(trace.true[offset, layer, h].tolist(), -(-kv_len(0) // SIZE) - 1)
                for t in range(num_steps):
                    fetched, evicted = [], []
                    filled = (kv_len(t) - 1) // SIZE - 1 if t and (kv_len(t) - 1) % SIZE == 0 else None
                    out, _ = slots.enter(t, filled)
                    entered = out

                    def plan(due, t=t, layer=layer, h=h, o=offset, slots=slots, kv_len=kv_len):
                        row = o + due - trace.shift
                        ranking = trace.predicted[row, layer, h].tolist()
                        n, then = -(-kv_len(t) // SIZE), -(-kv_len(due) // SIZE)
                        return slots.plan(t, due, ranking, n - 1, flow.allowed(num_steps)[t], then - n)

                    if flow.distance == 0:
                        fetched, evicted = plan(t)
                    attended[t, layer, b, h] = sorted(slots.block[s] for s in slots.attended(t))
                    if flow.distance and t + flow.distance < num_steps and offset + t + flow.distance >= trace.shift:
                        fetched, evicted = plan(t + flow.distance)
                    bh = b * TINY.num_kv_heads + h
                    moved.setdefault((t, layer), ([], []))
                    moved[t, layer][0].extend((bh, block, slot) for block, slot in fetched)
                    moved[t, layer][1].extend((bh, block) for block in evicted)
                    # The entry of step t is part of the kernel's step t − 1 under lookahead.
                    at = t - 1 if flow.distance else t
                    if entered:
                        moved[at, layer][1].extend((bh, block) for block in entered)
    return attended, moved


def plain_decode(weights, trace: StepTrace, host, num_steps: int, hidden, attended):
    """Logits of the last step in float64; attended None: every block."""
    g = TINY
    kv = host.double()[:, :, :, :, :].clone()
    logits = None
    for t in range(num_steps):
        x = hidden.double().cpu()
        for layer in range(g.num_layers):
            w = weights.layers[layer]
            qkv = x @ w.qkv.double().cpu().T
            out = torch.empty(BATCH, g.num_q_heads, g.head_dim, dtype=torch.float64)
            for b in range(BATCH):
                n = int(trace.kv_len[trace.offsets[b]]) + t
                block, offset = divmod(n - 1, SIZE)
                for h in range(g.num_kv_heads):
                    key = qkv[b, (g.num_q_heads + h) * g.head_dim :][: g.head_dim]
                    value = qkv[b, (g.num_q_heads + g.num_kv_heads + h) * g.head_dim :][: g.head_dim]
                    kv[b, layer, h, block, 0, offset], kv[b, layer, h, block, 1, offset] = key, value
                    ids = list(range(block)) if attended is None else attended[t, layer, b, h]
                    keys = torch.cat([kv[b, layer, h, i, 0] for i in ids] + [kv[b, layer, h, block, 0, : offset + 1]])
                    values = torch.cat([kv[b, layer, h, i, 1] for i in ids] + [kv[b, layer, h, block, 1, : offset + 1]])
                    group = g.group_size
                    q = qkv[b].view(-1, g.head_dim)[h * group : (h + 1) * group]
                    out[b, h * group : (h + 1) * group] = torch.softmax(q @ keys.T / g.head_dim**0.5, -1) @ values
            gate, up = (out.view(BATCH, -1) @ w.o.double().cpu().T @ w.gate_up.double().cpu().T).chunk(2, -1)
            x = (torch.nn.functional.silu(gate) * up) @ w.down.double().cpu().T
        logits = x @ weights.lm_head.double().cpu().T
    return logits


def run(weights, flow, trace, host, num_steps=STEPS):
    own = host.clone()
    own = own.pin_memory() if host.is_pinned() else own
    poison = lambda pool: pool.fill_(float("nan"))  # noqa: E731
    runner = DecodeRunner(weights, flow, trace, num_steps, own if flow.moves else None, fill=poison)
    runner.prepare()
    for pool in (layer.pool for layer in runner.buffers.layers):
        poison(pool)
    runner.buffers.load_kv(host)
    runner.run()
    return runner


def relative(a, b):
    return float((a.double().cpu() - b).norm() / b.norm())


FLOWS = {
    "on-demand": (Flow("on-demand", 5, block_size_tokens=SIZE, gather=GATHER), 0),
    "previous": (Flow("lookahead", 5, block_size_tokens=SIZE, fetch_cap=0.4, gather=GATHER), 1),
    "draft": (Flow("lookahead", 5, 2, SIZE, 0.4, draft_rows=1, gather=GATHER), 0),
    "draft two ahead": (Flow("lookahead", 6, 4, SIZE, 0.5, lookahead_k=2, draft_rows=2, gather=GATHER), 0),
    "on-demand, batched copies": (Flow("on-demand", 5, block_size_tokens=SIZE, transport="ce-batched"), 0),
    "on-demand, packed": (Flow("on-demand", 5, block_size_tokens=SIZE, transport="ce-contiguous"), 0),
    "previous, batched copies": (
        Flow("lookahead", 5, block_size_tokens=SIZE, fetch_cap=0.4, transport="ce-batched"), 1,
    ),
    "previous, packed": (Flow("lookahead", 5, block_size_tokens=SIZE, fetch_cap=0.4, transport="ce-contiguous"), 1),
    "draft, batched copies": (Flow("lookahead", 5, 2, SIZE, 0.4, draft_rows=1, transport="ce-batched"), 0),
    "draft two ahead, packed": (
        Flow("lookahead", 6, 4, SIZE, 0.5, lookahead_k=2, draft_rows=2, transport="ce-contiguous"), 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.gpu if "two" in name else ()) for name in FLOWS])
def test_attention_reads_what_the_plans_brought_and_nothing_stale(name, weights, host):
    """Slots start poisoned; the logits equal a plain decode over the blocks that the rules say are there."""
    flow, shift = FLOWS[name]
    trace = make_trace(shift)
    runner = run(weights, flow, trace, host)
    attended, moved = attended_ids(flow, trace, STEPS)
    real = runner.buffers.hidden.view(BATCH, flow.rows_per_request, -1)[:, 0]
    truth = plain_decode(weights, trace, host, STEPS, real, attended)
    assert relative(runner.buffers.logits, truth) < 1e-5
    dense = plain_decode(weights, trace, host, STEPS, real, None)
    assert relative(runner.buffers.logits, dense) > 1e-3, "the case does not tell sparse from dense"
    total = 0
    for t in range(STEPS):
        for layer, (fetched, evicted) in enumerate(runner.buffers.moved(t)):
            assert sorted(map(tuple, fetched.tolist())) == sorted(moved[t, layer][0])
            expected = sorted(moved[t, layer][1])
            if flow.distance and t == STEPS - 1:
                # The kernel of the last step also lets the block of step S in, which no plain step does.
                assert set(expected) <= set(map(tuple, evicted.tolist()))
            else:
                assert sorted(map(tuple, evicted.tolist())) == expected
            total += len(fetched)
    assert total >= 2


BEYOND = [(kind, "gather") for kind in ("dense", "quest", "on-demand", "lookahead")] + [
    (kind, transport) for kind in ("on-demand", "lookahead") for transport in ("ce-batched", "ce-contiguous")
]


@pytest.mark.parametrize(("kind", "transport"), BEYOND)
def test_a_budget_beyond_the_context_gives_dense_attention(kind, transport, weights, host):
    trace = make_trace(shift=1 if kind == "lookahead" else 0, num_ranked=15)
    flow = Flow(kind, 17, block_size_tokens=SIZE, gather=GATHER, transport=transport)
    runner = run(weights, flow, trace, host, num_steps=2)
    truth = plain_decode(weights, trace, host, 2, runner.buffers.hidden, None)
    assert relative(runner.buffers.logits, truth) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["gather", "ce-batched", "ce-contiguous"])
@pytest.mark.parametrize("kind", ["on-demand", "lookahead"])
def test_bf16_heads_of_128_equal_dense_on_a_gpu(kind, transport, device):
    """A model's head and block size; the whole KV fits the budget, so what dense reads is what arrives."""
    g = ModelGeometry("small", 4, 512, 8, 2, 128, 1024, 1000)
    weights = random_weights(g, device)
    host = torch.randn(3, g.num_layers, g.num_kv_heads, 24, 2, 16, g.head_dim).bfloat16().pin_memory()
    trace = synthetic_step_trace(12, g.num_layers, g.num_kv_heads, 19, 310, 16, np.arange(3), seed=2)
    logits = []
    for flow in (Flow("dense"), Flow(kind, 24, transport=transport)):
        runner = run(weights, flow, trace, host, num_steps=8)
        logits.append(runner.buffers.logits.double().cpu())
    assert relative(*logits) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["ce-batched", "ce-contiguous"])
@pytest.mark.parametrize("kind", ["on-demand", "lookahead"])
def test_copies_bring_what_a_gather_brings_on_a_gpu(kind, transport, device):
    """Few slots, many steps, several replays of the graph: logits and moves equal the gather's."""
    g = ModelGeometry("small", 4, 512, 8, 2, 128, 1024, 1000)
    weights = random_weights(g, device)
    host = torch.randn(3, g.num_layers, g.num_kv_heads, 40, 2, 16, g.head_dim).bfloat16().pin_memory()
    trace = synthetic_step_trace(26, g.num_layers, g.num_kv_heads, 12, 600, 16, np.arange(3), churn=0.5, seed=2)
    found = []
    for flow in (Flow(kind, 12), Flow(kind, 12, transport=transport)):
        runner = run(weights, flow, trace, host, num_steps=20)
        runner.run()
        moved = [sorted(map(tuple, fetched.tolist())) for t in range(20) for fetched, _ in runner.buffers.moved(t)]
        found.append((runner.buffers.logits.double().cpu(), moved))
    assert found[0][1] == found[1][1]
    assert sum(map(len, found[0][1])) > 1000
    assert relative(found[1][0], found[0][0]) < 1e-2


def test_quest_reads_the_blocks_with_the_best_scores(weights, host):
    runner = run(weights, Flow("quest", 3, block_size_tokens=SIZE), make_trace(), host, num_steps=2)
    for layer in runner.buffers.layers:
        assert layer.counts[1].tolist() == [[4] * TINY.num_kv_heads] * BATCH
    assert torch.isfinite(runner.buffers.logits).all()
    # What scoring saw at the end: no block outside the table scores above one inside it.
    layer = runner.buffers.layers[-1]
    base = torch.arange(BATCH * TINY.num_kv_heads).view(BATCH, -1, 1) * runner.buffers.slots_per_head
    chosen = (layer.table[1].cpu() - base)[:, :, :3].long()
    scores = runner.buffers.scores.cpu()
    worst = scores.gather(2, chosen).amin(-1)
    rest = scores.scatter(2, chosen, float("-inf")).amax(-1)
    assert bool((worst >= rest - 1e-2).all())


def test_a_draft_head_runs_and_the_write_back_reaches_the_host(weights, host):
    flow = Flow("lookahead", 5, 1, SIZE, 0.2, draft_rows=1, draft_head=True, gather=GATHER)
    trace = make_trace()
    runner = run(weights, flow, trace, host, num_steps=4)
    assert torch.isfinite(runner.buffers.logits).all()
    # Context 62 at P = 4: request 0 fills block 15 at step 2 (KV length 64).
    changed = (runner.buffers.host != host).flatten(4).any(-1)
    assert changed[0, :, :, 15].all()
    assert not changed[0, :, :, :15].any()


def test_bad_runs_are_named(weights, host):
    trace = make_trace()
    with pytest.raises(InputError, match=f"trace: {STEPS + 3} rows, need {STEPS + 7}"):
        DecodeRunner(weights, Flow("dense", block_size_tokens=SIZE), trace, STEPS + 5)
    with pytest.raises(InputError, match="host KV: none, need"):
        DecodeRunner(weights, Flow("on-demand", 4, block_size_tokens=SIZE), trace, STEPS)
    with pytest.raises(InputError, match="draft rows and slack slots belong to lookahead"):
        Flow("quest", draft_rows=1)


def test_hashes_do_not_depend_on_order_but_on_every_id():
    rows = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=np.int32)
    assert moved_hash(rows) == moved_hash(rows[::-1])
    assert moved_hash(rows) != moved_hash(rows[:2])
    changed = rows.copy()
    changed[1, 2] = 7
    assert moved_hash(rows) != moved_hash(changed)


def test_footprint_of_qwen3_is_the_published_bytes():
    from realhw.geometry import GEOMETRIES

    qwen = GEOMETRIES["Qwen3-8B"]
    need = footprint(qwen, Flow("on-demand"), 1, 32768, 0)
    assert need.host_bytes == 147_456 * 32768
    whole, empty = (footprint(qwen, Flow("dense"), 1, tokens, 0).hbm_bytes for tokens in (2048, 0))
    assert whole - empty == 288 << 20
