"""What sparsity costs in quality: one model decoding densely and with each policy's working set.

Dense decode runs once per batch of prompts. Every policy is then fed its tokens (teacher forcing), all policies of a
block size side by side; where dense decode finds the answers, every policy also decodes on its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from realhw.dense_decode import DenseRun, dense_run
from realhw.models import LoadedModel, full_attention_layers, load_model, text_config
from realhw.prompts import Prompt, encode_prompt, fit_context
from realhw.quality_decode import free_running, holds_answer, teacher_forced
from realhw.quality_options import MIN_DENSE_EXACT_MATCH, QualityOptions, num_guesses, policies_of, predictor_name
from realhw.quality_summary import DENSE, KEYS, dense_shares, summarise
from simulator.specs.policy import PolicySpec
from traces.errors import InputError

Progress = Callable[[str, int, int], None]
PROMPTS_FILE, ANSWERS_FILE, OPTIONS_FILE = "prompts.parquet", "answers.parquet", "options.json"
NOT_OF_THE_RESULT = {"device", "deadline_s", "threads", "command", "bootstrap_samples"}
"""Options that may differ when a run is resumed."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts of one length that decode side by side. tokens: their ids."""

    prompts: tuple[Prompt, ...]
    tokens: tuple[tuple[int, ...], ...]

    @property
    def names(self) -> list[str]:
        return [prompt.name for prompt in self.prompts]


