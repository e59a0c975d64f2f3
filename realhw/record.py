"""Record an attention trace of a model that decodes a prompt (the loop is `_decode`)."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from realhw.drafters import Drafter, make_drafter
from realhw.hook import AttentionTap, RecordError
from realhw.kv_cache import cut, new_cache, prepare_cutting, require_cached
from realhw.memory_limit import out_of_memory
from realhw.models import LoadedModel, cache_keyword, full_attention_layers, load_model, window_tokens
from realhw.prompts import Prompt, encode_prompt, fit_context
from realhw.record_options import (
    RecordOptions,
    group_attributes,
    layers_by_block_size,
    require_sparse_drafts,
    selected_heads,
)
from realhw.sparse_drafts import SparseDrafts
from realhw.step_rows import DraftQueue, step_record
from traces.errors import InputError, OasisError
from traces.layout import num_blocks
from traces.mass import quantise_mass
from traces.schema import Provenance, TraceAttributes
from traces.writer import GroupWriter, TraceWriter

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, units done, units planned): prompt tokens of prefill, steps of decode."""


def record(
    options: RecordOptions, out: Path, loaded: LoadedModel | None = None, progress: Progress | None = None
) -> Path:
    """Decode every prompt with dense attention and write a trace folder at `out`, 64 steps at a time.

    Draft rows: the drafter's guesses for the next positions run in the same pass as the real token, after it, and
    their keys are dropped; the causal mask makes both exact. Raises InputError for what cannot be recorded and
    RecordError for attention that the hook did not see. Whatever ends a recording, the steps before stay, as a valid
    shorter trace.
    """
    report = progress or (lambda what, done, total: None)
    report("loading the model", 0, 1)
    loaded = loaded or load_model(options.model, options.device, options.dtype)
    prompts = {prompt.name: _prompt_tokens(loaded, prompt, options) for prompt in options.prompts}
    full_layers = full_attention_layers(loaded.model)
    block_layers = layers_by_block_size(options, full_layers, loaded.geometry.name)
    heads = selected_heads(options, loaded.geometry.num_kv_heads)
    require_sparse_drafts(options, block_layers)
    windowed = tuple(layer for layer in range(loaded.geometry.num_layers) if layer not in full_layers)
    geometry = loaded.geometry.model_copy(
        update={"window_layers": windowed, "window_tokens": window_tokens(loaded.model) if windowed else None}
    )
    attributes = TraceAttributes(
        name=options.name,
        model=geometry,
        tokenizer=type(loaded.tokenizer).__name__ if loaded.tokenizer is not None else None,
        provenance=_provenance(options, loaded),
    )
    tap = AttentionTap(geometry.num_layers, block_layers, heads, options.extras, options.prompt_window_tokens)
    with torch.inference_mode(), tap.installed(loaded.model), TraceWriter(out, attributes) as writer:
        for prompt in options.prompts:
            tokens = prompts[prompt.name]
            drafter = make_drafter(
                options.drafter,
                loaded,
                options.draft_model,
                options.max_ngram_tokens,
                options.min_ngram_tokens,
                options.seed,
                _last_position(tokens, options),
            )
            group = writer.group(prompt.name, group_attributes(options, prompt, tokens, block_layers, heads, drafter))
            with closing(drafter):
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
    generator = torch.Generator().manual_seed(options.seed)
    queue = DraftQueue(options.draft_distances)
    history, cache = list(tokens), new_cache(loaded.model)
    full_layers, sparse = full_attention_layers(loaded.model), None
    if options.sparse_policy is not None:
        levels, heads = options.score_levels_per_octave, loaded.geometry.num_kv_heads
        sparse = SparseDrafts(options.sparse_policy, full_layers, heads, len(tokens), options.steps, levels)
    try:
        _prefill(loaded, tap, history[:-1], cache, options, group, report)
        for step in range(options.steps):
            guesses = drafter.guess(history, options.draft_distances) if options.draft_distances else []
            scores = None
            if sparse is not None:
                scores = _sparse_pass(loaded.model, tap, sparse, [history[-1], *guesses], cache)
                drafter.forget_pass()
            tap.begin(len(history), 1 + len(guesses))
            logits = _forward(
                loaded.model,
                [history[-1], *guesses],
                cache,
                torch.zeros(1, dtype=torch.long, device=loaded.model.device),
            )
            attention = tap.finish()
            cut(cache, len(guesses))
            rows = None if scores is None else _recorded_rows(scores, options, group, full_layers)
            group.append(step_record(attention, history[-1], len(history), group.attributes, queue, guesses, rows))
            report("decode", step + 1, options.steps)
            history.append(_sample(logits, options.temperature, generator, len(history)))
            if options.stop_at_eos and history[-1] == loaded.tokenizer.eos_token_id:
                break
    except BaseException as error:
        with suppress(OasisError):  # what already fails must not hide why
            group.flush(drafter=queue.summary(group.attributes.drafter))
        limit = out_of_memory(error, loaded.model, cache.get_seq_length(), options.prefill_chunk_tokens)
        if limit is None:
            raise
        raise limit from error
    group.flush(drafter=queue.summary(group.attributes.drafter))


