"""Selectors that keep: equal to the plain statement, and systems that drop do what their papers say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.mapping import Mapping
from simulator.policy_composition import resolve_policy
from simulator.replay import replay
from simulator.replay_settings import blocks_per_step
from simulator.residency import Residency
from simulator.selectors.kept import Keeping, kept_ranking, mass_units
from simulator.selectors.kept_reference import kept_reference
from simulator.specs.policy import PolicySpec
from tests.simulator.synthetic_trace import synthetic_trace
from traces.errors import InputError
from traces.memory import MemoryGroup, memory_group

SIZE = 4
DROPPING = ("h2o", "scissorhands", "streamingllm")


def random_group(seed: int, num_steps: int, first_kv_len: int) -> MemoryGroup:
    """Masses that drift, with ties and empty blocks; lengths that grow by 0 … 3 a step."""
    rng = np.random.default_rng(seed)
    kv_len = first_kv_len + np.cumsum(np.concatenate([[0], rng.integers(0, 4, num_steps - 1)]))
    num_blocks = int(-(-kv_len.max() // SIZE))
    shape = (num_steps, 2, 2, num_blocks)
    mass = np.exp2(rng.integers(-6, 3, size=shape[1:]) + rng.integers(-2, 3, size=shape))
    mass *= rng.random(shape) < 0.9
    exists = np.arange(num_blocks) < -(-kv_len // SIZE)[:, None, None, None]
    ids = np.where(np.arange(num_blocks) < (-(-kv_len // SIZE) - 1)[:, None, None, None], np.arange(num_blocks), -1)
    ids = np.broadcast_to(ids, shape).astype(np.int32)
    prompt = np.exp2(rng.integers(-6, 3, size=(2, 2, 2, -(-first_kv_len // SIZE))))
    return memory_group(
        kv_len, {SIZE: {"true": ids}}, {SIZE: mass * exists},
        prefill_mass={SIZE: prompt[0]}, prompt_window_mass={SIZE: prompt[1]},
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    selector=st.sampled_from(["accumulated-mass", "persistence", "prompt-window", "sink-recent"]),
    from_prompt=st.booleans(),
    recent=st.integers(0, 5),
    sinks=st.integers(0, 4),
    history=st.integers(1, 12),
    num_steps=st.integers(1, 10),
    first_kv_len=st.integers(1, 30),
    seed=st.integers(0, 2**20),
)
def test_rankings_are_those_of_the_plain_statement(
    selector: str,
    from_prompt: bool,
    recent: int,
    sinks: int,
    history: int,
    num_steps: int,
    first_kv_len: int,
    seed: int,
) -> None:
    group = random_group(seed, num_steps, first_kv_len)
    sinks = sinks if selector == "sink-recent" else 0
    window = selector == "prompt-window"
    keeping = Keeping(
        selector, SIZE, 0 if sinks or window else recent, sinks, history if selector == "persistence" else 0,
        from_prompt and selector == "accumulated-mass",
    )  # fmt: skip
    ranking = kept_ranking(group, keeping, blocks_per_step(group, SIZE))
    units = mass_units(group.mass(SIZE).dense())
    prompt = mass_units(group.prompt_window_mass(SIZE) if window else group.prefill_mass(SIZE))
    for step in range(num_steps):
        for layer, head in np.ndindex(2, 2):
            got = ranking[step, layer, head]
            had = prompt[layer, head].tolist()
            expected = kept_reference(keeping, step, group.kv_len.tolist(), units[:, layer, head].tolist(), had)
            assert got[got >= 0].tolist() == expected
            assert (got[len(expected) :] == -1).all()


def identity(group: MemoryGroup, size: int) -> Mapping:
    layers, heads = len(group.layers(size)), group.num_kv_heads
    return Mapping("identity", np.arange(layers, dtype=np.int32), np.arange(heads, dtype=np.int32), "")


def dropped(system: str, budget: int, group: MemoryGroup, size: int = 16, **overrides: Any):
    policy = resolve_policy(system, {"kv_budget_tokens": budget, "block_size_tokens": size, **overrides}, 2048)
    return replay(group, policy, identity(group, size), per_head=True, use_cache=False)


@pytest.fixture(scope="module")
def group() -> MemoryGroup:
    trace_group = synthetic_trace().group("short")
    assert isinstance(trace_group, MemoryGroup)
    return trace_group


@pytest.mark.parametrize("sink_tokens", [4, 40])
def test_streamingllm_reads_exactly_the_first_and_the_newest_blocks(group: MemoryGroup, sink_tokens: int) -> None:
    demand = dropped("streamingllm", 256, group, sink_tokens=sink_tokens)
    sinks, num_kept = -(-sink_tokens // 16), 16
    mass = group.mass(16).dense().astype(np.float64)
    for t, n in enumerate(demand.num_blocks.tolist()):
        read = [*range(sinks), *range(n - 1 - (num_kept - sinks), n)]
        assert demand.per_head["recall"][t] == pytest.approx(mass[t][..., read].sum(-1), abs=2e-6), t
    assert (demand.hit == 3 * num_kept).all()
    assert not demand.missed.any()


@pytest.mark.parametrize("system", DROPPING)
def test_dropping_systems_move_nothing_and_never_grow(group: MemoryGroup, system: str) -> None:
    demand = dropped(system, 256, group)
    assert not demand.fetched.any()
    assert not demand.repaired.any()
    filled = np.diff(demand.num_blocks, prepend=demand.num_blocks[0])
    assert demand.evicted.sum() == filled.sum() * 3 * demand.num_layers
    assert demand.admission_blocks == 16 * 3 * demand.num_layers


@pytest.mark.parametrize("system", ["h2o", "scissorhands"])
def test_evicted_blocks_never_come_back(group: MemoryGroup, system: str) -> None:
    """The batch replay step by step: what attention reads, less the blocks that fill, only ever shrinks."""
    policy = resolve_policy(system, {"kv_budget_tokens": 256}, 2048)
    num_blocks = blocks_per_step(group, 16)
    share = 8 if system == "h2o" else 0
    keeping = Keeping(policy.selector, 16, share, history_steps=400 if system == "scissorhands" else 0)
    ranking = kept_ranking(group, keeping, num_blocks)
    demand = dropped(system, 256, group)
    mass = group.mass(16).dense()
    residency = Residency(1, 16, 16, int(num_blocks.max()), eviction="lowest-score")
    residency.admit(ranking[0, 1, 2][None], int(num_blocks[0]))
    gone: set[int] = set(range(int(num_blocks[0]) - 1)) - set(residency.attended()[0].tolist())
    for t in range(len(num_blocks)):
        if t:
            residency.begin(int(num_blocks[t]))
        read = set(residency.attended()[0].tolist())
        assert not read & gone, t
        assert demand.per_head["recall"][t, 1, 2] == pytest.approx(
            mass[t, 1, 2, [*read, num_blocks[t] - 1]].sum(dtype=np.float64), abs=2e-6
        )
        if t + 1 < len(num_blocks):
            room = int(num_blocks[t + 1] - num_blocks[t])
            (plan,), _ = residency.plan(ranking[t, 1, 2][None], t + 1, 0, room)
            assert not len(plan.fetch_ids)
            gone |= set(plan.victim_ids.tolist())
    assert len(gone) == int(num_blocks[-1]) - 1 - 16


def test_heavy_hitters_stay_and_h2o_loses_what_was_light_and_old() -> None:
    """Block 3 has half of every step's mass, the rest is even: block 3 and the newest are all that stays."""
    kv_len = 40 + np.arange(40)
    num_blocks = int(-(-kv_len.max() // SIZE))
    exists = np.arange(num_blocks) < -(-kv_len // SIZE)[:, None, None, None]
    mass = np.where(np.arange(num_blocks) == 3, float(num_blocks), 1.0) * exists
    ids = np.broadcast_to(np.arange(num_blocks, dtype=np.int32), mass.shape)
    heavy = memory_group(kv_len, {SIZE: {"true": ids}}, {SIZE: mass})
    demand = dropped("h2o", 16, heavy, size=SIZE)
    share = heavy.mass(SIZE).dense()[-1, 0, 0, 3]
    assert demand.per_head["recall"][-1, 0, 0] > share
    streaming = dropped("streamingllm", 16, heavy, size=SIZE)
    assert streaming.per_head["recall"][-1, 0, 0] < 0.5 < share


@pytest.mark.parametrize("system", DROPPING)
def test_a_budget_beyond_the_context_keeps_everything(group: MemoryGroup, system: str) -> None:
    demand = dropped(system, 4096, group)
    assert demand.mean_recall() == demand.mean_recall_upper() == demand.hit_rate() == 1
    assert not demand.evicted.any()


def test_coarser_blocks_come_from_the_finer_mass(group: MemoryGroup) -> None:
    assert 0 < dropped("h2o", 512, group, size=32).mean_recall() < 1


def test_a_trace_without_every_mass_is_refused(group: MemoryGroup) -> None:
    mass = group.mass(16)
    outside = np.full(mass.outside.shape, 0.1, np.float32)
    layers = {16: group.layers(16)}
    partial = MemoryGroup("partial", group.model, group.kv_len, layers, {16: group._ranked[16]}, {}, {})
    partial._masses[16] = type(mass)(mass.levels, mass.scale, outside)
    with pytest.raises(InputError, match=r"'accumulated-mass' needs the softmax mass of every block"):
        dropped("h2o", 256, partial)
    assert dropped("streamingllm", 256, partial).mean_recall() < 1


def test_keepers_only_drop() -> None:
    with pytest.raises(
        InputError, match=r"policy\.residency: selector accumulated-mass ranks without the step's query"
    ):
        resolve_policy("retrieval", {"selector": "accumulated-mass"}, 2048)
    with pytest.raises(InputError, match="residency must be drop"):
        replay(
            synthetic_trace().group("short"), PolicySpec(selector="sink-recent", kv_budget_tokens=64),
            identity(synthetic_trace().group("short"), 16),
        )  # fmt: skip
