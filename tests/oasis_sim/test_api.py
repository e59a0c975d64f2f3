"""The Python interface, and the documents that show it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from oasis_sim import api
from oasis_sim.flags import EXPERIMENT_FLAGS
from simulator.metrics import COLUMNS
from tests.oasis_sim.conftest import REPOSITORY, Oasis
from traces.errors import InputError

CLI_DOCUMENT = (REPOSITORY / "docs" / "cli.md").read_text()


@pytest.fixture
def somewhere(tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OASIS_SIM_CACHE", str(cache_folder))
    return tmp_path


def test_run_gives_the_row_of_the_command_line_and_writes_nothing(
    somewhere: Path, oasis: Oasis, tiny_trace: Path
) -> None:
    row = api.run({"trace": str(tiny_trace), "policy.fetch_cap": 0.25})
    assert set(COLUMNS) <= set(row)
    assert list(somewhere.iterdir()) == []
    printed = oasis("run", "--trace", str(tiny_trace), "--fetch-cap", "0.25", "--json").document
    assert {name: printed[name] for name in row} == row


def test_sweep_gives_rows_best_and_a_table(somewhere: Path, tiny_trace: Path) -> None:
    asked = {"trace": str(tiny_trace), "system": ["quest", "oasiskv"], "policy": {"fetch_cap": [0.1, 1.0]}}
    found = api.sweep(asked, out="here")
    assert found.folder == Path("here")
    assert [row["system"] for row in found.rows] == ["quest", "oasiskv", "oasiskv"]
    assert found.best in found.rows
    assert isinstance(found.frame, pd.DataFrame)
    assert found.frame["throughput_tokens_per_s"].tolist() == [row["throughput_tokens_per_s"] for row in found.rows]
    assert api.load("here").equals(found.frame)
    assert api.sweep(asked, out="here").rows == found.rows


def test_bad_keys_and_lists_are_refused(somewhere: Path, tiny_trace: Path) -> None:
    with pytest.raises(InputError, match="unknown key 'polcy'"):
        api.run({"polcy": 1})
    with pytest.raises(InputError, match="run takes one value per key, got 2 points"):
        api.run({"trace": str(tiny_trace), "policy.fetch_cap": [0.1, 0.2]})
    with pytest.raises(InputError, match="no such results folder"):
        api.load("nowhere")


def test_importing_the_package_is_cheap_and_the_interface_comes_on_demand() -> None:
    code = (
        "import sys\nimport oasis_sim\nassert 'numpy' not in sys.modules\n"
        "api = oasis_sim.api\nassert api.run.__module__ == 'oasis_sim.api'\n"
        "try:\n    oasis_sim.nothing\nexcept AttributeError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "module 'oasis_sim' has no attribute 'nothing'\n"


def test_the_documented_experiment_file_runs(oasis: Oasis, tiny_trace: Path, tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", CLI_DOCUMENT, re.DOTALL)
    (tmp_path / "experiment.yaml").write_text(example)
    done = oasis("sweep", "experiment.yaml", "--trace", str(tiny_trace), "--jobs", "1", "--json")
    assert done.code == 0, done.err
    rows = done.document["rows"]
    assert len(rows) == 2 * 3 + 2 * 3 * 2  # retrieval has no lookahead
    assert {row["min_recall"] for row in rows} == {0.2}


def test_the_documents_list_every_flag_with_its_key() -> None:
    for flag in EXPERIMENT_FLAGS:
        assert f"| `{flag.name}` | `{flag.key}`" in CLI_DOCUMENT