def measure_quality(
    options: QualityOptions, out: Path, loaded: LoadedModel | None = None, progress: Progress | None = None
) -> Path:
    """Write `out`/prompts.parquet (a row per policy and prompt), answers.parquet, quality.parquet (a row per policy and
    task, with intervals) and manifest.json; what is in `out` already is not repeated. Returns quality.parquet's path.

    Raises InputError for a grid, prompt or model that cannot be run, or an `out` of other options.
    """
    started = time.perf_counter()
    grids = {size: policies_of(options, size) for size in options.block_sizes_tokens}
    out.mkdir(parents=True, exist_ok=True)
    _claim(out, options)
    if loaded is None:
        if progress:
            progress("loading the model", 0, 1)
        loaded = load_model(options.model, options.device, options.dtype)
    require_supported(loaded)
    with torch.inference_mode():
        measurement = _Measurement(options, out, loaded, grids, progress, started)
        complete = measurement.run()
    if not (out / PROMPTS_FILE).exists():
        raise InputError(f"deadline_s: {options.deadline_s:g} s ended before anything was measured")
    prompts = _read(out / PROMPTS_FILE)
    answers = _read(out / ANSWERS_FILE) if (out / ANSWERS_FILE).exists() else None
    summary = summarise(prompts, answers, options.bootstrap_samples, options.seed, MIN_DENSE_EXACT_MATCH)
    pq.write_table(summary, out / "quality.parquet")
    cuda = loaded.model.device.type == "cuda"
    manifest = {
        "model": loaded.geometry.name,
        "weights": loaded.weights,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "dtype": options.dtype,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "wall_s": round(time.perf_counter() - started, 1),
        "seconds": measurement.seconds,
        "complete": complete,
        "dense_lane_agreement": float(np.mean(prompts["dense_agrees"].to_numpy())),
        "dense_exact_match": {} if answers is None else dense_shares(answers),
        "command": options.command,
        "options": options.model_dump(mode="json", exclude={"prompts"}),
        "prompts": sorted(set(prompts["prompt"].to_pylist())),
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return out / "quality.parquet"


def require_supported(loaded: LoadedModel) -> None:
    """Raises InputError naming what the sparse decode does not reproduce."""
    name, config = loaded.geometry.name, text_config(loaded.model)
    if not full_attention_layers(loaded.model):
        raise InputError(f"quality: every layer of {name} has a sliding window; there are no blocks to select")
    for option in ("final_logit_softcapping", "attn_logit_softcapping"):
        if getattr(config, option, None):
            raise InputError(f"quality: {name} has {option}, which is not supported")


class _Measurement:
    """The parts of a run, most valuable first, until all are done or the deadline is near."""

    def __init__(
        self,
        options: QualityOptions,
        out: Path,
        loaded: LoadedModel,
        grids: dict[int, list[PolicySpec]],
        progress: Progress | None,
        started: float,
    ) -> None:
        self._options, self._out, self._loaded, self._grids = options, out, loaded, grids
        self._progress, self._started = progress, started
        self._selected = full_attention_layers(loaded.model)
        self._guesses = max(num_guesses(grid) for grid in grids.values())
        self._dense: tuple[list[str], DenseRun] | None = None
        self.seconds: dict[str, list[float]] = {}
        """Wall time of every part, by kind."""

    def run(self) -> bool:
        """Returns whether everything is done."""
        forced = self._batches([(prompt, 0) for prompt in self._options.prompts])
        asked = [(prompt, prompt.answer_tokens) for prompt in self._options.prompts if prompt.answer is not None]
        answered = self._batches(asked)
        first = [(self._force, forced[:1], size) for size in self._grids]
        complete = self._all(first) and self._all((self._ask, [batch], 0) for batch in answered)
        good = {task for task, share in self._dense_shares().items() if share >= MIN_DENSE_EXACT_MATCH}
        free = [batch for batch in answered if batch.prompts[0].task in good]
        for one, other in zip_longest(forced[1:], free):
            for function, batch in ((self._release, other), (self._force, one)):
                if batch is not None:
                    complete = complete and self._all((function, [batch], size) for size in self._grids)
        return complete

    def _all(self, parts: Any) -> bool:
        """Run the parts that are not done; False once the deadline forbids one."""
        for function, batches, size in parts:
            for batch in batches:
                if not self._part(function, batch, size):
                    return False
        return True

    def _part(self, function: Callable[[Batch, int], pa.Table], batch: Batch, size: int) -> bool:
        file = PROMPTS_FILE if function == self._force else ANSWERS_FILE
        kind = f"{function.__name__.strip('_')} {size}"
        done = self._done(file, size)
        if all(name in done for name in batch.names):
            return True
        begun = time.perf_counter()
        deadline = self._options.deadline_s
        expected = max(self.seconds.get(kind, [0.0]))
        if deadline is not None and begun - self._started + expected > deadline:
            return False
        if self._progress:
            self._progress(f"{kind}: {', '.join(batch.names)}", len(done), len(self._options.prompts))
        _append(self._out / file, function(batch, size))
        self.seconds.setdefault(kind, []).append(round(time.perf_counter() - begun, 2))
        return True

    def _done(self, file: str, size: int) -> set[str]:
        """Prompts whose part of this block size (0: dense decode) is in the file."""
        path = self._out / file
        if not path.exists():
            return set()
        table = _read(path, ["prompt", "policy.block_size_tokens"])
        sizes = np.array([value or 0 for value in table["policy.block_size_tokens"].to_pylist()])
        return set(np.array(table["prompt"].to_pylist())[sizes == size].tolist())

    def _force(self, batch: Batch, size: int) -> pa.Table:
        grid, steps = self._grids[size], self._options.steps
        values = teacher_forced(self._loaded, self._dense_run(batch, steps), grid, self._options, self._selected, steps)
        for name, of_lane in values.items():
            if not np.isfinite(of_lane).all():
                prompt = batch.names[int(np.argwhere(~np.isfinite(of_lane))[0, 0])]
                raise InputError(f"prompt '{prompt}': {name} is not finite; nothing of it is kept")
        geometry = self._loaded.geometry
        block_bytes = 2 * size * geometry.head_dim * 2
        table = _policy_columns(grid, batch)
        table["context_tokens"] = [len(batch.tokens[0])] * (len(grid) * len(batch.prompts))
        table["num_steps"] = [steps] * (len(grid) * len(batch.prompts))
        table |= {name: of_lane.reshape(-1) for name, of_lane in values.items() if name != "fetched_blocks"}
        table["h2d_bytes"] = values["fetched_blocks"].reshape(-1) * block_bytes
        return pa.table(table)

    def _ask(self, batch: Batch, size: int) -> pa.Table:
        """Dense decode's own answers."""
        dense = self._dense_run(batch, batch.prompts[0].answer_tokens)
        nothing = {name: pa.nulls(len(batch.prompts), type_) for name, type_ in KEY_TYPES.items()}
        found = self._found(batch, dense.tokens[:, 1:].cpu().numpy()[:, None])
        named = {"predictor": [DENSE] * len(batch.prompts), "prompt": batch.names, "task": _tasks(batch)}
        return pa.table(nothing | named | {"found": found.reshape(-1)}).select(ANSWER_COLUMNS)

    def _release(self, batch: Batch, size: int) -> pa.Table:
        """Every policy's own answers; an oracle of one's own future does not exist."""
        grid = [policy for policy in self._grids[size] if policy.predictor != "oracle"]
        steps = batch.prompts[0].answer_tokens
        dense = self._dense_run(batch, steps)
        tokens = free_running(self._loaded, dense, grid, self._options, self._selected, steps)
        table = _policy_columns(grid, batch) | {"found": self._found(batch, tokens).reshape(-1)}
        return pa.table(table).select(ANSWER_COLUMNS)

    def _found(self, batch: Batch, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        tokenizer = self._loaded.tokenizer
        return np.array(
            [
                [holds_answer(tokenizer, row.tolist(), str(prompt.answer)) for row in own]
                for prompt, own in zip(batch.prompts, tokens, strict=True)
            ]
        )

    def _dense_run(self, batch: Batch, steps: int) -> DenseRun:
        """Kept for the next part, which is most often of the same batch."""
        if self._dense is None or self._dense[0] != batch.names or self._dense[1].tokens.shape[1] < steps + 2:
            self._dense = None
            run = dense_run(self._loaded, batch.tokens, self._options, steps, self._guesses)
            self._dense = (batch.names, run)
        return self._dense[1]

    def _dense_shares(self) -> dict[str, float]:
        path = self._out / ANSWERS_FILE
        return dense_shares(_read(path)) if path.exists() else {}

    def _batches(self, prompts: Sequence[tuple[Prompt, int]]) -> list[Batch]:
        """Consecutive prompts of one length (and task and number of answer tokens, where those count) together."""
        groups: dict[tuple[Any, ...], list[tuple[Prompt, tuple[int, ...]]]] = {}
        for prompt, answer_tokens in prompts:
            tokens = self._encoded(prompt)
            key = (len(tokens), answer_tokens, prompt.task if answer_tokens else None)
            groups.setdefault(key, []).append((prompt, tokens))
        size = self._options.prompts_per_batch
        chunks = [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]
        return [Batch(*(tuple(part) for part in zip(*chunk, strict=True))) for chunk in chunks]

    def _encoded(self, prompt: Prompt) -> tuple[int, ...]:
        options, limit = self._options, self._loaded.max_positions
        tokens = encode_prompt(self._loaded.tokenizer, prompt)
        if options.context_tokens is not None:
            tokens = fit_context(tokens, options.context_tokens, options.keep_first_tokens, prompt.name)
        steps = max(options.steps, prompt.answer_tokens if prompt.answer is not None else 0)
        if len(tokens) < 2 or (limit is not None and len(tokens) + steps + 1 + self._guesses > limit):
            raise InputError(
                f"prompt '{prompt.name}' has {len(tokens)} tokens; with {steps} steps and {self._guesses} guesses the "
                f"model takes 2 to {limit}"
            )
        return tuple(tokens)


KEY_TYPES = {
    name: pa.string() if name == "predictor" else pa.float64() if name == "policy.fetch_cap" else pa.int64()
    for name in KEYS
}
ANSWER_COLUMNS = [*KEYS, "prompt", "task", "found"]


def _policy_columns(grid: Sequence[PolicySpec], batch: Batch) -> dict[str, Any]:
    """Key columns of rows in (prompt, policy) order."""
    count = len(batch.prompts)
    return {
        "predictor": [predictor_name(p) for p in grid] * count,
        "policy.kv_budget_tokens": [p.kv_budget_tokens for p in grid] * count,
        "policy.block_size_tokens": [p.block_size_tokens for p in grid] * count,
        "policy.fetch_cap": [p.fetch_cap for p in grid] * count,
        "policy.lookahead_k": [p.lookahead_k for p in grid] * count,
        "prompt": np.repeat(batch.names, len(grid)),
        "task": np.repeat(_tasks(batch), len(grid)),
    }


def _tasks(batch: Batch) -> list[str]:
    return [prompt.task for prompt in batch.prompts]


def _read(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    try:
        return pq.read_table(path, columns=columns)
    except (OSError, ValueError, KeyError) as error:  # pyarrow's own errors are ValueError or OSError
        first = str(error).splitlines()[0]
        raise InputError(f"{path}: is not as it was written ({first}); remove it to measure again") from error


def _append(path: Path, rows: pa.Table) -> None:
    """Add rows to a table, whole or not at all."""
    before = [_read(path)] if path.exists() else []
    temporary = path.with_suffix(".tmp")
    pq.write_table(pa.concat_tables([*before, rows]), temporary, compression="zstd")
    os.replace(temporary, path)


def _claim(out: Path, options: QualityOptions) -> None:
    """Raises InputError where `out` holds results of other options."""
    content = json.dumps(options.model_dump(mode="json", exclude=NOT_OF_THE_RESULT), indent=1) + "\n"
    path = out / OPTIONS_FILE
    if not any((out / file).exists() for file in (PROMPTS_FILE, ANSWERS_FILE)):
        path.write_text(content, encoding="utf-8")  # of a run that measured nothing, if of any
        return
    try:
        there, wanted = json.loads(path.read_text(encoding="utf-8")), json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: which options the results in {out} are of cannot be read: {error}") from error
    if not isinstance(there, dict):
        raise InputError(f"{path}: expected a JSON object")
    for name in sorted(wanted.keys() | there.keys()):
        if there.get(name) != wanted.get(name):
            raise InputError(f"{out}: holds results of another {name}; choose another folder or repeat that command")
