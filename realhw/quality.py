"""What sparsity costs in quality: one model decoding densely and with each policy's working set, on the same tokens.

Dense decode runs once per prompt and gives the tokens; every policy is then fed those tokens (teacher forcing), all
policies of a block size side by side. Who is resident when is decided by `simulator.residency_batch`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from pydantic import Field
from transformers import DynamicCache

from realhw.drafters import DrafterName, make_drafter
from realhw.models import Dtype, LoadedModel, cache_keyword, full_attention_layers, load_model
from realhw.prompts import Prompt, encode_prompt, fit_context
from realhw.quality_summary import summarise
from realhw.sparse_decode import SparseAttention, rank_scores_on_device
from simulator.fetch_cap import allowed_blocks, default_slack_blocks
from simulator.predictors import random_ranking
from simulator.residency_batch import ResidencyBatch
from simulator.specs.base import NonNegativeInt, PositiveInt, Spec
from simulator.specs.policy import PolicySpec
from simulator.specs.validation import validated
from traces.errors import InputError

Progress = Callable[[str, int, int], None]
MIN_DENSE_EXACT_MATCH = 0.3
"""Exact match is reported only where dense decode itself finds at least this share of the answers."""


class QualityOptions(Spec):
    """Which model decodes what under which policies. `oasis-sim quality` builds it from its flags."""

    model: str
    prompts: tuple[Prompt, ...] = Field(min_length=1)
    context_tokens: PositiveInt | None = None
    """KV length at the first step; longer prompts lose their middle. Null: each prompt's own length."""
    keep_first_tokens: NonNegativeInt = 32
    steps: PositiveInt = 64
    """Measured positions per prompt; the dense step before them admits the first working set."""
    fetch_caps: tuple[float, ...] = (1.0,)
    budgets_tokens: tuple[PositiveInt, ...] = (512,)
    block_sizes_tokens: tuple[PositiveInt, ...] = (16,)
    predictors: tuple[str, ...] = ("previous", "draft1", "oracle", "random")
    """current, previous, random, oracle, or draft{k}: the draft token's query k steps ahead. oracle: a draft that is
    always right, one step ahead."""
    drafter: DrafterName = "ngram"
    draft_model: str | None = None
    score_levels_per_octave: PositiveInt = 16
    seed: NonNegativeInt = 0
    """Of the random predictor and of the bootstrap."""
    bootstrap_samples: PositiveInt = 1000
    device: str = "cpu"
    dtype: Dtype = "float32"
    """float32 keeps rounding out of small divergences."""
    prefill_chunk_tokens: PositiveInt = 2048
    threads: PositiveInt | None = None
    """For residency; null: all cores."""
    command: str | None = None


@dataclass(frozen=True, slots=True)
class DenseRun:
    """Greedy dense decode of one prompt.

    prompt: per layer keys and values [H, N, D] of all prompt tokens but the last. tokens: int [S + 1], the token run
    at each step; step 0 runs the last prompt token. guesses: per step, the drafter's tokens for the next positions.
    """

    prompt: list[tuple[torch.Tensor, torch.Tensor]]
    tokens: list[int]
    guesses: list[list[int]]


