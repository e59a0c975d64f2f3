"""The step model lands near a measured decode step without a coefficient fitted to its total."""

from __future__ import annotations

import pytest

from simulator import catalog
from simulator.decode_step_table import MEASURED, predict_us


@pytest.mark.parametrize(
    "row", MEASURED, ids=lambda r: f"{r.batch_size}-{r.context_tokens}-{r.stack}-{r.fetched_blocks}"
)
def test_each_measured_row_is_met_within_15_percent(row):
    error = predict_us(catalog.load_hardware("h200-sxm"), row) / row.step_us - 1
    assert abs(error) <= 0.15
