"""Watch a Hugging Face model's attention while it decodes: block scores and softmax mass, never an S x S matrix.

The hook sits in transformers' attention-function registry under one name and delegates the attention itself to the
implementation that the model had.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from realhw.block_scores import block_bounds, block_means, block_sums, bound_scores, mean_scores, token_mass
from realhw.previous_layer import PreviousLayerProbe
from realhw.prompt_mass import PromptMass
from traces.errors import OasisError

ATTENTION_NAME = "oasis_record"
Extra = Literal["mean", "prev_layer", "query_cos", "prefill_mass", "prompt_window_mass"]
"""What is watched besides scores and mass."""
Replacement = Callable[[int, Tensor, Tensor, Tensor, float, float | None], Tensor | None]
"""(layer, query, key, value, scale, softcap) -> attention's output [B, R, Hq, D]; None: the model's own attends."""
_active: AttentionTap | None = None


class RecordError(OasisError):
    """A model whose attention the hook did not see, or saw in a form that it cannot record."""


@dataclass(frozen=True, slots=True)
class StepAttention:
    """One decode step's attention by block size, for the layers recorded there.

    scores: float32 [L_P, H, R, n − 1], the min/max bound of row r's query on each selectable block, maximum over the
    query group, in log2 of softmax weight. Row 0 is the real token, row j the token guessed j positions ahead; all
    against the blocks that exist now. mass: float32 [L_P, H, n], softmax mass of row 0, mean over the query group.
    other_scores: by (block size, `mean` or `prev_layer`), float32 [L_P, H, n − 1] of row 0; for `prev_layer` without
    model layer 0. query_cos: float32 [L, H] of all recorded layers.
    """

    scores: dict[int, NDArray[np.float32]]
    mass: dict[int, NDArray[np.float32]]
    other_scores: dict[tuple[int, str], NDArray[np.float32]]
    query_cos: NDArray[np.float32] | None


class AttentionTap:
    """Collects what every layer's attention does in one forward pass.

    block_layers: model layers to record, by block size in tokens. kv_heads: which heads; None: all.
    prompt_window_tokens: queries in the window of `prompt_window_mass`.
    """

    def __init__(
        self,
        num_layers: int,
        block_layers: Mapping[int, tuple[int, ...]],
        kv_heads: Sequence[int] | None = None,
        extras: Sequence[Extra] = (),
        prompt_window_tokens: int = 32,
    ) -> None:
        self.num_layers = num_layers
        self.block_layers = {size: tuple(layers) for size, layers in sorted(block_layers.items())}
        self.layers = tuple(sorted({layer for layers in self.block_layers.values() for layer in layers}))
        self.extras = frozenset(extras)
        self.delegate = "sdpa"
        self.replacement: Replacement | None = None
        self._heads = slice(None) if kv_heads is None else list(kv_heads)
        self._window = prompt_window_tokens if "prompt_window_mass" in extras else None
        self.probe = PreviousLayerProbe(self.layers if "prev_layer" in extras else ())
        self._prompt: PromptMass | None = None
        self._prefilling = False
        self._kv_len: int | None = None
        self._num_rows = 1
        self._seen: set[int] = set()
        self._queries: dict[int, Tensor] = {}
        self._cos: dict[int, Tensor] = {}
        self._scores: dict[tuple[int, int], Tensor] = {}
        self._mass: dict[tuple[int, int], Tensor] = {}
        self._other: dict[tuple[str, int, int], Tensor] = {}

    @contextmanager
    def installed(self, model: Any) -> Iterator[None]:
        """Route `model`'s attention through this tap until the block ends. One tap at a time."""
        global _active
        if _active is not None:
            raise RecordError("another recording is running in this process")
        self.delegate = model.config._attn_implementation
        mask = ALL_MASK_ATTENTION_FUNCTIONS.get(self.delegate)
        if mask is None:
            raise RecordError(f"attention implementation {self.delegate!r} cannot be watched; load the model with sdpa")
        AttentionInterface.register(ATTENTION_NAME, _attention)
        AttentionMaskInterface.register(ATTENTION_NAME, mask)
        with ExitStack() as stack:
            if "prev_layer" in self.extras:
                stack.enter_context(self.probe.installed(model, lambda: self._kv_len is not None))
            model.set_attn_implementation(ATTENTION_NAME)
            _active = self
            try:
                yield
            finally:
                _active = None
                model.set_attn_implementation(self.delegate)

    def begin_prompt(self, num_tokens: int) -> None:
        """Watch the passes over the prompt's first `num_tokens` tokens, until the first `begin`."""
        self._prefilling = bool(self.extras & {"query_cos", "prefill_mass", "prompt_window_mass"})
        self._queries.clear()
        self._prompt = PromptMass(num_tokens, "prefill_mass" in self.extras, self._window)

    def prompt_masses(self, num_blocks: Mapping[int, int]) -> dict[tuple[int, str], NDArray[np.float32]]:
        """By (block size, name) for the sizes of `num_blocks`: mean mass of the prompt's queries, [L_P, H, n]."""
        out: dict[tuple[int, str], NDArray[np.float32]] = {}
        if self._prompt is None:
            return out
        for name in sorted(self.extras & {"prefill_mass", "prompt_window_mass"}):
            for size, blocks in num_blocks.items():
                rows = [block_sums(self._prompt.of_layer(name, layer), size) for layer in self.block_layers[size]]
                mass = torch.stack(rows).cpu().numpy()
                out[size, name] = np.pad(mass, ((0, 0), (0, 0), (0, blocks - mass.shape[-1])))
        return out

    def begin(self, kv_len: int, num_rows: int) -> None:
        """Record the next forward pass: the real token, whose KV length becomes `kv_len`, and num_rows − 1 guesses."""
        self._prefilling = False
        self._kv_len, self._num_rows = kv_len, num_rows
        for collected in (self._seen, self._scores, self._mass, self._other, self._cos, self.probe.queries):
            collected.clear()

    def finish(self) -> StepAttention:
        """What the pass left. Raises RecordError naming the layers whose attention was not seen."""
        self._kv_len = None
        unseen = sorted(set(range(self.num_layers)) - self._seen)
        if unseen:
            raise RecordError(
                f"attention of {len(unseen)} of {self.num_layers} layers was not seen (layers {_ranges(unseen)}): "
                "the model does not route it through transformers' attention interface"
            )
        scores, mass = {}, {}
        other: dict[tuple[int, str], NDArray[np.float32]] = {}
        for size, layers in self.block_layers.items():
            scores[size] = torch.stack([self._scores[size, layer] for layer in layers]).cpu().numpy()
            mass[size] = torch.stack([self._mass[size, layer] for layer in layers]).cpu().numpy()
            for name in [str(extra) for extra in ("mean", "prev_layer") if extra in self.extras]:
                rows = [self._other[name, size, layer] for layer in layers if layer or name == "mean"]
                shape = (0, *scores[size].shape[1:2], *scores[size].shape[3:])
                other[size, name] = torch.stack(rows).cpu().numpy() if rows else np.empty(shape, np.float32)
        cosines = None
        if "query_cos" in self.extras:
            cosines = torch.stack([self._cos[layer] for layer in self.layers]).cpu().numpy()
        return StepAttention(scores, mass, other, cosines)

    @contextmanager
    def replaced(self, replacement: Replacement) -> Iterator[None]:
        """Let `replacement` attend in the passes inside, which are not recorded."""
        self.replacement = replacement
        try:
            yield
        finally:
            self.replacement = None

    def observe(self, module: Any, query: Tensor, key: Tensor, scale: float, softcap: float | None) -> None:
        """Record layer `module.layer_idx`: query [1, Hq, R, D], key [1, H, kv_len + R − 1, D], after rotation."""
        layer = int(module.layer_idx)
        self._seen.add(layer)
        if layer not in self.layers or (self._kv_len is None and not self._prefilling):
            return
        if self._kv_len is None:
            self._observe_prompt(layer, self._grouped(query, key), self._selected(key), scale, softcap)
            return
        if query.shape[0] != 1 or query.shape[2] != self._num_rows:
            shape = tuple(query.shape)
            raise RecordError(f"layer {layer}: query has shape {shape}, expected batch 1 and {self._num_rows} rows")
        if key.shape[2] != self._kv_len + self._num_rows - 1:
            raise RecordError(
                f"layer {layer}: the cache holds {key.shape[2]} keys, expected {self._kv_len + self._num_rows - 1}"
            )
        keys, rows = self._selected(key)[:, : self._kv_len], self._grouped(query, key)
        if "query_cos" in self.extras:
            self._cos[layer] = torch.cosine_similarity(rows[:, :, 0], self._queries[layer], dim=-1).mean(dim=1)
            self._queries[layer] = rows[:, :, 0]
        expected = self.probe.queries.get(layer)
        mass = token_mass(rows[:, :, 0], keys, scale, softcap)
        sizes = [size for size, layers in self.block_layers.items() if layer in layers]
        for size, (low, high) in block_bounds(keys, sizes).items():
            self._mass[size, layer] = block_sums(mass, size)
            self._scores[size, layer] = bound_scores(rows, low, high, scale, softcap)
            if "mean" in self.extras:
                means = block_means(keys, size)
                self._other["mean", size, layer] = mean_scores(rows[:, :, 0], means, scale, softcap)
            if expected is not None:
                probed = self._grouped(expected, key)
                self._other["prev_layer", size, layer] = bound_scores(probed, low, high, scale, softcap)[:, 0]

    def _observe_prompt(self, layer: int, rows: Tensor, keys: Tensor, scale: float, softcap: float | None) -> None:
        self._queries[layer] = rows[:, :, -1]
        if self._prompt is not None and self.extras & {"prefill_mass", "prompt_window_mass"}:
            self._prompt.add(layer, rows, keys, scale, softcap)

    def _selected(self, key: Tensor) -> Tensor:
        """Keys [H, S, D] of the recorded heads."""
        return key[0, self._heads].float()

    def _grouped(self, query: Tensor, key: Tensor) -> Tensor:
        """Query rows [H, G, R, D] of the recorded KV heads."""
        rows = query[0].float()
        return rows.view(key.shape[1], -1, rows.shape[1], rows.shape[2])[self._heads]


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Any:
    if _active is None:
        raise RecordError("the recording attention ran without a recording")
    if kwargs.get("s_aux") is not None:
        raise RecordError("attention sinks that are no tokens (s_aux) are not supported")
    if _active.probe.probing:
        return _active.probe.keep_query(int(module.layer_idx), query), None
    scale = kwargs.get("scaling") or key.shape[3] ** -0.5
    if _active.replacement is not None:
        out = _active.replacement(int(module.layer_idx), query, key, value, scale, kwargs.get("softcap"))
        if out is not None:
            return out, None
    _active.observe(module, query, key, scale, kwargs.get("softcap"))
    if _active.delegate == "eager":
        delegate = sys.modules[type(module).__module__].eager_attention_forward
    else:
        delegate = ALL_ATTENTION_FUNCTIONS[_active.delegate]
    return delegate(module, query, key, value, attention_mask, **kwargs)


def _ranges(values: list[int]) -> str:
    """1, 2, 3, 7 -> '1-3, 7'."""
    parts: list[list[int]] = []
    for value in values:
        if parts and value == parts[-1][1] + 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
