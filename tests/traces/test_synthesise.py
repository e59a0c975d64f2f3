"""Synthesised traces: valid, deterministic, of the asked geometry, and with the published overlaps."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from traces.catalog import resolve
from traces.check import check_trace
from traces.errors import InputError
from traces.reader import FileGroup, open_trace
from traces.schema import ModelGeometry
from traces.synth.calibrate import fit_heads
from traces.synth.kinds import draft_kinds, with_acceptance
from traces.synth.measure import measure
from traces.synth.recipes import load_recipe, recipe_names, recipe_statistics
from traces.synth.statistics import TraceStatistics
from traces.synth.synthesise import synthesise

RECIPE = "qwen3-8b-published"
OTHER = ModelGeometry(name="other", num_layers=5, num_query_heads=8, num_kv_heads=4, head_dim=64)


@pytest.fixture(scope="module")
def published() -> TraceStatistics:
    return recipe_statistics(load_recipe(RECIPE))


@pytest.fixture(scope="module")
def reasoning() -> TraceStatistics:
    return measure(open_trace(resolve("smollm2-135m-reasoning-2k-h200")).group("reasoning"), 16)


MEASURED_LAYERS = (4, 17)
"""Of `reasoning`; fits of the same layers are kept between tests."""


def _group(folder: Path) -> FileGroup:
    group = open_trace(folder).group("synthesised")
    assert isinstance(group, FileGroup)
    return group


def _mean(group: FileGroup, size: int) -> tuple[float, float]:
    """Overlap of the sets of `size` with the step before, and with the draft made one step before."""
    statistics = measure(group, 16, (size,))
    heads = [head for layer in statistics.layers for head in layer.heads]
    drafted = np.mean([head.drafts[0]["all"].with_true[0] for head in heads])
    return float(np.mean([head.persistence[0][0] for head in heads])), float(drafted)


@pytest.mark.parametrize("seed", [0, 1])
def test_recipe_reaches_the_published_overlaps(published: TraceStatistics, seed: int, tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE)
    folder = synthesise(
        published, published.model, recipe.context_tokens, 96, seed, tmp_path / "t.zarr", layers=(0, 12, 24, 35)
    )
    previous, ahead = _mean(_group(folder), 20)
    assert previous == pytest.approx(0.839, abs=0.01)
    assert ahead == pytest.approx(0.96, abs=0.01)
    assert 1 - _mean(_group(folder), 128)[0] == pytest.approx(recipe.open_input.churn, abs=0.01)


@pytest.mark.parametrize("churn", [0.1, 0.3])
def test_churn_is_an_input(churn: float, tmp_path: Path) -> None:
    statistics = recipe_statistics(load_recipe(RECIPE, churn))
    assert any(f"churn {churn}" in text for text in statistics.assumptions)
    folder = synthesise(statistics, statistics.model, 16384, 64, 0, tmp_path / "t.zarr", layers=(0, 24))
    assert 1 - _mean(_group(folder), 128)[0] == pytest.approx(churn, abs=0.02)


def test_recipes_are_closed_to_what_cannot_be(tmp_path: Path) -> None:
    assert RECIPE in recipe_names()
    with pytest.raises(InputError, match=f"shipped: {RECIPE}"):
        load_recipe("qwen3-8b-publishd")
    with pytest.raises(InputError, match="churn"):
        load_recipe(RECIPE, 1.5)
    with pytest.raises(InputError, match="without any correlation"):
        recipe_statistics(load_recipe(RECIPE, 0.95))


@pytest.mark.parametrize(("context_tokens", "steps", "seed"), [(2048, 70, 0), (4096, 20, 7)])
def test_trace_is_valid_and_says_that_it_was_made(
    published: TraceStatistics, context_tokens: int, steps: int, seed: int, tmp_path: Path
) -> None:
    out = tmp_path / "t.zarr"
    synthesise(published, OTHER, context_tokens, steps, seed, out, layers=(1, 4), max_budget_tokens=512)
    summary = check_trace(out)
    assert summary["model"]["name"] == "other"
    assert "synthesised, not recorded" in summary["provenance"]["notes"]
    assert "assumption: " in summary["provenance"]["notes"]
    group = _group(out)
    assert group.layers(16) == (1, 4)
    assert group.max_ranked_blocks(16) == 32
    assert group.attributes.sampling == {"synthesis_seed": seed}
    assert group.ranking("draft4", 16).shape == (steps, 2, 4, 32)


def test_same_seed_same_trace_and_another_seed_another(published: TraceStatistics, tmp_path: Path) -> None:
    hashes = [
        _group(synthesise(published, OTHER, 2048, 8, seed, tmp_path / name, layers=(0,))).content_hash
        for name, seed in (("a.zarr", 3), ("b.zarr", 3), ("c.zarr", 4))
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_layer_does_not_depend_on_which_others_are_made(published: TraceStatistics, tmp_path: Path) -> None:
    alone = _group(synthesise(published, OTHER, 2048, 8, 0, tmp_path / "a.zarr", layers=(3,)))
    among = _group(synthesise(published, OTHER, 2048, 8, 0, tmp_path / "b.zarr", layers=(0, 3)))
    np.testing.assert_array_equal(alone.ranking("true", 16)[:, 0], among.ranking("true", 16)[:, 1])


def _held(statistics: TraceStatistics, layers: tuple[int, ...], count: int) -> np.ndarray:
    """Mass on the K best by score without block 0, whose membership is another matter, [heads, K]."""
    heads = [head for layer in statistics.layers if layer.layer in layers for head in layer.heads]
    return np.array(
        [
            [held - head.sink_mass * sink[0] for held, sink in zip(head.true_coverage, head.sink, strict=True)][:count]
            for head in heads
        ]
    )


def test_the_best_by_score_hold_the_measured_mass(reasoning: TraceStatistics, tmp_path: Path) -> None:
    """Head by head; at twice the context the blocks that no set reaches hold more."""
    source, layers, found = reasoning, MEASURED_LAYERS, []
    count = len(source.set_sizes)
    for context in (2048, 4096):
        out = synthesise(source, source.model, context, 48, 0, tmp_path / f"{context}.zarr", layers=layers)
        found.append(_held(measure(_group(out), 16), layers, count))
    assert np.abs(found[0] - _held(source, layers, count)).max() < 0.02
    assert found[1].mean() < found[0].mean()
    assert (found[1].mean(axis=0) > found[0].mean(axis=0) - 0.05).all()


def test_mass_follows_the_score_as_much_as_stale_sets_lose(reasoning: TraceStatistics) -> None:
    rows = [at for at, layer in enumerate(reasoning.layers) if layer.layer in MEASURED_LAYERS]
    found = []
    for factor in (1.0, 8.0):
        layers = tuple(
            layer.model_copy(
                update={
                    "heads": tuple(
                        head.model_copy(update={"stale_loss": tuple(factor * loss for loss in head.stale_loss)})
                        for head in layer.heads
                    )
                }
            )
            for layer in reasoning.layers
        )
        fitted = fit_heads(reasoning.model_copy(update={"layers": layers}), rows)
        follows = {head.mass_follows for heads in fitted.values() for head in heads}
        assert len(follows) == 1
        found.append(follows.pop())
    assert 0.05 < found[0] < 0.95
    assert found[1] == 1


def test_large_traces_keep_the_mass_of_ranked_blocks_only(
    published: TraceStatistics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _group(synthesise(published, OTHER, 2048, 8, 0, tmp_path / "a.zarr", layers=(0,)))
    monkeypatch.setattr("traces.synth.synthesise.DENSE_MASS_BYTES", 0)
    part = _group(synthesise(published, OTHER, 2048, 8, 0, tmp_path / "b.zarr", layers=(0,)))
    check_trace(tmp_path / "b.zarr")
    assert "p16/block_mass" in whole.array_names()
    assert "p16/block_mass" not in part.array_names()
    np.testing.assert_array_equal(whole.ranking("exact", 16), part.ranking("exact", 16))
    ids = part.ranking("true", 16)[..., :8]
    masses = [np.take_along_axis(group.mass(16).dense(), ids, axis=-1) for group in (whole, part)]
    np.testing.assert_allclose(masses[0], masses[1], rtol=0.05, atol=1e-6)


def test_kinds_of_draft_rows_have_their_shares(published: TraceStatistics) -> None:
    kinds = published.draft_kinds[0].model_copy(
        update={"shares": {"right": 0.5, "wrong": 0.4, "fallback": 0.1}, "repeats": 0.8}
    )
    statistics = published.model_copy(update={"draft_kinds": (kinds,)})
    rows = draft_kinds(statistics, 1000, np.random.default_rng(0))[0]
    assert [int((rows == kind).sum()) for kind in ("right", "wrong", "fallback")] == [500, 400, 100]
    right = rows == "right"
    assert (right[1:] & right[:-1]).sum() / right[:-1].sum() == pytest.approx(0.8, abs=0.04)


def test_runs_of_right_rows_are_those_of_each_distance(published: TraceStatistics) -> None:
    """Few steps, too; and rows right at distance 2 are mostly right at distance 1."""
    known = [(0.54, 0.68), (0.39, 0.75)]
    kinds = tuple(
        published.draft_kinds[0].model_copy(update={"shares": {"right": share, "wrong": 1 - share}, "repeats": again})
        for share, again in known
    )
    statistics = published.model_copy(update={"draft_kinds": kinds})
    for seed in range(5):
        rows = [of == "right" for of in draft_kinds(statistics, 200, np.random.default_rng(seed))]
        for right, (share, again) in zip(rows, known, strict=True):
            assert right.mean() == pytest.approx(share, abs=0.005)
            assert (right[1:] & right[:-1]).sum() / right[:-1].sum() == pytest.approx(again, abs=0.04)
        assert (rows[0] & rows[1]).sum() / rows[1].sum() > 0.85  # 0.54 by chance


def test_another_acceptance_keeps_the_rest_and_the_runs(published: TraceStatistics) -> None:
    kinds = published.draft_kinds[0].model_copy(
        update={"shares": {"right": 0.5, "wrong": 0.4, "fallback": 0.1}, "repeats": 0.8}
    )
    statistics = published.model_copy(update={"draft_kinds": (kinds,)})
    (changed,) = with_acceptance(statistics, [0.8]).draft_kinds
    assert changed.shares == pytest.approx({"right": 0.8, "wrong": 0.16, "fallback": 0.04})
    assert 0.8 < changed.repeats < 1
    (same,) = with_acceptance(statistics, [0.5]).draft_kinds
    assert same.repeats == pytest.approx(0.8, abs=0.01)
    for shares, message in (([0.5, 0.4], "2 shares for 1"), ([1.5], "no share of guesses")):
        with pytest.raises(InputError, match=message):
            with_acceptance(statistics, shares)
    with pytest.raises(InputError, match="no right and no wrong guesses at distance 1"):
        with_acceptance(published, [0.5] * len(published.draft_kinds))


def test_bad_arguments_are_refused(published: TraceStatistics, tmp_path: Path) -> None:
    out = tmp_path / "t.zarr"
    with pytest.raises(InputError, match="context of 64 tokens"):
        synthesise(published, OTHER, 64, 20, 0, out)
    with pytest.raises(InputError, match="context of 2097152 tokens"):
        synthesise(published, OTHER, 1 << 21, 20, 0, out)
    with pytest.raises(InputError, match="at least 5 are needed"):
        synthesise(published, OTHER, 2048, 4, 0, out)
    with pytest.raises(InputError, match="layer 5 is not one of the 5 layers"):
        synthesise(published, OTHER, 2048, 20, 0, out, layers=(5,))
    with pytest.raises(InputError, match="no softmax mass"):
        synthesise(published.model_copy(update={"mass_ranks": ()}), OTHER, 2048, 20, 0, out)
    assert not out.exists()


MILLION = """
import sys
from pathlib import Path
from traces.schema import ModelGeometry
from traces.synth.recipes import load_recipe, recipe_statistics
from traces.synth.synthesise import synthesise
geometry = ModelGeometry(name="other", num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=64)
statistics = recipe_statistics(load_recipe("qwen3-8b-published"))
synthesise(statistics, geometry, 1 << 20, 6, 0, Path(sys.argv[1]), layers=(1,), max_budget_tokens=32768)
# Not ru_maxrss: a child starts with what its parent, the test run, had resident.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_a_million_tokens_in_bounded_memory(tmp_path: Path) -> None:
    out = tmp_path / "t.zarr"
    done = subprocess.run([sys.executable, "-c", MILLION, str(out)], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 1 << 30
    group = _group(out)
    assert int(group.kv_len[0]) == 1 << 20
    assert group.ranking("true", 16).max() > 60_000


@pytest.mark.slow
def test_qwen3_8b_at_32k_within_a_minute(published: TraceStatistics, tmp_path: Path) -> None:
    start, wall = time.process_time(), time.time()
    synthesise(published, published.model, 32768, 128, 0, tmp_path / "t.zarr")
    print(f"{time.process_time() - start:.1f} s of CPU, {time.time() - wall:.1f} s")
    assert time.process_time() - start < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 4 << 30
