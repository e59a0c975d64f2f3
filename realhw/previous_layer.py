"""The query that a layer would have if its input were that of the layer before: what InfiniGen prefetches with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from traces.errors import InputError


class PreviousLayerProbe:
    """Runs each layer's own norm and query projection on the input of the decoder layer before, first row only.

    The layer's attention module is called without a cache, and `probing` tells the attention function to keep the
    query instead of attending, so that query norms and rotation are the model's own. Source: InfiniGen
    (arXiv 2406.19707), §4.3; the query is whole here, not a part of its columns.
    """

    def __init__(self, layers: Collection[int]) -> None:
        self._layers = set(layers)
        self._inputs: dict[int, Tensor] = {}
        self.probing = False
        self.queries: dict[int, Tensor] = {}
        """By layer, [1, Hq, 1, D] after rotation, of the pass that is running."""

    @contextmanager
    def installed(self, model: Any, active: Callable[[], bool]) -> Iterator[None]:
        """Watch `model`; probes in passes for which `active()` holds. Raises InputError for another architecture."""
        hooks = []
        try:
            for index, layer in enumerate(_decoder_layers(model)):
                hooks.append(layer.register_forward_pre_hook(self._keep(index), with_kwargs=True))
                if index in self._layers and index > 0:
                    hook = self._probe(index, layer.input_layernorm, active)
                    hooks.append(layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True))
            yield
        finally:
            for installed in hooks:
                installed.remove()

    def _keep(self, layer: int) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self._inputs[layer] = hidden[:, :1]

        return hook

    def _probe(self, layer: int, norm: Any, active: Callable[[], bool]) -> Any:
        def hook(attention: Any, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not active():
                return
            if kwargs.get("position_embeddings") is None:
                raise InputError("prev_layer: the model's attention takes no position_embeddings")
            rotation = tuple(part[:, :1] for part in kwargs["position_embeddings"])
            self.probing = True
            try:
                attention.forward(
                    hidden_states=norm(self._inputs[layer - 1]), position_embeddings=rotation, attention_mask=None
                )
            finally:
                self.probing = False

        return hook

    def keep_query(self, layer: int, query: Tensor) -> Tensor:
        """Called by the attention function while `probing`; returns what stands for the attention's output."""
        self.queries[layer] = query
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], query.shape[3])


def _decoder_layers(model: Any) -> Any:
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None or not all(hasattr(layer, "input_layernorm") and hasattr(layer, "self_attn") for layer in layers):
        raise InputError(
            f"prev_layer: {type(model).__name__} has no model.layers with input_layernorm and self_attn, as Llama has"
        )
    return layers
