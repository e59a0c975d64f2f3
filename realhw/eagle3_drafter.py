"""Draft with an EAGLE-3 head beside the base model: it reads the base's hidden states through hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realhw.drafters import Drafter
from realhw.eagle3 import Eagle3Head, Keys, load_head
from realhw.models import LoadedModel, text_config
from traces.errors import InputError


def load_head_for(name_or_path: str, base: LoadedModel) -> Eagle3Head:
    """A head on the base's device. Raises InputError where it was made for another model."""
    head = load_head(name_or_path, base.geometry.num_layers)
    config = text_config(base.model)
    for what, of_head, of_base in (
        ("hidden size", head.config.target_hidden_size, config.hidden_size),
        ("vocabulary", head.config.vocab_size, config.vocab_size),
    ):
        if of_head != of_base:
            raise InputError(f"draft head {name_or_path} is for {what} {of_head}, {base.geometry.name} has {of_base}")
    return head.to(base.model.device)


def decoder_layers(model: Any) -> Any:
    """The list of decoder layers. Raises InputError for a model that keeps them elsewhere."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        raise InputError(f"{type(model).__name__}: an EAGLE-3 head needs a model with model.layers (Llama, Qwen, …)")
    return layers


@contextmanager
def captured(model: Any, feature_layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Collects, per forward pass, the hidden states before `feature_layers` side by side: [B, S, 3·D] each."""
    passes: list[Tensor] = []
    hooks = capture(model, feature_layers, passes)
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()


def capture(model: Any, feature_layers: Sequence[int], passes: list[Tensor]) -> list[Any]:
    """Hooks that append to `passes`; the caller removes them."""
    layers = decoder_layers(model)
    parts: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            parts[layer] = args[0] if args else kwargs["hidden_states"]
            if layer == max(feature_layers):
                passes.append(torch.cat([parts[index] for index in feature_layers], dim=-1))

        return hook

    return [
        layers[layer].register_forward_pre_hook(keep(layer), with_kwargs=True) for layer in sorted(set(feature_layers))
    ]


_CHUNK_TOKENS = 1024


class Eagle3Drafter(Drafter):
    """Greedy chain of an EAGLE-3 head. Sees every forward pass of `model` from its creation until `close`."""

    name = "EAGLE-3-style head"

    def __init__(self, model: Any, head: Eagle3Head, source: str) -> None:
        self._head = head
        self._embed, self._output = model.get_input_embeddings(), model.get_output_embeddings()
        self.settings: dict[str, int | float | str] = {"head": Path(source).name}
        self._passes: list[Tensor] = []
        self._hooks = capture(model, head.config.feature_layers, self._passes)
        self._past: Keys = []
        self._num_slots = 0

    def forget_pass(self) -> None:
        self._passes.pop()

    def close(self) -> None:
        """Stop watching the model."""
        for hook in self._hooks:
            hook.remove()

    @torch.inference_mode()
    def guess(self, tokens: Sequence[int], count: int) -> list[int]:
        """Chain from the last token; the base has run all tokens before it, the drafts of earlier passes aside."""
        new = len(tokens) - 1 - self._num_slots
        rows = sum(part.shape[1] for part in self._passes)
        if new < 1 or rows < new or not count:
            return []
        hidden = torch.cat([part[:1] for part in self._passes], dim=1)[:, :new]
        self._passes.clear()
        features = self._head.features(hidden.to(self._head.fc.weight.dtype))
        following = tokens[self._num_slots + 1 :]
        for start in range(0, new, _CHUNK_TOKENS):  # bounds the attention mask of a long prompt
            part = slice(start, min(start + _CHUNK_TOKENS, new))
            output = self._run(following[part], features[:, part], self._num_slots + start)[:, -1:]
        self._num_slots += new
        committed = list(self._past)
        guesses: list[int] = []
        for distance in range(1, count + 1):
            guesses.append(int(self._head.choose(self._head.logits(output, self._base_output))[0, -1]))
            if distance < count:
                output = self._run(guesses[-1:], output, self._num_slots - 1 + distance)
        self._past = committed
        return guesses

    @property
    def _base_output(self) -> Any:
        weight = self._output.weight
        return lambda rows: torch.nn.functional.linear(rows.to(weight.dtype), weight)

    def _run(self, tokens: Sequence[int], features: Tensor, first_position: int) -> Tensor:
        ids = torch.tensor([list(tokens)], device=features.device)
        out: Tensor = self._head(self._embed(ids).to(features.dtype), features, first_position, self._past)
        return out
