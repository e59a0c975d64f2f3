"""Drafters for many requests that decode in lockstep: one call guesses for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from realhw.drafters import Drafter, DrafterName, make_drafter
from realhw.eagle3 import Eagle3Head, Keys
from realhw.eagle3_drafter import load_head_for
from realhw.models import LoadedModel
from traces.errors import InputError

NO_GUESS = -1


class LockstepDrafter(Protocol):
    feature_layers: tuple[int, ...]
    """Hidden states before these layers of the base that `guess` wants side by side; none where empty."""

    def guess(self, features: Tensor | None, following: Tensor, count: int) -> Tensor:
        """Tokens that may follow, int64 [B, count], NO_GUESS where there is nothing to go by.

        features: [B, S, 3·D] of the S tokens run since the last call. following: int64 [B, S], the token after each.
        """

    def expanded(self, times: int) -> LockstepDrafter:
        """A copy for `times` requests in place of each, side by side."""


class NoDrafter:
    """For grids without a draft."""

    feature_layers: tuple[int, ...] = ()

    def guess(self, features: Tensor | None, following: Tensor, count: int) -> Tensor:
        return following.new_full((len(following), count), NO_GUESS)

    def expanded(self, times: int) -> NoDrafter:
        return self


class LockstepEagle3:
    """Greedy chain of an EAGLE-3 head, as `realhw.eagle3_drafter.Eagle3Drafter` runs it for one request."""

    def __init__(self, base: LoadedModel, head: Eagle3Head, past: Keys | None = None, num_slots: int = 0) -> None:
        self._base, self._head = base, head
        self.feature_layers = tuple(head.config.feature_layers)
        self._past: Keys = past or []
        self._num_slots = num_slots

    def guess(self, features: Tensor | None, following: Tensor, count: int) -> Tensor:
        if features is None:
            raise InputError("an EAGLE-3 head needs the base's hidden states")
        rows = self._head.features(features.to(self._head.fc.weight.dtype))
        output = self._run(following, rows)[:, -1:]
        committed, slots = list(self._past), self._num_slots
        guesses = [self._choose(output)]
        for _ in range(count - 1):
            output = self._run(guesses[-1], output)
            guesses.append(self._choose(output))
        self._past, self._num_slots = committed, slots
        return torch.cat(guesses[:count], dim=1)

    def expanded(self, times: int) -> LockstepEagle3:
        past = [(k.repeat_interleave(times, dim=0), v.repeat_interleave(times, dim=0)) for k, v in self._past]
        return LockstepEagle3(self._base, self._head, past, self._num_slots)

    def _run(self, tokens: Tensor, features: Tensor) -> Tensor:
        embeddings = self._base.model.get_input_embeddings()(tokens).to(features.dtype)
        out: Tensor = self._head(embeddings, features, self._num_slots, self._past)
        self._num_slots += tokens.shape[1]
        return out

    def _choose(self, output: Tensor) -> Tensor:
        weight = self._base.model.get_output_embeddings().weight
        matrix: Any = lambda rows: torch.nn.functional.linear(rows.to(weight.dtype), weight)  # noqa: E731
        return self._head.choose(self._head.logits(output, matrix))


class EachAlone:
    """One drafter per request that goes by the tokens alone."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, drafters: Sequence[Drafter], histories: Sequence[list[int]]) -> None:
        self._drafters, self._histories = drafters, [list(tokens) for tokens in histories]

    def guess(self, features: Tensor | None, following: Tensor, count: int) -> Tensor:
        guesses = following.new_full((len(self._drafters), count), NO_GUESS)
        for row, (drafter, history) in enumerate(zip(self._drafters, self._histories, strict=True)):
            history += following[row].tolist()
            found = drafter.guess(history, count)
            guesses[row, : len(found)] = following.new_tensor(found)
        return guesses

    def expanded(self, times: int) -> EachAlone:
        drafters = [drafter for drafter in self._drafters for _ in range(times)]
        return EachAlone(drafters, [history for history in self._histories for _ in range(times)])


def make_lockstep_drafter(
    name: DrafterName,
    base: LoadedModel,
    draft_model: str | None,
    seed: int,
    first_tokens: Sequence[int],
    num_positions: int = 0,
) -> LockstepDrafter:
    """For requests whose first tokens, before any `following`, are `first_tokens`; num_positions as `make_drafter`."""
    if name == "eagle3":
        if draft_model is None:
            raise InputError("drafter eagle3 needs draft_model: a head to load")
        return LockstepEagle3(base, load_head_for(draft_model, base))
    drafters = [make_drafter(name, base, draft_model, seed=seed, num_positions=num_positions) for _ in first_tokens]
    return EachAlone(drafters, [[token] for token in first_tokens])


def features_of(passes: list[Any]) -> Tensor | None:
    """All captured hidden states, [B, S, 3·D]; empties the list."""
    if not passes:
        return None
    joined = torch.cat(passes, dim=1)
    passes.clear()
    return joined
