"""Draft rows of a twin overlap the rows around them as recorded, at every K and beside every kind of neighbour."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from traces.catalog import resolve
from traces.predicted import set_is_exact
from traces.reader import open_trace
from traces.synth.drafts import draft_noise, steadiness
from traces.synth.measure import measure
from traces.synth.statistics import DraftState, TraceStatistics
from traces.synth.synthesise import synthesise

RECORDED, SIZE, LAYERS = "smollm2-135m-multi-document-6k-h200", 16, (0, 8, 17, 29)


def _mean(statistics: TraceStatistics, distance: int, kind: str, size: int) -> DraftState:
    """Over the heads of `LAYERS`, at one K."""
    at = statistics.set_sizes.index(size)
    heads = [head for layer in statistics.layers if layer.layer in LAYERS for head in layer.heads]
    states = [head.drafts[distance - 1][kind].model_dump() for head in heads]
    return DraftState(
        **{name: (float(np.mean([s[name][at] for s in states])),) for name in states[0] if states[0][name]}
    )


def test_draft_rows_of_a_twin_overlap_as_recorded(tmp_path: Path) -> None:
    group = open_trace(resolve(RECORDED)).group("multi-document")
    source = measure(group, SIZE)
    out = synthesise(source, source.model, source.context_tokens, 256, 0, tmp_path / "t.zarr", layers=LAYERS)
    twin = measure(open_trace(out).group("synthesised"), SIZE, source.set_sizes)
    compared = 0
    for size in source.set_sizes:
        if not set_is_exact(group, SIZE, "draft2", size):
            continue
        for distance in (1, 2):
            for kind in ("right", "wrong"):
                ours, theirs = (_mean(of, distance, kind, size) for of in (source, twin))
                for name, row in ours.model_dump().items():
                    if row and getattr(theirs, name):
                        assert getattr(theirs, name) == pytest.approx(row, abs=0.025), (size, distance, kind, name)
                        compared += 1
    assert compared >= 10
    right, wrong = (_mean(source, 2, kind, source.set_sizes[-1]) for kind in ("right", "wrong"))
    assert wrong.with_true[0] < right.with_true[0] - 0.1
    assert wrong.after_right[0] > wrong.with_true[0] + 0.01  # what one faith for all rows cannot reach


def test_weights_give_the_correlations_that_they_are_made_from() -> None:
    """Of rows closer to the step before than to their own, by level: covariances from the definition."""
    fast, slow = np.array([0.3, 0.1, 0.0]), np.array([0.4, 0.7, 0.5])
    real = steadiness(fast, slow, 4.0, 64.0)
    wanted = {"with_true": np.array([0.3, 0.5, 0.2]), "with_before": np.array([0.5, 0.6, 0.3])}
    noise, _ = draft_noise(wanted, lambda rows: rows, real, None)
    steady, white, before, after, rest, _ = noise.weights(after_right=False, before_right=False)
    assert not after.any()
    with_true = steady * real.steady + white * (1 - real.steady) + before * real.lag_1
    with_before = steady * real.lag_1 + before
    variance = steady**2 * real.steady + white**2 * (1 - real.steady) + before**2 + 2 * steady * before * real.lag_1
    np.testing.assert_allclose(with_true, wanted["with_true"], atol=1e-9)
    np.testing.assert_allclose(with_before, wanted["with_before"], atol=1e-9)
    np.testing.assert_allclose(variance + rest**2, 1.0, atol=1e-9)


def test_a_row_with_the_true_query_is_the_true_row() -> None:
    real = steadiness(np.array([0.2, 0.2]), np.array([0.6, 0.7]), 4.0, 64.0)
    ones = np.ones(2)
    noise, _ = draft_noise({"with_true": ones, "with_before": real.lag_1}, lambda rows: rows, real, None)
    steady, white, before, after, rest, own = noise.weights(after_right=True, before_right=True)
    np.testing.assert_allclose(steady, 1.0)
    np.testing.assert_allclose(white, 1.0)
    for nothing in (before, after, rest, own):
        np.testing.assert_allclose(nothing, 0.0, atol=1e-6)


def test_impossible_overlaps_give_up_the_neighbours_first() -> None:
    real = steadiness(np.array([0.3]), np.array([0.4]), 4.0, 64.0)
    far = {"with_true": np.array([0.9]), "with_before": np.array([-0.5])}
    noise, _ = draft_noise(far, lambda rows: rows, real, None)
    steady, white, before, _, rest, _ = noise.weights(after_right=False, before_right=False)
    assert (steady * real.steady + white * (1 - real.steady) + before * real.lag_1)[0] == pytest.approx(0.9)
    assert rest[0] == pytest.approx(0.0, abs=1e-6)
