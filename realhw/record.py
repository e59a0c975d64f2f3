"""Record an attention trace of a model that decodes a prompt (the loop is `_decode`)."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from transformers import DynamicCache

from realhw.drafters import Drafter, DrafterName, make_drafter
from realhw.hook import AttentionTap, RecordError, StepAttention
from realhw.models import Dtype, LoadedModel, cache_keyword, full_attention_layers, load_model
from realhw.prompts import Prompt, encode_prompt, fit_context
from simulator.specs.base import NonNegativeFloat, NonNegativeInt, PositiveInt, Spec
from traces.codec import rank_scores
from traces.errors import InputError
from traces.mass import quantise_mass
from traces.schema import (
    BlockSizeAttributes,
    DrafterAttributes,
    GroupAttributes,
    Provenance,
    TraceAttributes,
    mass_source,
)
from traces.writer import GroupWriter, StepRecord, TraceWriter

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps planned)."""


class RecordOptions(Spec):
    """What to record. `oasis-sim record` builds it from its flags."""

    model: str
    """`smollm2-135m`, a .gguf file, a model folder or a Hugging Face name."""
    prompts: tuple[Prompt, ...] = Field(min_length=1)
    name: str = "recorded"
    """Of the trace."""
    context_tokens: PositiveInt | None = None
    """KV length at the first step, the current token included. Null: the prompt's own length."""
    keep_first_tokens: NonNegativeInt = 32
    """When a prompt exceeds `context_tokens`: tokens kept at its start; what follows them is cut."""
    steps: PositiveInt = 128
    block_sizes_tokens: tuple[PositiveInt, ...] = (16,)
    """Recorded for all full-attention layers, with the mass of every block."""
    extra_block_sizes_tokens: tuple[PositiveInt, ...] = ()
    """Recorded for `extra_layers` only."""
    extra_layers: tuple[NonNegativeInt, ...] | None = None
    """Null: six layers spread over the depth."""
    max_budget_tokens: PositiveInt = 2048
    """M·P: the largest KV budget that the trace can replay."""
    score_levels_per_octave: PositiveInt = 16
    draft_distances: NonNegativeInt = Field(default=4, le=8)
    drafter: DrafterName = "ngram"
    draft_model: str | None = None
    """Of drafter `model`: as `model`, same tokenizer; of `eagle3`: a packaged head, its file or its folder."""
    max_ngram_tokens: PositiveInt = 3
    min_ngram_tokens: PositiveInt = 1
    temperature: NonNegativeFloat = 0.0
    """0: greedy."""
    seed: NonNegativeInt = 0
    stop_at_eos: bool = False
    """False: decode `steps` tokens whatever the model says."""
    device: str = "cpu"
    dtype: Dtype = "float32"
    prefill_chunk_tokens: PositiveInt = 2048
    command: str | None = None
    """Stored in the trace."""
    licences: dict[str, str] = Field(default_factory=dict)
    """Of the prompts, stored in the trace."""
    notes: str | None = None


def record(
    options: RecordOptions, out: Path, loaded: LoadedModel | None = None, progress: Progress | None = None
) -> Path:
    """Decode every prompt with dense attention and write a trace folder at `out`, 64 steps at a time.

    Draft rows: the drafter's guesses for the next positions run in the same pass as the real token, after it, and
    their keys are dropped; the causal mask makes both exact. Raises InputError for what cannot be recorded and
    RecordError for attention that the hook did not see; steps already written stay, as a valid shorter trace.
    """
    report = progress or (lambda what, done, total: None)
    report("loading the model", 0, options.steps)
    loaded = loaded or load_model(options.model, options.device, options.dtype)
    prompts = {prompt.name: _prompt_tokens(loaded, prompt, options) for prompt in options.prompts}
    block_layers = _block_layers(options, full_attention_layers(loaded.model), loaded.geometry.name)
    attributes = TraceAttributes(
        name=options.name,
        model=loaded.geometry,
        tokenizer=type(loaded.tokenizer).__name__ if loaded.tokenizer is not None else None,
        provenance=_provenance(options, loaded),
    )
    tap = AttentionTap(loaded.geometry.num_layers, block_layers)
    with torch.inference_mode(), TraceWriter(out, attributes) as writer:
        for prompt in options.prompts:
            tokens = prompts[prompt.name]
            drafter = _make_drafter(options, loaded)
            group = writer.group(prompt.name, _group_attributes(options, prompt, tokens, block_layers, drafter))
            with tap.installed(loaded.model), closing(drafter):
                _decode(loaded, tap, drafter, tokens, options, group, report)
    return out