def policies_of(options: QualityOptions, block_size: int) -> list[PolicySpec]:
    """The grid at one block size, without duplicates: on demand there is no cap to vary."""
    grid: list[PolicySpec] = []
    for name, budget, cap in product(options.predictors, options.budgets_tokens, options.fetch_caps):
        if budget % block_size:
            raise InputError(f"budgets_tokens: {budget} is no multiple of block size {block_size}")
        draft = name.removeprefix("draft")
        values: dict[str, Any] = {
            "predictor": "draft" if draft.isdigit() else name,
            "lookahead_k": int(draft) if draft.isdigit() else 1,
            "kv_budget_tokens": budget,
            "block_size_tokens": block_size,
            "fetch_cap": cap if name != "current" else 1.0,
            "residency": "exact" if name == "current" else "slack",
        }
        if name != "current":
            slack = default_slack_blocks(values["lookahead_k"], cap, budget // block_size)
            values["slack_blocks"] = max(1, slack)
        policy = validated(PolicySpec, values, key_prefix="policy")
        if policy not in grid:
            grid.append(policy)
    return grid


def measure_quality(
    options: QualityOptions, out: Path, loaded: LoadedModel | None = None, progress: Progress | None = None
) -> Path:
    """Write `out`/steps.parquet (a row per policy, prompt and step), quality.parquet (a row per policy, with
    intervals) and manifest.json; prompts already in `out` are not repeated. Returns the path of quality.parquet.

    Raises InputError for a grid, prompt or model that cannot be run.
    """
    report = progress or (lambda what, done, total: None)
    grids = {size: policies_of(options, size) for size in options.block_sizes_tokens}
    report("loading the model", 0, 1)
    loaded = loaded or load_model(options.model, options.device, options.dtype)
    if len(full_attention_layers(loaded.model)) < loaded.geometry.num_layers:
        raise InputError(f"quality: {loaded.geometry.name} has sliding-window layers, which are not supported")
    out.mkdir(parents=True, exist_ok=True)
    started, rows = time.perf_counter(), []
    with torch.inference_mode():
        for number, prompt in enumerate(options.prompts):
            part = out / f"steps-{prompt.name}.parquet"
            if not part.exists():
                dense = dense_run(loaded, prompt, options)
                found = _contains(loaded.tokenizer, dense.tokens[1:], prompt.answer)
                tables = []
                for size, grid in grids.items():
                    report(f"{prompt.name}: {len(grid)} policies of block size {size}", number, len(options.prompts))
                    tables.append(sparse_run(loaded, dense, grid, options, prompt.name, found))
                temporary = part.with_suffix(".tmp")
                pq.write_table(pa.concat_tables(tables), temporary, compression="zstd")
                os.replace(temporary, part)
            rows.append(pq.read_table(part))
    steps = pa.concat_tables(rows)
    pq.write_table(steps, out / "steps.parquet", compression="zstd")
    summary = summarise(steps, options.bootstrap_samples, options.seed, MIN_DENSE_EXACT_MATCH)
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
        "command": options.command,
        "options": options.model_dump(mode="json", exclude={"prompts"}),
        "prompts": [prompt.name for prompt in options.prompts],
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return out / "quality.parquet"


def dense_run(loaded: LoadedModel, prompt: Prompt, options: QualityOptions) -> DenseRun:
    """Prefill once, then decode greedily with the drafter watching."""
    tokens = encode_prompt(loaded.tokenizer, prompt)
    if options.context_tokens is not None:
        tokens = fit_context(tokens, options.context_tokens, options.keep_first_tokens, prompt.name)
    most = max((int(name[5:]) for name in options.predictors if name.startswith("draft")), default=0)
    limit = loaded.max_positions
    if len(tokens) < 2 or (limit is not None and len(tokens) + options.steps + 1 + most > limit):
        raise InputError(
            f"prompt '{prompt.name}' has {len(tokens)} tokens; with {options.steps} steps and {most} guesses the model "
            f"takes 2 to {limit}"
        )
    model, device = loaded.model, loaded.model.device
    drafter = make_drafter(options.drafter, loaded, options.draft_model, seed=options.seed)
    cache = DynamicCache()
    cached = {cache_keyword(model): cache}
    history, guesses = list(tokens), []
    with closing(drafter):
        for start in range(0, len(tokens) - 1, options.prefill_chunk_tokens):
            chunk = tokens[start : min(start + options.prefill_chunk_tokens, len(tokens) - 1)]
            model(input_ids=torch.tensor([chunk], device=device), use_cache=True, logits_to_keep=1, **cached)
        kept = [(layer.keys[0].clone(), layer.values[0].clone()) for layer in cache.layers]
        for _ in range(options.steps + 1):
            guesses.append(drafter.guess(history, most) if most else [])
            ids = torch.tensor([history[-1:]], device=device)
            history.append(int(model(input_ids=ids, use_cache=True, **cached).logits[0, -1].argmax()))
    return DenseRun(kept, history[len(tokens) - 1 :], guesses)


def sparse_run(
    loaded: LoadedModel,
    dense: DenseRun,
    grid: Sequence[PolicySpec],
    options: QualityOptions,
    prompt_name: str,
    dense_found_answer: bool | None,
) -> pa.Table:
    """Decode dense.tokens under every policy of one block size; a row per policy and step 1 … S."""
    device, size = loaded.model.device, grid[0].block_size_tokens
    state = _Policies(loaded, dense, grid, options)
    columns: dict[str, list[Any]] = {name: [] for name in ("kl", "nll", "nll_dense", "agrees", "recall", "hit_rate")}
    columns["fetched_blocks"] = []
    with state.attention.installed(loaded.model):
        for step in range(options.steps + 1):
            attended = state.masks(step)
            tokens = torch.tensor(state.rows(step), device=device)
            logits = state.attention.run(loaded.model, tokens, attended, state.ranker(step))
            fetched, hit_rate = state.plan(step)
            if step == 0:
                continue
            log_p = logits.float().log_softmax(dim=-1)
            log_dense, sparse = log_p[-1], log_p[:-1]
            following = dense.tokens[step + 1]
            columns["kl"].append((log_dense.exp() * (log_dense - sparse)).sum(dim=-1).cpu().numpy())
            columns["nll"].append(-sparse[:, following].cpu().numpy())
            columns["nll_dense"].append(np.full(len(grid), -float(log_dense[following]), np.float32))
            columns["agrees"].append((sparse.argmax(dim=-1) == log_dense.argmax()).cpu().numpy())
            recall = torch.stack(state.attention.recall, dim=1).mean(dim=(1, 2))
            columns["recall"].append(recall[:-1].cpu().numpy())
            columns["hit_rate"].append(hit_rate)
            columns["fetched_blocks"].append(fetched)
    geometry = loaded.geometry
    block_bytes = 2 * size * geometry.head_dim * 2
    names = [p.predictor if p.predictor != "draft" else f"draft{p.lookahead_k}" for p in grid]
    repeated: dict[str, Any] = {
        "predictor": names,
        "policy.kv_budget_tokens": [p.kv_budget_tokens for p in grid],
        "policy.block_size_tokens": [p.block_size_tokens for p in grid],
        "policy.fetch_cap": [p.fetch_cap for p in grid],
        "policy.lookahead_k": [p.lookahead_k for p in grid],
    }
    flat = {name: np.stack(values).reshape(-1) for name, values in columns.items()}
    table: dict[str, Any] = {name: list(values) * options.steps for name, values in repeated.items()}
    table["prompt"] = [prompt_name] * len(flat["kl"])
    table["context_tokens"] = [dense.prompt[0][0].shape[1] + 1] * len(flat["kl"])
    table["step"] = np.repeat(np.arange(1, options.steps + 1), len(grid))
    table |= {name: flat[name].astype(np.float64) for name in ("kl", "nll", "nll_dense", "recall", "hit_rate")}
    table["agrees"] = flat["agrees"]
    table["h2d_bytes"] = flat["fetched_blocks"].astype(np.int64) * block_bytes
    table["dense_found_answer"] = pa.array([dense_found_answer] * len(flat["kl"]), pa.bool_())
    return pa.table(table)


class _Policies:
    """Residency, token rows and pending predictions of a grid; one more row, the last, decodes densely."""

    def __init__(
        self, loaded: LoadedModel, dense: DenseRun, grid: Sequence[PolicySpec], options: QualityOptions
    ) -> None:
        self.grid, self.dense, self.options = grid, dense, options
        self.device = loaded.model.device
        self.size = grid[0].block_size_tokens
        geometry, steps = loaded.geometry, options.steps + 1
        self.num_layers, self.num_heads = geometry.num_layers, geometry.num_kv_heads
        self.kept = np.array([_budget(p) // self.size for p in grid], dtype=np.int64)
        self.ahead = np.array([0 if p.predictor == "current" else p.lookahead_k for p in grid], dtype=np.int64)
        needs_draft = np.array([p.predictor in ("draft", "oracle") for p in grid])
        self.num_rows = 1 + int((self.ahead * needs_draft).max(initial=0))
        row = torch.tensor([*(self.ahead * needs_draft), 0], device=self.device)
        self.attention = SparseAttention(dense.prompt, self.size, row, steps)
        self.num_blocks = [-(-(dense.prompt[0][0].shape[1] + 1 + step) // self.size) for step in range(steps)]
        slots = self.kept + np.array([p.slack_blocks or 0 for p in grid], dtype=np.int64)
        by_score = np.array([p.eviction == "lowest-score" for p in grid])
        threads = options.threads or os.cpu_count() or 1
        self.residency = ResidencyBatch(
            self.num_layers, self.num_heads, self.kept, slots, by_score, self.num_blocks[-1], threads
        )
        self.allowed = np.stack(
            [allowed_blocks(Fraction(str(p.fetch_cap)), int(k), steps) for p, k in zip(grid, self.kept, strict=True)],
            axis=1,
        )
        self.width = int(self.kept.max())
        self.fetched_now = np.zeros(len(grid), dtype=np.int64)
        self.before = torch.empty(0)
        """Attended blocks bool [B, L, H, n] before any on-demand fetch of the step, without the open block."""
        self.random: dict[int, NDArray[np.int32]] = {}
        blocks = np.array(self.num_blocks, dtype=np.int32)
        for policy in grid:
            if policy.predictor == "random" and policy.lookahead_k not in self.random:
                self.random[policy.lookahead_k] = random_ranking(
                    tuple(range(self.num_layers)), self.num_heads, blocks, self.width, policy.lookahead_k, options.seed
                )

    def rows(self, step: int) -> list[list[int]]:
        """Tokens to run per policy: the real one, then drafts (for oracle: what really follows)."""
        real = self.dense.tokens
        following = (real[step + 1 :] + [0] * self.num_rows)[: self.num_rows - 1]
        guesses = (self.dense.guesses[step] + following[len(self.dense.guesses[step]) :])[: self.num_rows - 1]
        rows = [[real[step], *(following if p.predictor == "oracle" else guesses)] for p in self.grid]
        return [*rows, [real[step], *following]]

    def masks(self, step: int) -> torch.Tensor | None:
        """Attended blocks bool [B + 1, L, H, n], the open block included; None at the dense step 0."""
        if step == 0:
            return None
        n = self.num_blocks[step]
        self.residency.begin(n)
        attended = torch.from_numpy(self.residency.attended()[..., :n]).to(self.device).bool()
        self.before = attended.clone()
        attended[..., n - 1] = True
        return torch.cat([attended, torch.ones_like(attended[:1])])

    def ranker(self, step: int) -> Any:
        """For on-demand policies: fetch what this layer's own query selects before its attention."""
        self.fetched_now = np.zeros(len(self.grid), dtype=np.int64)
        if step == 0 or not (self.ahead == 0).any():
            return None
        n = self.num_blocks[step]

        def rank(layer: int, scores: torch.Tensor) -> torch.Tensor:
            ids = self._ranked(scores[:-1, :, 0])[:, None].cpu().numpy()
            due = np.where(self.ahead == 0, step, -1)
            self.fetched_now += self.residency.plan(ids, due, self.allowed[step], layer)
            attended = torch.from_numpy(self.residency.attended(layer)[:, 0, :, :n]).to(self.device).bool()
            attended[..., n - 1] = True
            return torch.cat([attended, torch.ones_like(attended[:1])])

        return rank

    def plan(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """After attention: plans for later steps. Returns (blocks fetched, hit rate) per policy."""
        ids = self._ranked(torch.stack([scores[:-1] for scores in self.attention.scores], dim=1))
        true, predicted = ids[..., 0, :], ids[..., 1, :].cpu().numpy()
        n = self.num_blocks[step]
        if step == 0:
            self.residency.admit(true[0].cpu().numpy(), n)
            hits = np.ones(len(self.grid))
        else:
            hits = self._hit_rate(true, n)
        guessed = len(self.dense.guesses[step])
        for index, policy in enumerate(self.grid):
            if policy.predictor == "draft" and policy.lookahead_k > guessed:
                predicted[index] = true[index].cpu().numpy()
            if policy.predictor == "random" and step + policy.lookahead_k < len(self.num_blocks):
                drawn = self.random[policy.lookahead_k][step + policy.lookahead_k]
                predicted[index, ..., : drawn.shape[-1]] = drawn
        due = np.where((self.ahead > 0) & (step + self.ahead < len(self.num_blocks)), step + self.ahead, -1)
        room = np.array([self.num_blocks[at] - n if at >= 0 else 0 for at in due.tolist()])
        fetched = self.residency.plan(predicted, due, self.allowed[step], room=room)
        return fetched + self.fetched_now, hits

    def _ranked(self, scores: torch.Tensor) -> torch.Tensor:
        return rank_scores_on_device(scores, self.width, self.options.score_levels_per_octave)

    def _hit_rate(self, true: torch.Tensor, n: int) -> NDArray[np.float64]:
        """Mean over heads of |true ∩ attended| / min(K, n), before an on-demand fetch."""
        kept = torch.from_numpy(self.kept).to(self.device)[:, None, None, None]
        selectable = (true >= 0) & (torch.arange(true.shape[-1], device=self.device) < kept)
        found = self.before.gather(-1, true.clamp(min=0).long()) & selectable
        counts = found.sum(dim=-1).double() + (kept[..., 0] >= n)
        rate: NDArray[np.float64] = (counts / kept[..., 0].clamp(max=n)).mean(dim=(1, 2)).cpu().numpy()
        return rate


def _budget(policy: PolicySpec) -> int:
    if policy.kv_budget_tokens is None:
        raise InputError("policy.kv_budget_tokens is open")
    return policy.kv_budget_tokens


def _contains(tokenizer: Any, tokens: Sequence[int], answer: str | None) -> bool | None:
    """Whether the decoded text has the answer; None without one."""
    return None if answer is None else answer in tokenizer.decode(list(tokens))
