"""The trace that ships: sound, of the stated size, quick to open, with the statistics that the documentation states."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from traces.catalog import resolve, shipped_traces
from traces.check import check_trace
from traces.reader import FileGroup, Trace, open_trace
from traces.statistics import attention_statistics

NAME = "smollm2-135m-reasoning"
DOCUMENT = Path(__file__).parents[2] / "docs/trace-format.md"
SIX_LAYERS = (0, 6, 12, 17, 23, 29)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return open_trace(resolve(NAME))


def test_every_shipped_trace_passes_the_check_and_fits() -> None:
    assert NAME in shipped_traces()
    for name, path in shipped_traces().items():
        assert check_trace(path)["name"] == name
        assert path.stat().st_size <= (1_500_000 if compact_copy(name) else 16_000_000)


def compact_copy(name: str) -> bool:
    return "compact copy" in (open_trace(resolve(name)).attrs.provenance.notes or "")


def test_compact_copies_hold_what_replay_needs() -> None:
    compact = [name for name in shipped_traces() if compact_copy(name)]
    assert sum("h200" in name for name in compact) >= 4
    for name in compact:
        trace = open_trace(resolve(name))
        for group in map(trace.group, trace.group_names):
            assert isinstance(group, FileGroup)
            assert group.num_positions >= 256
            assert group.block_sizes == (16,)
            assert len(group.layers(16)) == min(8, group.num_layers - len(group.model.window_layers))
            assert group.max_ranked_blocks(16) == (256 if "gemma" in name else 64)
            assert {"true", "exact", "draft1", "draft2", "draft3", "draft4"} <= set(group.rankings(16))
            assert group.has_block_mass(16)


def test_what_was_recorded(trace: Trace) -> None:
    group = trace.group("reasoning")
    assert group.num_positions == 128
    assert group.kv_len[0] == 6144
    assert (group.num_layers, group.num_kv_heads) == (30, 3)
    assert group.block_sizes == (8, 16, 32, 64)
    for size in group.block_sizes:
        assert group.layers(size) == (tuple(range(30)) if size == 16 else SIX_LAYERS)
        assert group.max_ranked_blocks(size) * size == 2048
        assert group.rankings(size) == ("true", "draft1", "draft2", "draft3", "draft4", "exact")
    assert trace.attrs.provenance.command is not None
    assert "/" not in trace.attrs.provenance.command.replace("traces/data/prompts/", "")


def test_decoded_text_is_no_repetition_loop(trace: Trace) -> None:
    group = trace.group("reasoning")
    assert isinstance(group, FileGroup)
    tokens = group.array("tokens").tolist()
    eights = [tuple(tokens[i : i + 8]) for i in range(len(tokens) - 7)]
    assert len(set(eights)) == len(eights)


def test_gemma_records_its_full_attention_layers_at_two_contexts() -> None:
    names = [name for name in shipped_traces() if name.startswith("gemma3-270m")]
    assert len(names) == 12
    for name in names:
        trace = open_trace(resolve(name))
        group = trace.group(trace.group_names[0])
        assert isinstance(group, FileGroup)
        assert group.kv_len[0] == (16128 if "-16k-" in name else 32256)
        assert group.layers(16) == (5, 11, 17)
        assert len(trace.attrs.model.window_layers) == 15
        assert trace.attrs.model.window_tokens == 512
        tokens = group.array("tokens").tolist()
        eights = [tuple(tokens[i : i + 8]) for i in range(len(tokens) - 7)]
        assert len(set(eights)) > 0.8 * len(eights)
        assert group.prefill_mass(16) is not None


def test_masses_of_all_block_sizes_agree(trace: Trace) -> None:
    group = trace.group("reasoning")
    fine = group.mass(16).dense()[:, list(SIX_LAYERS)]
    for size in (32, 64):
        pooled = np.add.reduceat(fine, np.arange(0, fine.shape[-1], size // 16), axis=-1)
        np.testing.assert_allclose(group.mass(size).dense(), pooled, rtol=0.25, atol=2e-3)


def test_documented_statistics(trace: Trace) -> None:
    """Each row of the table in the documentation: P, K, overlaps, mass held by true and exact."""
    rows = re.findall(r"^\| (\d+) \| (\d+) \|((?: [\d.]+ \|){11})$", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert len(rows) >= 5
    for size, count, figures in rows:
        found = attention_statistics(trace.group("reasoning"), int(size), int(count))
        expected = [float(figure) for figure in figures.split("|") if figure.strip()]
        assert [*found.overlap.values(), found.mass_true, found.mass_exact] == pytest.approx(expected, abs=5.1e-4)


def test_one_shipped_trace_has_what_every_system_asks_for() -> None:
    group = open_trace(resolve("smollm2-135m-extras")).group("reasoning")
    assert {"true", "mean", "prev_layer", "draft1", "exact"} <= set(group.rankings(16))
    assert group.has_block_mass(16)
    cosines, prefill, window = group.query_cos(16), group.prefill_mass(16), group.prompt_window_mass(16)
    assert cosines is not None
    assert 0.5 < cosines[1:].mean() < 1
    assert prefill is not None
    assert window is not None
    np.testing.assert_allclose([prefill.sum(-1).mean(), window.sum(-1).mean()], 1, rtol=1e-4)
