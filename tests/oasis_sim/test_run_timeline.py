"""`oasis-sim run --timeline`: a file that Perfetto opens, beside the run's results."""

from __future__ import annotations

import json

import pytest

from oasis_sim.verbs.run import run
from traces.errors import InputError


def test_timeline_is_written_into_the_run_folder(tmp_path, capsys):
    out = tmp_path / "run"
    assert run(None, {"--batch-size": ["4"]}, [], str(out), as_json=True, quiet=True, timeline_steps=2) == 0
    events = json.loads((out / "timeline.json").read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {0, 1}
    capsys.readouterr()


def test_a_timeline_has_at_least_one_step(tmp_path):
    with pytest.raises(InputError, match="at least 1 step"):
        run(None, {}, [], str(tmp_path / "run"), as_json=True, quiet=True, timeline_steps=0)
    assert not (tmp_path / "run").exists()
