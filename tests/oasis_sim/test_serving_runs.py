"""`run` and `sweep` over serving keys: files, card, table, refusals, the same bytes at any number of processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from oasis_sim.verbs.run import run
from oasis_sim.verbs.sweep import sweep
from traces.errors import InputError

KEYS = [
    "model=Qwen3-0.6B",
    "serving.arrivals=poisson",
    "serving.num_requests=16",
    "serving.prompt_tokens=3000",
    "serving.output_tokens=8",
]


def test_run_writes_every_request_and_prints_a_card(tmp_path, capsys):
    assert run(None, {}, [*KEYS, "serving.rate_per_s=20"], str(tmp_path / "r"), as_json=False, quiet=True) == 0
    card = capsys.readouterr().out
    assert "time to first token" in card
    assert "goodput" in card
    table = pq.read_table(tmp_path / "r" / "requests.parquet")
    assert table.num_rows == 16
    row = json.loads((tmp_path / "r" / "points.jsonl").read_text())
    assert row["serving.rate_per_s"] == 20.0
    served = row["requests_per_s"]
    rates = ",".join(f"{float(f'{share * served:.2g}'):g}" for share in (0.5, 1, 2))
    assert f"serving.rate_per_s={rates}" in card
    assert row["workload.batch_size"] is None


def test_a_sweep_has_the_same_bytes_at_any_number_of_processes(tmp_path, capsys):
    keys = [*KEYS, "serving.rate_per_s=10,40"]
    for jobs in (1, 2):
        out = str(tmp_path / str(jobs))
        assert sweep(None, {"--system": ["oasiskv"]}, keys, out, as_json=False, quiet=True, num_jobs=jobs) == 0
    assert re.search(r"rate +kept.*\nsystem +per s +offered", capsys.readouterr().out)
    names = sorted(path.relative_to(tmp_path / "1") for path in (tmp_path / "1" / "requests").iterdir())
    assert len(names) == 2
    for name in ("results.parquet", *names):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_a_sweep_of_rates_is_resumed_from_its_points(tmp_path, capsys):
    keys = [*KEYS, "serving.rate_per_s=10,400"]
    rows = []
    for _ in range(2):
        assert sweep(None, {"--system": ["dense"]}, keys, str(tmp_path / "r"), True, True, num_jobs=1) == 0
        rows.append(json.loads(capsys.readouterr().out)["rows"])
    assert rows[0] == rows[1]
    assert [row["overloaded"] for row in rows[0]] == [False, True]


def test_the_table_of_prefill_elsewhere_shows_what_modes_differ_in(tmp_path, capsys):
    keys = [*KEYS, "serving.rate_per_s=20", "serving.disaggregation=full-push,layer-push,first-set,pull"]
    assert sweep(None, {"--system": ["oasiskv"]}, keys, str(tmp_path / "r"), False, True, num_jobs=1) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    for title in ("handover", "2nd", "sent"):
        assert title in out


def test_a_refused_run_leaves_nothing(tmp_path):
    file = tmp_path / "requests.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n0,900000,10\n")
    with pytest.raises(InputError, match="no request fits: request 0"):
        run(None, {}, [f"serving.requests={file}"], str(tmp_path / "r"), as_json=True, quiet=True)
    assert not Path(tmp_path / "r").exists()
    with pytest.raises(InputError, match="--timeline"):
        run(None, {}, [*KEYS, "serving.rate_per_s=20"], str(tmp_path / "r"), True, True, timeline_steps=3)


def test_the_written_config_asks_for_the_same_run(tmp_path, capsys):
    for out, file in (("a", None), ("b", str(tmp_path / "a" / "config.yaml"))):
        assert run(file, {}, [] if file else [*KEYS, "serving.rate_per_s=20"], str(tmp_path / out), True, True) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["point_key"] == second["point_key"]


@pytest.mark.parametrize(
    ("flags", "keys", "named"),
    [
        ({"--batch-size": ["4"]}, [], "workload.batch_size"),
        ({}, ["serving.prefill_replicas=3"], "serving.prefill_replicas"),
        ({}, ["serving.router=least-loaded"], "serving.router"),
        ({}, ["serving.prefix_host_tokens=64", "serving.lengths=reasoning"], "prefix_host_tokens, serving.lengths"),
        ({"--system": ["dense"]}, ["policy.fetch_cap=0.5"], "policy.fetch_cap"),
        ({}, ["serving.burstiness_cv=2"], "serving.burstiness_cv"),
    ],
)
def test_what_is_given_in_vain_is_named(tmp_path, capsys, flags, keys, named):
    assert run(None, flags, [*KEYS, "serving.rate_per_s=20", *keys], str(tmp_path / "r"), True, True) == 0
    error = capsys.readouterr().err
    assert error.startswith("no effect on any point, so left out: ")
    assert error.endswith(f"{named}\n")
    assert error.count("\n") == 1


def test_a_request_file_leaves_drawn_lengths_without_effect(tmp_path, capsys):
    file = tmp_path / "requests.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n0,900,10\n")
    keys = ["model=Qwen3-0.6B", f"serving.requests={file}", "serving.prompt_tokens=8", "serving.lengths=reasoning"]
    assert run(None, {}, keys, str(tmp_path / "r"), True, True) == 0
    assert capsys.readouterr().err == ("no effect on any point, so left out: serving.prompt_tokens, serving.lengths\n")


def test_what_some_point_looks_at_and_defaults_of_a_file_are_not_named(tmp_path, capsys):
    keys = [*KEYS, "serving.rate_per_s=20", "policy.fetch_cap=0.5", "serving.disaggregation=none,pull"]
    flags = {"--system": ["dense,oasiskv"]}
    both = [*keys[:-1], "serving.prefill_replicas=2", "placement.num_gpus=2", "serving.router=least-loaded"]
    assert sweep(None, flags, both, str(tmp_path / "a"), True, True, num_jobs=1) == 0
    assert capsys.readouterr().err.endswith("left out: serving.prefill_replicas\n")
    assert sweep(str(tmp_path / "a" / "config.yaml"), {}, [], str(tmp_path / "b"), True, True, num_jobs=1) == 0
    assert capsys.readouterr().err.endswith("left out: serving.prefill_replicas\n")
    assert sweep(None, {"--system": ["oasiskv"]}, [*keys, "serving.prefill_replicas=2"], str(tmp_path / "c"), True,
                 True, num_jobs=1) == 0  # fmt: skip
    assert capsys.readouterr().err == ""
