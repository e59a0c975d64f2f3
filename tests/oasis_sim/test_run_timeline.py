"""`oasis-sim run --timeline`: a file that Perfetto opens, beside the run's results."""

from __future__ import annotations

import json

import pytest

from oasis_sim.progress import StepProgress
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


def test_a_timeline_longer_than_the_run_is_refused_with_its_steps(tmp_path):
    with pytest.raises(InputError, match=r"--timeline 100000: this run decodes 40 steps .*, so at most that"):
        run(None, {}, ["workload.output_tokens=40"], str(tmp_path / "run"), True, True, timeline_steps=100_000)
    assert not (tmp_path / "run").exists()


def test_progress_of_a_timeline(tmp_path, capsys):
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patched:
        heard = []
        patched.setattr(StepProgress, "update", lambda self, num_done: heard.append(num_done))
        assert run(None, {"--batch-size": ["4"]}, [], str(out), True, False, timeline_steps=3) == 0
    assert heard == [1, 2, 3]
    assert "timeline of 3 steps" in capsys.readouterr().err
