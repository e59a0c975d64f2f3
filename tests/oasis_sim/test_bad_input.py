"""Bad input gets one clear line, exit 2, and leaves nothing behind."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from oasis_sim.request import make_request
from oasis_sim.settings import parse_value
from tests.oasis_sim.conftest import Oasis

ALWAYS = [
    (["--system", "nonesuch"], "unknown system 'nonesuch'"),
    (["--system", "oasiskw"], "did you mean oasiskv"),
    (["--model", "Qwen3-8"], "did you mean Qwen3-8B"),
    (["--hardware", "h100"], "h100-sxm"),
    (["--trace", "smollm"], "trace 'smollm' is neither a shipped trace nor an existing file"),
    (["--set", "policy.no_such_key=1"], "unknown key 'policy.no_such_key'"),
    (["--set", "policy.fetch_capp=1"], "did you mean policy.fetch_cap"),
    (["--set", "policy.fetch_cap"], "expected KEY=VALUE"),
    (["--fetch-cap", "0.1", "--fetch-cap", "0.2"], "--fetch-cap is given twice"),
    (["--fetch-cap", "0.1", "--set", "policy.fetch_cap=0.2"], "by --set policy.fetch_cap and by --fetch-cap"),
    (["--set", "seed=1", "--set", "seed=2"], "--set seed is given twice"),
    (["--fetch-cap", ""], "empty value"),
    (["--out", ""], "the path is empty; give a name"),
    (["--out", " "], "the path is empty; give a name"),
    (["--block-size", "0"], "policy.block_size_tokens"),
    (["--block-size", "16.5"], "policy.block_size_tokens"),
    (["--block-size", "24"], "24 is not recorded"),
    (["--fetch-cap", "-0.1"], "policy.fetch_cap"),
    (["--fetch-cap", "nan"], "policy.fetch_cap"),
    (["--fetch-cap", "1.5"], "policy.fetch_cap"),
    (["--fetch-cap", "much"], "policy.fetch_cap"),
    (["--lookahead", "0"], "policy.lookahead_k"),
    (["--lookahead", "77"], "lookahead_k 77"),
    (["--budget", "8"], "smaller than one block of 16 tokens"),
    (["--budget", "-16"], "policy.kv_budget_tokens"),
    (["--budget", "512"], "the budget is at most 256 tokens"),
    (["--batch-size", "0"], "workload.batch_size"),
    (["--batch-size", "inf"], "workload.batch_size"),
    (["--context", "2048"], "no request of that context"),
    (["--context", "1000000"], "1000000"),
    (["--numa", "upstairs"], "placement.host_numa"),
    (["--min-recall", "1.5"], "objective.min_recall"),
    (["--maximize", "speed"], "'speed' is not a result column"),
    (["--maximize", "tpot_mean_s"], "tpot_mean_s is not better when large"),
    (["--seed", "-1"], "seed"),
    (["--set", "trace_group=reasonin"], "trace_group: trace"),
    (["--set", "policy.verify_drafts=1"], "policy.verify_drafts"),
    (["--set", "policy.slack_blocks=100", "--system", "hisparse"], "have 72 blocks of 16"),
    (["--set", "policy.sink_tokens=129", "--system", "streamingllm"], "exceeds the budget of 128 tokens"),
    (["--set", "policy.key_rank=1025", "--budget", "128"], "8 KV heads of 128"),
    (["--set", "serving.num_requests=100000000"], "serving.num_requests"),
    (["--set", "serving.rate_per_s=1e-300"], "serving.rate_per_s"),
    (["--set", "serving.rate_per_s=1e300"], "serving.rate_per_s"),
    (["--set", "serving.rate_per_s=1e-9", "--set", "serving.arrivals=poisson"], "give a higher serving.rate_per_s"),
    (["--set", "serving.burstiness_cv=1e200"], "serving.burstiness_cv"),
    (["--set", "serving.burstiness_cv=1e-200"], "serving.burstiness_cv"),
    (["--set", "serving.max_model_len=9007199254740992"], "serving.max_model_len"),
    (["--set", "serving.link_limit=true"], "serving.link_limit"),
    (["--set", "engine.software_overhead_s=true"], "engine.software_overhead_s"),
    (["--set", "mapping.rule=identity"], "mapping 'identity' does not fit"),
    (["--set", "engine.software_overhead_s=-1"], "engine.software_overhead_s"),
    (["--set", "name=../elsewhere"], "cannot hold a path"),
    (["missing-experiment.yaml"], "missing-experiment.yaml: cannot be read"),
    (["--no-such-flag"], "no-such-flag"),
]


def _assert_one_clear_line(code: int, err: str, out: str, message: str) -> None:
    assert code == 2, err + out
    lines = [line for line in err.splitlines() if not line.startswith("simulating")]
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert "Traceback" not in err + out
    assert out == ""


@pytest.mark.parametrize("verb", ["run", "sweep"])
@pytest.mark.parametrize(("arguments", "message"), ALWAYS, ids=[" ".join(given)[:40] for given, _ in ALWAYS])
def test_one_line_exit_2_and_nothing_written(
    oasis: Oasis, tiny_trace: Path, tmp_path: Path, verb: str, arguments: list[str], message: str
) -> None:
    given = [] if "--trace" in arguments else ["--trace", str(tiny_trace)]
    done = oasis(verb, *arguments, *given)
    _assert_one_clear_line(done.code, done.err, done.out, message)
    assert list(tmp_path.iterdir()) == []


YAML = [
    ("policy: {fetch_cap: 0.1, fetch_cap: 0.2}", "experiment.yaml, line 1: key 'fetch_cap' given twice"),
    ("policy:\n  fetch_cap: 0.1\npolicy.fetch_cap: 0.2", "policy.fetch_cap is given twice"),
    ("polcy: {fetch_cap: 0.1}", "did you mean policy.fetch_cap"),
    ("[1, 2]", "expected a mapping"),
    ("policy: {fetch_cap: [0.1", "experiment.yaml, line"),
    ("policy: {fetch_cap: []}", "has an empty list"),
    ("policy: {fetch_cap: [[0.1]]}", "has a list inside its list"),
    ("1: 2", "key 1 is not text"),
    ("policy: 7", "policy"),
    ("policy: {fetch_cap: .nan}", "policy.fetch_cap"),
    ("policy: {fetch_cap: [0.1, 0.1]}", "value given twice"),
    ("objective: {min_recall: [0.1, 0.2]}", "cannot be swept"),
]


@pytest.mark.parametrize(("text", "message"), YAML, ids=[text[:30].replace("\n", " ") for text, _ in YAML])
def test_a_faulty_experiment_file(oasis: Oasis, tiny_trace: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "experiment.yaml").write_text(text)
    done = oasis("sweep", "experiment.yaml", "--trace", str(tiny_trace))
    _assert_one_clear_line(done.code, done.err, done.out, message)
    assert [path.name for path in tmp_path.iterdir()] == ["experiment.yaml"]


def test_a_rate_without_arrivals_is_refused(oasis: Oasis, tiny_trace: Path, tmp_path: Path) -> None:
    done = oasis("run", "--trace", str(tiny_trace), "--set", "serving.rate_per_s=2")
    _assert_one_clear_line(done.code, done.err, done.out, "add serving.arrivals=poisson")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "key", ["burstiness_cv=2", "stamped_batches=keep", "first_token=decode", "prefix_gpu_tokens=9"]
)
def test_a_serving_key_that_does_nothing_here_still_makes_a_serving_run(key: str) -> None:
    (point,) = make_request({f"serving.{key.split('=')[0]}": [parse_value(key.split("=")[1])]}).points
    (plain,) = make_request({"serving.arrivals": ["closed"]}).points
    assert point.serving is not None
    assert point.serving.arrival_process == plain.serving.arrival_process == "closed"


@pytest.mark.parametrize("target", ["", " "])
@pytest.mark.parametrize("more", [[], ["--compact"]])
def test_packing_into_an_empty_path(
    oasis: Oasis, tiny_trace: Path, tmp_path: Path, target: str, more: list[str]
) -> None:
    done = oasis("trace", "pack", str(tiny_trace), target, *more)
    _assert_one_clear_line(done.code, done.err, done.out, "'TRACE.zip': the path is empty; give the name of a file")
    assert list(tmp_path.iterdir()) == []


def test_run_takes_one_value_per_key(oasis: Oasis, tiny_trace: Path, tmp_path: Path) -> None:
    done = oasis("run", "--trace", str(tiny_trace), "--fetch-cap", "0.1,0.2")
    _assert_one_clear_line(done.code, done.err, done.out, "run takes one value for policy.fetch_cap")
    (tmp_path / "experiment.yaml").write_text("policy: {block_size_tokens: [8, 16]}")
    done = oasis("run", "experiment.yaml", "--trace", str(tiny_trace))
    _assert_one_clear_line(done.code, done.err, done.out, "run takes one value for policy.block_size_tokens")


def test_a_batch_that_does_not_fit_names_pool_need_have_and_largest(
    oasis: Oasis, tiny_trace: Path, tmp_path: Path
) -> None:
    done = oasis("run", "--trace", str(tiny_trace), "--batch-size", "10000000")
    _assert_one_clear_line(done.code, done.err, done.out, "cannot hold the batch: need")
    assert "have" in done.err
    assert "largest batch that fits" in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("verb", ["run", "sweep"])
def test_an_output_that_cannot_be_written(oasis: Oasis, tiny_trace: Path, tmp_path: Path, verb: str) -> None:
    (tmp_path / "file").write_text("text")
    done = oasis(verb, "--trace", str(tiny_trace), "--system", "quest", "--out", "file/run")
    _assert_one_clear_line(done.code, done.err, done.out, "cannot write file/run")


def test_jobs_below_one(oasis: Oasis, tiny_trace: Path) -> None:
    done = oasis("sweep", "--trace", str(tiny_trace), "--jobs", "0")
    _assert_one_clear_line(done.code, done.err, done.out, "--jobs must be at least 1")


@pytest.mark.parametrize("verb", ["info", "check"])
def test_traces_that_cannot_be_trusted(oasis: Oasis, tiny_trace: Path, tmp_path: Path, verb: str) -> None:
    missing = oasis("trace", verb, "missing.zarr")
    _assert_one_clear_line(missing.code, missing.err, missing.out, "missing.zarr")
    short = tmp_path / "short.zarr.zip"
    short.write_bytes(tiny_trace.read_bytes()[:5000])
    truncated = oasis("trace", verb, "short.zarr.zip")
    _assert_one_clear_line(truncated.code, truncated.err, truncated.out, "short.zarr.zip")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "folder"], "folder: is a folder; pass an experiment's YAML file"),
        (["sweep", "run"], "run: is a folder; pass an experiment's YAML file, run/config.yaml"),
        (["compare", "folder"], "folder: is a folder; pass an experiment's YAML file"),
        (["sweep", "--out", "file"], "file: is a file; results go into a folder"),
        (["compare", "--out", "file"], "file: is a file; results go into a folder"),
        (["plot", "file"], "file: is a file; pass the folder that run or sweep wrote"),
        (["plot", "folder", "--out", "file"], "file: is a file; results go into a folder"),
        (["plot", "validation"], "validation: not a complete results folder, it lacks results.parquet"),
        (["validate", "validation", "--out", "new"], "of measured points, not of a sweep; pass validation/campaign"),
        (["validate", "folder.jsonl", "--out", "new"], "folder.jsonl: pass a campaign's .jsonl file, an experiment's"),
        (["validate", "file", "--out", "new"], "file: pass a campaign's .jsonl file, an experiment's .yaml file or a"),
        (["validate", "absent", "--out", "new"], "absent: no such file or folder"),
        (["validate", "--out", "file"], "--out file: is a file; results go into a folder"),
        (["trace", "overlap", "smollm2-135m-extras", "--out", "file"], "file: is a file; results go into a folder"),
        (["record", "folder", "--model", "smollm2-135m", "--out", "new"], "folder: prompts cannot be read: Is a dir"),
        (["quality", "folder", "--model", "smollm2-135m", "--out", "new"], "folder: prompts cannot be read: Is a dir"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_folder_for_a_file_and_a_file_for_a_folder(
    oasis: Oasis, tmp_path: Path, arguments: list[str], message: str
) -> None:
    for folder in ("folder", "folder.jsonl", "run", "validation"):
        (tmp_path / folder).mkdir()
    for file in ("file", "run/config.yaml", "validation/campaign.jsonl", "validation/points.jsonl"):
        (tmp_path / file).touch()
    before = sorted(tmp_path.rglob("*"))
    done = oasis(*arguments)
    _assert_one_clear_line(done.code, done.err, done.out, message)
    assert sorted(tmp_path.rglob("*")) == before


def _tampered(source: Path, target: Path) -> None:
    """The trace with one attribute changed that the content hash covers."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.namelist():
            content = old.read(entry)
            if entry == "reasoning/zarr.json":
                document = json.loads(content)
                document["attributes"]["group"]["score_levels_per_octave"] = 8
                content = json.dumps(document).encode()
            new.writestr(entry, content)


def test_a_tampered_trace(oasis: Oasis, tiny_trace: Path, tmp_path: Path) -> None:
    _tampered(tiny_trace, tmp_path / "tampered.zarr.zip")
    done = oasis("trace", "check", "tampered.zarr.zip")
    _assert_one_clear_line(done.code, done.err, done.out, "content hash")


def test_other_verbs(oasis: Oasis, tmp_path: Path) -> None:
    for arguments, message in [
        (["catalog", "fish"], "expected one of models, hardware, systems, traces"),
        (["plot", "runs/none"], "runs/none"),
        (["plot", "runs/none", "--format", "bmp"], "'bmp' is not one of png, svg, pdf"),
        (["trace", "pack", "none", "out.zip"], "none"),
        (["frobnicate"], "frobnicate"),
        (["record", "none.jsonl", "--model", "smollm2-135m", "--out", "new"], "none.jsonl"),
    ]:
        done = oasis(*arguments)
        _assert_one_clear_line(done.code, done.err, done.out, message)
    assert list(tmp_path.iterdir()) == []
