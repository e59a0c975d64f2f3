"""Greedy dense decode of prompts of one length, with a drafter watching: the tokens that policies are fed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from realhw.eagle3_drafter import captured
from realhw.lockstep_drafter import LockstepDrafter, NoDrafter, features_of, make_lockstep_drafter
from realhw.models import LoadedModel, cache_keyword
from realhw.quality_options import QualityOptions
from realhw.sparse_decode import PromptKeys


@dataclass(frozen=True, slots=True)
class DenseRun:
    """Dense decode of P prompts of N tokens.

    prompt: keys of all tokens but the last. tokens: int64 [P, S + 2], the token run at each step, from the last prompt
    token on, and the one after the last step. guesses: int64 [P, S + 1, most], the drafter's tokens for the positions
    after each step's. drafter: as it was before the first step. first_guess: [P, most], what it said then.
    """

    prompt: PromptKeys
    tokens: Tensor
    guesses: Tensor
    drafter: LockstepDrafter
    first_guess: Tensor


def dense_run(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], options: QualityOptions, steps: int, num_guesses: int
) -> DenseRun:
    """Prefill `prompts` (token ids, all of one length) and decode steps + 1 tokens of each."""
    model = loaded.model
    ids = torch.tensor([list(tokens) for tokens in prompts], device=model.device)
    drafter: LockstepDrafter = NoDrafter()
    if num_guesses:
        first = ids[:, 0].tolist()
        last = ids.shape[1] + steps + 1 + num_guesses
        drafter = make_lockstep_drafter(options.drafter, loaded, options.draft_model, options.seed, first, last)
    cache = DynamicCache()
    cached = {cache_keyword(model): cache}
    with watched(loaded, drafter) as passes:
        for start in range(0, ids.shape[1] - 1, options.prefill_chunk_tokens):
            chunk = ids[:, start : min(start + options.prefill_chunk_tokens, ids.shape[1] - 1)]
            model(input_ids=chunk, use_cache=True, logits_to_keep=1, **cached)
        kept = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        guesses = [drafter.guess(features_of(passes), ids[:, 1:], num_guesses)]
        before = drafter.expanded(1)
        tokens = [ids[:, -1:]]
        for step in range(steps + 1):
            logits = model(input_ids=tokens[-1], use_cache=True, **cached).logits[:, -1]
            tokens.append(logits.argmax(dim=-1, keepdim=True))
            if step < steps:
                guesses.append(drafter.guess(features_of(passes), tokens[-1], num_guesses))
    return DenseRun(kept, torch.cat(tokens, dim=1), torch.stack(guesses, dim=1), before, guesses[0])


@contextmanager
def watched(loaded: LoadedModel, drafter: LockstepDrafter) -> Iterator[list[Tensor]]:
    """The hidden states that the drafter wants, as they are computed."""
    if not drafter.feature_layers:
        yield []
        return
    with captured(loaded.model, drafter.feature_layers) as passes:
        yield passes
