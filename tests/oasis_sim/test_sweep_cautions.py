"""What the sweep's summary warns of before a reader believes its best point."""

from __future__ import annotations

from typing import Any

from oasis_sim.sweep_summary import cautions


def row(cap: float, block: int, recall: float) -> dict[str, Any]:
    return {
        "system": "oasiskv",
        "status": "ok",
        "policy.fetch_cap": cap,
        "policy.block_size_tokens": block,
        "recall": recall,
    }


def test_recall_that_hardly_moves_over_fetch_caps_is_said():
    rows = [row(0.02, 16, 0.921), row(1.0, 16, 0.924)]
    assert any("moves by only 0.003" in line for line in cautions(rows, rows[0], threshold_is_set=True))


def test_recall_that_moves_is_not():
    rows = [row(0.02, 16, 0.80), row(1.0, 16, 0.92)]
    assert cautions(rows, rows[0], threshold_is_set=True) == []


def test_block_sizes_under_thresholds_of_their_own_are_said():
    rows = [row(0.02, 16, 0.80), row(0.02, 64, 0.92)]
    assert "--min-recall" in cautions(rows, rows[0], threshold_is_set=False)[0]
    assert cautions(rows, rows[0], threshold_is_set=True) == []


def test_a_key_that_only_some_systems_look_at_may_be_missing_from_a_row():
    rows = [row(0.02, 16, 0.921), row(1.0, 16, 0.924) | {"placement.nic_numa": "far"}]
    rows += [row(1.0, 16, 0.924) | {"placement.nic_numa": "local"}]
    assert cautions(rows, rows[0], threshold_is_set=True) == []


def test_recall_that_falls_with_the_cap_is_said_with_the_reason_and_where_it_is_written():
    rows = [row(0.02, 16, 0.881), row(0.05, 16, 0.872), row(0.5, 16, 0.863)]
    hardly, falls = cautions(rows, rows[0], threshold_is_set=True)
    assert "moves by only 0.018" in hardly
    assert falls.startswith("recall falls from 0.881 at a cap of 0.02 to 0.863 at 0.5, likely because")
    assert "docs/traces.md" in falls


def test_a_fall_that_is_not_small_is_said_alone():
    rows = [row(0.02, 16, 0.92), row(1.0, 16, 0.80)]
    assert [line[:12] for line in cautions(rows, rows[0], threshold_is_set=True)] == ["recall falls"]


def test_a_fall_without_a_known_reason_is_not_said():
    """Only min/max scores are bounds."""
    rows = [row(0.02, 16, 0.92) | {"policy.selector": "mean"}, row(1.0, 16, 0.80) | {"policy.selector": "mean"}]
    assert cautions(rows, rows[0], threshold_is_set=True) == []
    rows = [row(0.02, 16, 0.92) | {"system": "shadowkv"}, row(1.0, 16, 0.80) | {"system": "shadowkv"}]
    assert cautions(rows, rows[0], threshold_is_set=True) == []