def _sparse_pass(
    model: Any, tap: AttentionTap, sparse: SparseDrafts, tokens: list[int], cache: DynamicCache
) -> NDArray[np.float32]:
    """Scores [L, H, R, n − 1] of the step's rows over the policy's working set; the cache is left as it was."""
    sparse.begin()
    with tap.replaced(sparse.attend):
        _forward(model, tokens, cache, 1)
    cut(cache, len(tokens))
    return sparse.plan()


def _recorded_rows(
    scores: NDArray[np.float32], options: RecordOptions, group: GroupWriter, full_layers: Sequence[int]
) -> dict[int, NDArray[np.float32]]:
    assert options.sparse_size is not None
    rows = [full_layers.index(layer) for layer in group.attributes.blocks[options.sparse_size].layers]
    heads = slice(None) if group.attributes.kv_heads is None else list(group.attributes.kv_heads)
    return {options.sparse_size: scores[rows][:, heads]}


def _prefill(
    loaded: LoadedModel,
    tap: AttentionTap,
    tokens: list[int],
    cache: DynamicCache,
    options: RecordOptions,
    group: GroupWriter,
    report: Progress,
) -> None:
    """Run the prompt in chunks: memory grows with the chunk times the context, never with the context squared."""
    tap.begin_prompt(len(tokens))
    for start in range(0, len(tokens), options.prefill_chunk_tokens):
        report("prefill", start, len(tokens))
        chunk = tokens[start : start + options.prefill_chunk_tokens]
        _forward(loaded.model, chunk, cache, 1)
        require_cached(cache, start + len(chunk), loaded.geometry.name)
    report("prefill", len(tokens), len(tokens))
    prepare_cutting(cache)
    stored = {
        size: num_blocks(group.attributes.context_tokens, size)
        for size, block in group.attributes.blocks.items()
        if block.block_mass
    }
    masses = tap.prompt_masses(stored)
    if masses:
        group.write_prompt({key: quantise_mass(mass) for key, mass in masses.items()})


def _forward(model: Any, tokens: list[int], cache: DynamicCache, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """Logits [V] of the first row that is kept of one pass over `tokens`, which enter the cache."""
    ids = torch.tensor([tokens], device=model.device)
    cached = {cache_keyword(model): cache}
    logits: torch.Tensor = model(input_ids=ids, use_cache=True, logits_to_keep=logits_to_keep, **cached).logits
    return logits[0, 0].float().cpu()


def _sample(logits: torch.Tensor, temperature: float, generator: torch.Generator, kv_len: int) -> int:
    if logits.isnan().any() or not logits.amax().isfinite():
        raise RecordError(f"KV length {kv_len}: the model's logits are not finite")
    scaled = logits if temperature == 0 else logits / temperature
    if temperature == 0 or not scaled.amax().isfinite():  # too cold for float32: greedy is its limit
        return int(logits.argmax())
    return int(torch.multinomial(scaled.softmax(dim=-1), 1, generator=generator))


def _prompt_tokens(loaded: LoadedModel, prompt: Prompt, options: RecordOptions) -> list[int]:
    tokens = encode_prompt(loaded.tokenizer, prompt)
    if options.context_tokens is not None:
        tokens = fit_context(tokens, options.context_tokens, options.keep_first_tokens, prompt.name)
    needed = _last_position(tokens, options)
    if len(tokens) < 2:
        raise InputError(f"prompt '{prompt.name}' has {len(tokens)} tokens; a recording needs at least 2")
    if loaded.max_positions is not None and needed > loaded.max_positions:
        raise InputError(
            f"prompt '{prompt.name}': {len(tokens)} tokens of context, {options.steps} steps and "
            f"{options.draft_distances} guesses reach position {needed}, "
            f"the model has {loaded.max_positions}"
        )
    return tokens


def _last_position(tokens: list[int], options: RecordOptions) -> int:
    return len(tokens) + options.steps - 1 + options.draft_distances


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
