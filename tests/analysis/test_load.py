from __future__ import annotations

import json

import pandas as pd
import pytest

from analysis.load import find_objective, load_results, load_run
from traces.errors import InputError


def test_a_written_run_comes_back_row_for_row(tmp_path, sweep_frame, write_run):
    run = load_run(write_run(tmp_path / "run", sweep_frame))
    assert list(run.results["point_key"]) == list(sweep_frame["point_key"])
    for column in ("throughput_tokens_per_s", "recall", "t_exposed_wait_s"):
        assert run.results[column].dtype == "float64"
        assert (run.results[column] == sweep_frame[column]).all()
    assert run.results["h2d_ceiling_tokens_per_s"].isna().sum() == sweep_frame["h2d_ceiling_tokens_per_s"].isna().sum()
    assert run.objective == "throughput_tokens_per_s"
    assert run.manifest["seed"] == 0


def test_an_all_null_metric_is_nan_and_not_text(tmp_path, sweep_frame, write_run):
    results = load_results(write_run(tmp_path, sweep_frame.assign(ttft_p50_s=None)))
    assert results["ttft_p50_s"].dtype == "float64"
    assert results["ttft_p50_s"].isna().all()


@pytest.mark.parametrize("name", ["results.parquet", "config.yaml", "manifest.json"])
def test_a_folder_without_one_of_its_files_is_refused_by_name(tmp_path, sweep_frame, write_run, name):
    folder = write_run(tmp_path, sweep_frame)
    (folder / name).unlink()
    with pytest.raises(InputError, match=name):
        load_results(folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(InputError, match="absent: no such results folder"):
        load_results(tmp_path / "absent")


def test_an_unfinished_sweep_says_how_to_resume(tmp_path):
    (tmp_path / "points.jsonl").write_text("{}\n")
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match=r"not finished.*resume"):
        load_results(tmp_path)


def test_points_that_no_run_wrote_are_not_called_unfinished(tmp_path):
    (tmp_path / "points.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match=r"not a complete results folder, it lacks results\.parquet"):
        load_results(tmp_path)


def test_a_file_is_no_results_folder(tmp_path):
    (tmp_path / "results.parquet").touch()
    with pytest.raises(InputError, match=r"results\.parquet: is a file; pass the folder that run or sweep wrote"):
        load_results(tmp_path / "results.parquet")


def test_a_file_that_is_no_parquet_is_one_clear_line(tmp_path, sweep_frame, write_run):
    folder = write_run(tmp_path, sweep_frame)
    (folder / "results.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(InputError, match="not readable as parquet") as caught:
        load_results(folder)
    assert "\n" not in str(caught.value)


def test_a_foreign_table_is_refused_with_what_it_lacks(tmp_path, write_run):
    with pytest.raises(InputError, match="not a results table, it lacks point_key, status, error and"):
        load_results(write_run(tmp_path, pd.DataFrame({"x": [1]})))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "maybe"}, "unknown status 'maybe'"),
        ({"recall": "high"}, "column recall is not numeric"),
    ],
)
def test_values_outside_the_contract_are_refused(tmp_path, sweep_frame, write_run, change, message):
    with pytest.raises(InputError, match=message):
        load_results(write_run(tmp_path, sweep_frame.assign(**change)))


def test_a_table_without_rows_is_refused(tmp_path, sweep_frame, write_run):
    with pytest.raises(InputError, match="holds no point"):
        load_results(write_run(tmp_path, sweep_frame.head(0)))


def test_broken_config_and_manifest_are_named(tmp_path, sweep_frame, write_run):
    folder = write_run(tmp_path, sweep_frame)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(InputError, match=r"manifest\.json: not readable"):
        load_run(folder)
    (folder / "manifest.json").write_text("[1]")
    with pytest.raises(InputError, match="must hold a mapping, holds a list"):
        load_run(folder)
    (folder / "manifest.json").write_text(json.dumps({}))
    (folder / "config.yaml").write_text("objective: {maximize: bound}\n")
    with pytest.raises(InputError, match="'bound', which is no numeric result column"):
        load_run(folder)


def test_the_objective_is_found_at_the_top_or_inside_the_experiment():
    assert find_objective({"objective": {"maximize": "recall"}}) == {"maximize": "recall"}
    assert find_objective({"seed": 1, "experiment": {"objective": {"maximize": "recall"}}}) == {"maximize": "recall"}
    assert find_objective({"system": "dense"}) == {}