def _decode(
    loaded: LoadedModel,
    tap: AttentionTap,
    drafter: Drafter,
    tokens: list[int],
    options: RecordOptions,
    group: GroupWriter,
    report: Progress,
) -> None:
    model, device = loaded.model, loaded.model.device
    generator = torch.Generator().manual_seed(options.seed)
    queue = _DraftQueue(options.draft_distances)
    history = list(tokens)
    cache = DynamicCache()
    cached = {cache_keyword(model): cache}
    for start in range(0, len(history) - 1, options.prefill_chunk_tokens):
        report("prefill", 0, options.steps)
        chunk = history[start : min(start + options.prefill_chunk_tokens, len(history) - 1)]
        ids = torch.tensor([chunk], device=device)
        model(input_ids=ids, use_cache=True, logits_to_keep=1, **cached)
    for step in range(options.steps):
        kv_len = len(history)
        guesses = _guess(drafter, history, options)
        tap.begin(kv_len, 1 + len(guesses))
        ids = torch.tensor([[history[-1], *guesses]], device=device)
        logits = model(input_ids=ids, use_cache=True, **cached).logits[0, 0].float().cpu()
        attention = tap.finish()
        if guesses:
            cache.crop(-len(guesses))
        group.append(_step_record(attention, history[-1], kv_len, group.attributes, queue, guesses))
        report("decode", step + 1, options.steps)
        history.append(_sample(logits, options.temperature, generator))
        if options.stop_at_eos and history[-1] == loaded.tokenizer.eos_token_id:
            break
    group.flush(drafter=queue.summary(group.attributes.drafter))


class _DraftQueue:
    """Draft rows on their way from the step that issued them to the position they predict."""

    def __init__(self, distances: int) -> None:
        self.distances = distances
        self._due: dict[tuple[int, int], tuple[int | None, Mapping[int, Any]]] = {}
        self._accepted = np.zeros(distances, np.int64)
        self._fallback = np.zeros(distances, np.int64)
        self._rows = np.zeros(distances, np.int64)

    def issue(self, position: int, distance: int, token: int | None, ranked: Mapping[int, Any]) -> None:
        """ranked: by block size, (ids, levels)."""
        self._due[position + distance, distance] = (token, ranked)

    def take(self, position: int, real_token: int) -> dict[int, tuple[int | None, Mapping[int, Any]]]:
        """Guessed token and rankings for `position`, by distance; those not issued (the first rows) are absent."""
        due = {}
        for distance in range(1, self.distances + 1):
            entry = self._due.pop((position, distance), None)
            if entry is not None:
                due[distance] = entry
                self._rows[distance - 1] += 1
                self._accepted[distance - 1] += entry[0] == real_token
                self._fallback[distance - 1] += entry[0] is None
        return due

    def summary(self, drafter: DrafterAttributes | None) -> DrafterAttributes | None:
        if drafter is None:
            return None
        rows = np.maximum(self._rows, 1)
        return drafter.model_copy(
            update={
                "acceptance": tuple(round(float(x), 6) for x in self._accepted / rows),
                "fallback_share": tuple(round(float(x), 6) for x in self._fallback / rows),
            }
        )


def _step_record(
    attention: StepAttention,
    token: int,
    kv_len: int,
    group: GroupAttributes,
    queue: _DraftQueue,
    guesses: list[int],
) -> StepRecord:
    """Rank this step's rows, queue the guesses' rankings and collect those that are due."""
    rankings: dict[tuple[int, str], tuple[NDArray[np.int32], NDArray[np.uint8]]] = {}
    mass, rest, rows = {}, {}, {}
    for size, block in group.blocks.items():
        try:
            ids, levels = rank_scores(attention.scores[size], block.max_ranked_blocks, group.score_levels_per_octave)
        except ValueError as error:
            raise RecordError(f"KV length {kv_len}, block size {size}, [layer, head, row, block]: {error}") from error
        rows[size] = (ids, levels)
        rankings[size, "true"] = (ids[:, :, 0], levels[:, :, 0])
        blocks = attention.mass[size].astype(np.float64)
        inside = np.where(ids[:, :, 0] >= 0, np.take_along_axis(blocks, np.maximum(ids[:, :, 0], 0), axis=-1), 0)
        rest[size] = (blocks.sum(axis=-1) - inside.sum(axis=-1)).astype(np.float32)
        if block.block_mass or mass_source(group.blocks, size) is None:
            mass[size] = quantise_mass(blocks)
    due = queue.take(kv_len, token)
    for distance, (_, ranked) in due.items():
        for size in group.blocks:
            rankings[size, f"draft{distance}"] = ranked[size]
    for distance in range(1, queue.distances + 1):
        row = distance if distance <= len(guesses) else 0
        ranked = {size: (ids[:, :, row], levels[:, :, row]) for size, (ids, levels) in rows.items()}
        queue.issue(kv_len, distance, guesses[distance - 1] if row else None, ranked)
    tokens = tuple(due[j][0] if j in due else None for j in range(1, queue.distances + 1))
    return StepRecord(kv_len, token, rankings, mass, rest, tokens)


