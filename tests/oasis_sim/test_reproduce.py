"""`oasis-sim reproduce` as a user runs it; its figures are tested in tests/simulator/test_reproduce.py."""

from __future__ import annotations

from oasis_sim.reproduce_tables import catalog_lines
from simulator.reproduce.table import published

ADMISSION = "disaggregated-admission"


def test_document_has_the_rows_of_the_experiment(oasis):
    done = oasis("reproduce", ADMISSION, "--json")
    assert done.code == 0, done.err
    document = done.document
    for row in document["rows"]:
        assert {"setting", "published", "simulated", "error", "fitted"} <= set(row)
        assert row["published"] is not None
        assert (row["simulated"] is None) == (row["status"] == "not simulated")
        assert (row["simulated"] is None) == (row["error"] is None)
    (experiment,) = document["experiments"]
    assert experiment["num_free_inputs"] == document["num_free_inputs"] > 0
    assert {effect["input"] for effect in experiment["sensitivity"]} == set(experiment["inputs"])


def test_screen_says_who_says_each_input(oasis):
    done = oasis("reproduce", ADMISSION)
    assert done.code == 0, done.err
    for text in ("published", "assumed", "predicted", "free inputs"):
        assert text in done.out


def test_another_setting_is_simulated_without_a_published_figure(oasis):
    done = oasis("reproduce", ADMISSION, "--context", "65536", "--model", "Qwen3-32B", "--json")
    assert done.code == 0, done.err
    rows = [row for row in done.document["rows"] if row["simulated"] is not None]
    assert rows
    assert all(row["published"] is None and row["error"] is None and not row["fitted"] for row in rows)


def test_bad_input_is_one_line(oasis):
    for arguments, text in (
        (["reproduce", "aime24"], "aime24-one-h100"),
        (["reproduce", ADMISSION, "--batch", "0"], "workload.batch_size"),
        (["reproduce", ADMISSION, "--set", "policy.fetch_capp=1"], "policy.fetch_cap"),
        (["reproduce", ADMISSION, "--context", "4096", "--set", "workload.context_tokens=4096"], "and by --context"),
        (["reproduce", ADMISSION, "--batch", "4", "--batch", "5"], "--batch is given twice"),
        (["reproduce", ADMISSION, "--batch", "4,5"], "workload.batch_size: takes one value here, got 4, 5"),
        (["reproduce", ADMISSION, "--set", "workload.batch_size=true"], "workload.batch_size"),
        (["reproduce", ADMISSION, "--set", "policy.fetch_cap=nan"], "policy.fetch_cap"),
        (["reproduce", ADMISSION, "--set", "system=dense"], "system: cannot be changed here"),
        (["reproduce", ADMISSION, "--set", "trace=none"], "trace: cannot be changed here"),
        (["reproduce", ADMISSION, "--set", "serving.rate_per_s=3"], f"no row of {ADMISSION} is a serving run"),
        (["reproduce", "disaggregated-throughput", "--set", "serving.preemption=never"], "serving.preemption"),
        (["reproduce", "decode-step-h200", "--batch", "4"], "leave out workload.batch_size"),
        (["reproduce", ADMISSION, "--derive", "--batch", "4"], "leave out workload.batch_size"),
        (["reproduce", "aime24-one-h100", "--tensor-parallel", "3"], "no row can be simulated at this setting"),
        (["reproduce", ADMISSION, "--model", "Qwen3-9B"], "Qwen3-8B"),
    ):
        done = oasis(*arguments)
        assert done.code == 2, (arguments, done.out)
        assert text in done.err
        assert len(done.err.strip().splitlines()) == 1


def test_the_catalog_and_reproduce_count_the_figures_of_a_profile_alike(oasis):
    profiles = {row["name"]: row for row in oasis("catalog", "hardware", "--json").document["rows"]}
    (experiment,) = [one for one in published() if one.name == "many-gpus-long-context"]
    for name in ("h100-sxm", "h200-sxm-calibrated"):
        row = profiles[name]
        assert row["num_figures"] > row["num_assumptions"] > 0
        (line,) = catalog_lines(experiment, {"hardware": name})
        counted = f"{row['num_assumptions']} of its {row['num_figures']} figures are assumptions"
        assert line.startswith(f"profile {name}: {counted}")