def _make_drafter(options: RecordOptions, loaded: LoadedModel) -> Drafter:
    return make_drafter(
        options.drafter,
        loaded,
        options.draft_model,
        options.max_ngram_tokens,
        options.min_ngram_tokens,
        options.seed,
    )


def _guess(drafter: Drafter, history: list[int], options: RecordOptions) -> list[int]:
    return drafter.guess(history, options.draft_distances) if options.draft_distances else []


def _sample(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator))


def _prompt_tokens(loaded: LoadedModel, prompt: Prompt, options: RecordOptions) -> list[int]:
    tokens = encode_prompt(loaded.tokenizer, prompt)
    if options.context_tokens is not None:
        tokens = fit_context(tokens, options.context_tokens, options.keep_first_tokens, prompt.name)
    needed = len(tokens) + options.steps - 1 + options.draft_distances
    if len(tokens) < 2:
        raise InputError(f"prompt '{prompt.name}' has {len(tokens)} tokens; a recording needs at least 2")
    if loaded.max_positions is not None and needed > loaded.max_positions:
        raise InputError(
            f"prompt '{prompt.name}': {len(tokens)} tokens of context, {options.steps} steps and "
            f"{options.draft_distances} guesses reach position {needed}, "
            f"the model has {loaded.max_positions}"
        )
    return tokens


def _block_layers(options: RecordOptions, full_layers: tuple[int, ...], model: str) -> dict[int, tuple[int, ...]]:
    if not full_layers:
        raise InputError(f"{model}: every layer has a sliding window; nothing to record")
    spread = np.linspace(0, len(full_layers) - 1, min(6, len(full_layers))).round().astype(int)
    extra = options.extra_layers or tuple(full_layers[i] for i in spread)
    unknown = sorted(set(extra) - set(full_layers))
    if unknown:
        raise InputError(f"extra_layers: layer {unknown[0]} is not a full-attention layer of {model}")
    both = sorted(set(options.block_sizes_tokens) & set(options.extra_block_sizes_tokens))
    if both:
        raise InputError(f"block size {both[0]} is asked for both all layers and some")
    sizes = dict.fromkeys(options.block_sizes_tokens, full_layers)
    sizes |= {size: tuple(sorted(set(extra))) for size in options.extra_block_sizes_tokens}
    for size in sizes:
        if options.max_budget_tokens % size:
            raise InputError(f"max_budget_tokens {options.max_budget_tokens} is not a multiple of block size {size}")
    return dict(sorted(sizes.items()))


def _group_attributes(
    options: RecordOptions,
    prompt: Prompt,
    tokens: list[int],
    block_layers: Mapping[int, tuple[int, ...]],
    drafter: Drafter,
) -> GroupAttributes:
    names = ("true", *(f"draft{j}" for j in range(1, options.draft_distances + 1)))
    blocks: dict[int, BlockSizeAttributes] = {}
    for size, layers in block_layers.items():
        finer = any(size % other == 0 and set(layers) <= set(b.layers) for other, b in blocks.items())
        blocks[size] = BlockSizeAttributes(
            layers=layers,
            max_ranked_blocks=options.max_budget_tokens // size,
            rankings=names,
            block_mass=size in options.block_sizes_tokens or not finer,
        )
    guesser = None
    if options.draft_distances:
        guesser = DrafterAttributes(name=drafter.name, distances=options.draft_distances, settings=drafter.settings)
    return GroupAttributes(
        context_tokens=len(tokens),
        steps_planned=options.steps,
        score_levels_per_octave=options.score_levels_per_octave,
        blocks=blocks,
        drafter=guesser,
        prompt=prompt.description,
        prompt_sha256=hashlib.sha256(np.array(tokens, "<i4").tobytes()).hexdigest(),
        sampling={"temperature": options.temperature, "seed": options.seed},
    )


def _provenance(options: RecordOptions, loaded: LoadedModel) -> Provenance:
    software = {name: importlib.metadata.version(name) for name in ("oasis-sim", "torch", "transformers", "zarr")}
    cuda = loaded.model.device.type == "cuda"
    return Provenance(
        command=options.command,
        device=torch.cuda.get_device_name(loaded.model.device) if cuda else platform.machine() + " CPU",
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        attention=loaded.model.config._attn_implementation,
        software=software,
        weights=loaded.weights,
        licences=options.licences,
        notes=options.notes,
    )
